"""The capture in a shard: whatever a transaction does to an entry, it touches that entry, and no other one."""

from __future__ import annotations

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.errors import InvalidInput
from airflow_roir.shards.capture import outbox
from tests.engine.steps import sql
from tests.engine.test_dml import SHAPES
from tests.shards.apart import add_all, begin
from tests.shards.captured import Captured, capture
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(3)

# Written so, they change no entry.
NOTHING = ("nothing changes", "only what the index has not")
TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
ROWS = "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 20) i"
PARTITIONED = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (MINVALUE) TO (10)",
    "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (MAXVALUE)",
)


def names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def play(shape: str, made: Captured, isolation: str = "READ COMMITTED") -> dict[str, object]:
    """Every write of a shape, each on the same rows; what each one has missed, by its name."""
    of = SHAPES[shape]
    found: dict[str, object] = {}
    user = made.session()
    for name, write in of.writes.items():
        sql(user, f"DELETE FROM t; {of.refill}")
        user.commit()
        before = made.look()
        sql(user, f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        try:
            sql(user, write) if isinstance(write, str) else write(user)
            user.commit()
        except psycopg2.errors.FeatureNotSupported:
            user.rollback()
        if missed := made.missed(before):
            found[name] = missed
        if name in NOTHING and made.touched(before.version):
            found[name] = "touched something"
    user.close()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_write_touches_what_it_changes(shards: Make, shape: str, isolation: str) -> None:
    of = SHAPES[shape]
    made = capture(shards(1, *of.ddl), names(of.definition.get("keys", "k")), names(of.definition.get("include", "v")))
    assert play(shape, made, isolation) == {}
    assert made.problem() is None


# Broken variants of the row trigger's function: a piece of its text, and the replacement.
BROKEN: dict[str, tuple[str, str]] = {
    "the entry that was is not touched by an update": (
        "*<> ROW(NEW.k, NEW.id)::record",
        "*<> ROW(OLD.k, OLD.id)::record",
    ),
    "what is included is no change": ("ROW(OLD.k, OLD.id, OLD.v)", "ROW(OLD.k, OLD.id, NEW.v)"),
    "a delete touches nothing": ("IF TG_OP = 'INSERT'", "IF TG_OP = 'DELETE' THEN RETURN NULL; ELSIF TG_OP = 'INSERT'"),
    "a touch keeps its version": ("version = nextval('roir_shard.version')", "version = x.version"),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("variant", BROKEN)
def test_the_sweep_finds_a_broken_capture(shards: Make, variant: str) -> None:
    made = capture(shards(1, *SHAPES["plain"].ddl))
    name = outbox.touch_function(made.feed.outbox)
    text = str(made.shards.ask(f"SELECT pg_get_functiondef('{name}'::regproc)", shard="s0")[0][0]).replace('"', "")
    was, becomes = BROKEN[variant]
    table = outbox.table(made.feed.outbox)
    broken = text.replace(was, becomes.replace("x.version", f"{table}.version".split(".", 1)[1]))
    assert broken != text
    made.shards.run(broken)
    assert play("plain", made) != {}
    assert made.problem() is not None


@pytest.mark.parametrize(
    "kind",
    [
        "row",
        "truncate",
        "leaf",
        "function",
        "emptied",
        "narrowed",
        "names",
        "number",
        "key",
        "unlogged",
        "unlogged leaf",
    ],
)
def test_a_capture_that_somebody_has_changed_is_noticed(shards: Make, kind: str) -> None:
    made = capture(shards(1, *(PARTITIONED if "leaf" in kind else (TABLE,))))
    name = made.feed.outbox
    assert made.problem() is None
    change = {
        "row": f"ALTER TABLE t DISABLE TRIGGER {outbox.trigger(name)}",
        "truncate": f"DROP TRIGGER {outbox.trigger(name)}_t ON t",
        "leaf": f"ALTER TABLE t2 DISABLE TRIGGER {outbox.trigger(name)}_t",
        "function": f"ALTER FUNCTION {outbox.touch_function(name)}() SECURITY INVOKER",
        "emptied": f"CREATE OR REPLACE FUNCTION {outbox.emptied_function(name)}() RETURNS trigger LANGUAGE plpgsql "
        "SECURITY DEFINER AS 'BEGIN RETURN NULL; END'",
        "narrowed": f"CREATE OR REPLACE TRIGGER {outbox.trigger(name)} AFTER INSERT ON t FOR EACH ROW "
        f"EXECUTE FUNCTION {outbox.touch_function(name)}(); ALTER TABLE t ENABLE ALWAYS TRIGGER {outbox.trigger(name)}",
        # Columns are captured by their names: the touches are of other entries.
        "names": "ALTER TABLE t RENAME k TO x; ALTER TABLE t RENAME v TO k; ALTER TABLE t RENAME x TO v",
        "number": "ALTER TABLE t RENAME k TO x; ALTER TABLE t ADD k text",
        "key": "ALTER TABLE t DROP CONSTRAINT t_pkey",
        "unlogged": "ALTER TABLE t SET UNLOGGED",
        "unlogged leaf": "ALTER TABLE t2 SET UNLOGGED",
    }[kind]
    made.shards.run(change)
    assert made.problem() is not None


def test_what_keeps_the_capture_whole_is_no_problem(shards: Make) -> None:
    made = capture(shards(1, TABLE))
    made.shards.run(
        "CREATE TABLE child () INHERITS (t)",
        "ALTER TABLE t RENAME k TO x; ALTER TABLE t RENAME x TO k",
        "ALTER TABLE t ADD more int; ALTER TABLE t RENAME more TO other; ALTER TABLE t DROP other",
        "ALTER TABLE t RENAME TO other",
    )
    assert made.problem() is None


def test_a_leaf_is_not_truncated_in_a_transaction_that_may_not_see_all_its_rows(shards: Make) -> None:
    made = capture(shards(1, *PARTITIONED))
    made.shards.run(ROWS)
    old, other = made.session(), made.session()
    old.set_session(isolation_level="REPEATABLE READ")
    sql(old, "SELECT 1")
    sql(other, "INSERT INTO t VALUES (-1, 'unseen', 1)")
    other.commit()
    before = made.look()
    with pytest.raises(psycopg2.errors.FeatureNotSupported, match="READ COMMITTED"):
        sql(old, "TRUNCATE t1")
    old.rollback()
    assert made.look() == before
    sql(other, "TRUNCATE t1")
    other.commit()
    assert made.missed(before) == []


def test_a_writer_needs_no_right_on_what_captures_and_gets_none(shards: Make) -> None:
    made = capture(shards(1, TABLE))
    made.shards.run(
        "DROP ROLE IF EXISTS captured_writer",
        "CREATE ROLE captured_writer",
        "GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON t TO captured_writer",
    )
    user = made.session()
    before = made.look()
    sql(user, f"SET ROLE captured_writer; {ROWS}; UPDATE t SET id = -id; DELETE FROM t WHERE id = -3")
    user.commit()
    assert made.missed(before) == []
    for statement in (
        f"SELECT FROM {outbox.table(made.feed.outbox)}",
        f"SELECT FROM {outbox.view(made.feed.outbox)}",
        "SELECT FROM roir_shard.outbox",
        "SELECT nextval('roir_shard.version')",
        f"CREATE TRIGGER x AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION {outbox.touch_function(made.feed.outbox)}()",
    ):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            sql(user, f"SET ROLE captured_writer; {statement}")
        user.rollback()
    sql(user, "SET ROLE captured_writer; TRUNCATE t")
    user.commit()
    assert made.look().emptied > 0
    user.close()
    made.shards.run("DROP OWNED BY captured_writer", "DROP ROLE captured_writer")


NAME = '"%s it\'\'s ""x"" $roir$ é %"'.replace("''", "'")


@pytest.mark.parametrize("partitioned", [False, True])
def test_columns_may_be_called_anything_and_equal_values_may_differ(shards: Make, partitioned: bool) -> None:
    by = " PARTITION BY RANGE (n)" if partitioned else ""
    table = f'CREATE TABLE "%t" (n numeric PRIMARY KEY, {NAME} float8, v text){by}'
    leaf = ('CREATE TABLE "%leaf" PARTITION OF "%t" DEFAULT',) if partitioned else ()
    name = NAME[1:-1].replace('""', '"')
    made = capture(shards(1, table, *leaf), (name,), ("v",), 'public."%t"')
    user = made.session()
    for statement in (
        "INSERT INTO \"%t\" VALUES (1.0, 0, 'a'), (2, NULL, 'a'), (3, 'NaN', NULL)",
        f'UPDATE "%t" SET n = 1.00 WHERE n = 1; UPDATE "%t" SET {NAME} = \'-0\' WHERE n = 1',
        f'UPDATE "%t" SET {NAME} = NULL WHERE n = 3; UPDATE "%t" SET {NAME} = 1 WHERE n = 2',
        'TRUNCATE "%t"',
        "INSERT INTO \"%t\" VALUES (1.000, NULL, 'b')",
    ):
        before = made.look()
        sql(user, statement)
        user.commit()
        assert made.missed(before) == []
    assert made.problem() is None


def test_a_capture_ends_without_a_trace_and_may_end_twice(shards: Make) -> None:
    made = capture(shards(1, *PARTITIONED))
    made.shards.run("ALTER TABLE t DETACH PARTITION t2")
    for _ in range(2):
        outbox.remove(made.database, made.feed.outbox, 500, 30.0)
    found = made.shards.ask(
        "SELECT count(*) FROM pg_trigger WHERE tgname ~ '^roir' UNION ALL "
        "SELECT count(*) FROM pg_class WHERE relname ~ '^o_' UNION ALL SELECT count(*) FROM roir_shard.outbox "
        "UNION ALL SELECT count(*) FROM pg_proc WHERE proname ~ '^o_'",
        shard="s0",
    )
    assert found == [(0,)] * 4
    made.shards.run("INSERT INTO t VALUES (1, 'a', 1)", "INSERT INTO t2 VALUES (11, 'a', 1)", "TRUNCATE t, t2")


def test_a_shard_that_publishes_all_tables_is_refused(shards: Make) -> None:
    made = add_all(shards(2, TABLE))
    made.run("CREATE PUBLICATION everything FOR ALL TABLES", only="s1")
    with pytest.raises(InvalidInput, match=r"publication .*everything.* in roir_shard, too"):
        begin(made)
    begin(made, ignore_publications=True)
