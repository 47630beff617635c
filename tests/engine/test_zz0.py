import pytest
from tests.engine import steps, compacting
from tests.engine.compacting import *
from airflow_roir.engine import health
from airflow_roir.engine.database import execute
def test_a(dsn, database):
    steps.make_table(dsn, 2000)
    steps.make_index(database, keys="k,v", segments=4)
    db = small(dsn)
    n=[0]
    def between(stage):
        n[0]+=1
        print(stage, segments(dsn))
        i=n[0]
        run_sql(dsn, f"update t set v=v+1 where id%50={i}", f"delete from t where id={i*7}", f"insert into t values({10000+i},'2',{i})", f"update t set k=((k::int+1)%5)::text where id%60={i}")
        steps.assert_exact(database)
    t=time.time()
    compact(db, act('rewrite',2), act('merge',3,4), act('split',1,parts=3), act('rewrite',0), between=between)
    print(time.time()-t)
    print(left_over(dsn), segments(dsn))
    with database.transaction() as c: print(health.warnings(c))
import time
