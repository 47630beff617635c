import pytest
from sqlalchemy import event
from tests.engine import steps, compacting
from tests.engine.compacting import *
from airflow_roir.engine import health
from airflow_roir.engine.database import execute
from airflow_roir.engine.verify.compare import verify

KEYS = {
 'int': "i % 50",
 'bigint': "(i*1000000007)::bigint",
 'numeric': "(i%20)::numeric * CASE WHEN i%2=0 THEN 1.0 ELSE 1.00 END",
 'float8': "CASE i%4 WHEN 0 THEN -0.0 WHEN 1 THEN 0.0 WHEN 2 THEN 'NaN' ELSE i/7.0 END::float8",
 'text': "CASE i%5 WHEN 0 THEN 'a''b' WHEN 1 THEN 'x%sy%(a)s' WHEN 2 THEN E'back\\\\slash' WHEN 3 THEN '$roir$' || i ELSE '' END || (i%7)",
 'varchar(20)': "'k' || i%30",
 'char(8)': "'k' || i%30",
 'name': "('n' || i%30)::name",
 '"char"': "chr(65+i%20)::\"char\"",
 'uuid': "md5((i%40)::text)::uuid",
 'bytea': "decode(md5((i%40)::text),'hex')",
 'date': "date '2020-01-01' + i%40",
 'timestamptz': "timestamptz '2020-01-01' + i%40 * interval '1 hour'",
 'interval': "i%40 * interval '1 hour'",
 'boolean': "i%2=0",
 'mood': "(ARRAY['sad','ok','happy'])[1+i%3]::mood",
 'int[]': "ARRAY[i%5, i%3, NULL]",
 'pair': "ROW(i%5, (i%3)::text)::pair",
 'posint': "(i%40)::posint",
 'shorttext': "('p' || i%40)::shorttext",
 'numrange': "numrange(i%10, i%10+3)",
 'inet': "('10.0.0.' || i%40)::inet",
 'money': "(i%40)::money",
 'bit(8)': "(i%40)::bit(8)",
 'time': "time '00:00' + i%40 * interval '1 minute'",
 'jsonb': "to_jsonb(i%40)",
 'long': "repeat(chr(65+i%26),2000)||(i%30)",
}
@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("key", list(KEYS))
def test_types(dsn, key, nulls):
    run_sql(dsn, "create type mood as enum ('sad','ok','happy')", "create type pair as (a int, b text)", "create domain posint as int check (value>=0)", "create domain shorttext as text check (length(value)<20)")
    type_ = {'long':'text'}.get(key,key)
    val = KEYS[key]
    if nulls: val = f"CASE WHEN i%9<>0 THEN {val} END"
    run_sql(dsn, f"create table t (id int primary key, k {type_}, v text)", f"insert into t select i, {val}, repeat('v',i%100) from generate_series(1,600) i", "analyze t")
    db = small(dsn, 50)
    seen=[]
    class N(list):
        def append(self, x): seen.append(x)
        def extend(self, x): seen.extend(x)
        def __delitem__(self, *a): pass
    def conn(c, _r):
        cur=c.cursor(); cur.execute("set client_min_messages=debug1"); cur.close(); c.commit(); c.notices=N()
    steps.make_index(db, keys="k", include="v", segments=3)
    event.listen(db.engine, "connect", conn)
    db.engine.dispose()
    segs = segments(dsn)
    print(key, segs)
    writes = lambda s: run_sql(dsn, f"update t set v=v||'!' where id%37=1", "delete from t where id%41=3", f"insert into t select id+1000, k, v from t where id%43=2 on conflict do nothing")
    n=len(segs)-1
    acts=[act('split', segs[1], parts=3)]
    if n>=3: acts.append(act('merge', segs[2], segs[3]))
    elif n==2: acts.append(act('rewrite', segs[2]))
    acts.append(act('rewrite', 0))
    k=[0]
    def between(s):
        k[0]+=1
        if k[0]%3==0: writes(s)
    compact(db, *acts, between=between)
    with db.transaction() as c:
        rows=execute(c,"select ordinal,segments,parts,cuts,status,note from roir.compaction_unit order by 1").all()
    print(rows)
    assert all(r.status=='done' for r in rows)
    steps.assert_exact(db)
    writes('')
    steps.assert_exact(db)
    assert left_over(dsn)==[]
    with db.transaction() as c: assert health.warnings(c)==[]
    msgs=[m.strip() for m in seen if 'verifying' in m]
    print(len(msgs), msgs, [m.strip() for m in seen if 'implied' in m][:6])
    assert len(msgs)==len(set(msgs)) and not any("s000" in m for m in msgs)
    segs=segments(dsn)
    if len(segs)>2:
        compact(db, act('merge', *segs[1:]))
        steps.assert_exact(db)
        msgs=[m.strip() for m in seen if "verifying" in m]; assert len(msgs)==len(set(msgs)) and not any("s000" in m for m in msgs)
