"""Writes that come of writes: foreign keys' cascades and users' own triggers, on the row at hand and on others."""

from __future__ import annotations

import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine.stages import MODES, follow

TREE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int, parent int, "
    "CONSTRAINT up FOREIGN KEY (parent) REFERENCES t ON DELETE {delete} ON UPDATE {update})"
)
TREE_ROWS = "INSERT INTO t SELECT i, (i % 5)::text, i, nullif(i / 3, 0) FROM generate_series(1, 60) i"
TREE_WRITES = {
    "delete a root": "DELETE FROM t WHERE id = 1",
    "delete several, parents and children": "DELETE FROM t WHERE id IN (2, 6, 7, 20)",
    "move a root's key": "UPDATE t SET id = 1001 WHERE id = 1",
    "move all primary keys": "UPDATE t SET id = id + 1000",
    "move primary keys and keys": "UPDATE t SET id = id + 1000, k = k || 'x', v = -v WHERE id < 9",
    "delete, then the rest moves": "DELETE FROM t WHERE id = 3; UPDATE t SET id = -id WHERE id < 9",
    "delete and insert in one statement": (
        "WITH gone AS (DELETE FROM t WHERE id = 4 RETURNING id) INSERT INTO t SELECT id + 900, 'n', 1 FROM gone"
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("delete", "update"), [("CASCADE", "CASCADE"), ("SET NULL", "SET NULL"), ("SET DEFAULT", "CASCADE")]
)
@pytest.mark.parametrize("key", ["parent", "k"])
def test_cascades_within_one_table_are_followed(
    database: Database, dsn: str, mode: str, delete: str, update: str, key: str
) -> None:
    run_sql(dsn, TREE.format(delete=delete, update=update), TREE_ROWS)
    follow(database, dsn, mode, TREE_WRITES, TREE_ROWS, keys=key, include="v" if key == "parent" else "parent, v")


CHILD_WRITES = {
    "delete parents": "DELETE FROM p WHERE id IN (1, 2)",
    "move parents": "UPDATE p SET id = id + 100",
    "move one and delete another": "UPDATE p SET id = 103 WHERE id = 3; DELETE FROM p WHERE id = 4",
    "write to child and parent in one statement": (
        "WITH a AS (UPDATE t SET k = 'both' WHERE id < 30) UPDATE p SET id = id + 200 WHERE id = 5"
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("action", ["CASCADE", "SET NULL"])
@pytest.mark.parametrize("when", ["NOT DEFERRABLE", "DEFERRABLE INITIALLY DEFERRED"])
def test_cascades_from_another_table_are_followed(
    database: Database, dsn: str, mode: str, action: str, when: str
) -> None:
    refill = (
        "INSERT INTO p SELECT i FROM generate_series(1, 9) i; "
        "INSERT INTO t SELECT i, (i % 5)::text, i, 1 + i % 9 FROM generate_series(1, 60) i"
    )
    run_sql(
        dsn,
        "CREATE TABLE p (id int PRIMARY KEY)",
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int, "
        f"p int REFERENCES p ON DELETE {action} ON UPDATE CASCADE {when})",
    )
    follow(database, dsn, mode, CHILD_WRITES, "DELETE FROM p; " + refill, keys="p, k")


# Actions of a user's own row trigger on the table that it fires for. The trigger acts at most nine times per statement,
# which ends the recursion of a deferred one.
ACTIONS = {
    "changes the same row": "UPDATE t SET k = k || '+', v = v + 1 WHERE id = coalesce(NEW.id, OLD.id)",
    "changes what is included of the same row": "UPDATE t SET v = v + 1000 WHERE id = coalesce(NEW.id, OLD.id)",
    "changes the other rows of the statement": "UPDATE t SET k = 'others' || v WHERE id <> coalesce(NEW.id, OLD.id)",
    "changes the next row": "UPDATE t SET k = 'next', v = -v WHERE id = coalesce(NEW.id, OLD.id) + 1",
    "deletes the same row": "DELETE FROM t WHERE id = coalesce(NEW.id, OLD.id)",
    "deletes the next row": "DELETE FROM t WHERE id = coalesce(NEW.id, OLD.id) + 1",
    "moves the primary key of the same row": "UPDATE t SET id = -id WHERE id = coalesce(NEW.id, OLD.id) AND id > 0",
    "replaces the same row": (
        "DELETE FROM t WHERE id = coalesce(NEW.id, OLD.id); "
        "INSERT INTO t VALUES (coalesce(NEW.id, OLD.id), 'replaced', 0)"
    ),
    "writes and takes it back": (
        "BEGIN UPDATE t SET k = 'vain'; RAISE 'no'; EXCEPTION WHEN raise_exception THEN NULL; END"
    ),
}
TRIGGER_WRITES = {
    "insert": "INSERT INTO t SELECT i, 'i', i FROM generate_series(70, 75) i ON CONFLICT DO NOTHING",
    "update of keys": "UPDATE t SET k = k || 'x' WHERE id BETWEEN 5 AND 12",
    "update of what is included": "UPDATE t SET v = v + 1 WHERE id BETWEEN 15 AND 22",
    "delete": "DELETE FROM t WHERE id BETWEEN 25 AND 32",
    "several statements": (
        "UPDATE t SET k = 'a' WHERE id = 40; UPDATE t SET k = 'b' WHERE id IN (40, 41); DELETE FROM t WHERE id = 40"
    ),
    "rolled back to a savepoint": (
        "SAVEPOINT s; UPDATE t SET k = 'gone' WHERE id < 9; ROLLBACK TO s; UPDATE t SET v = v + 1 WHERE id < 9; "
        "DELETE FROM t WHERE id = 50"
    ),
}
ROWS = "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i"


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trigger", ["AFTER a", "AFTER z", "BEFORE a", "DEFERRED a"])
def test_triggers_that_write_to_their_own_table_are_followed(
    database: Database, dsn: str, mode: str, trigger: str
) -> None:
    """`a` fires before the capture trigger, `z` after it; a deferred one at the end of the transaction."""
    when, name = trigger.split()
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        ROWS,
        "CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF pg_trigger_depth() < 2 AND current_setting('test.rest', true) > '0' THEN "
        "PERFORM set_config('test.rest', (current_setting('test.rest')::int - 1)::text, true); "
        "CASE current_setting('test.action', true) "
        + " ".join(f"WHEN '{action}' THEN {body};" for action, body in ACTIONS.items())
        + " ELSE NULL; END CASE; END IF; RETURN coalesce(NEW, OLD); END $$",
        f"CREATE {'CONSTRAINT ' if when == 'DEFERRED' else ''}TRIGGER {name} "
        f"{when if when == 'BEFORE' else 'AFTER'} INSERT OR UPDATE OR DELETE ON t "
        f"{'DEFERRABLE INITIALLY DEFERRED' if when == 'DEFERRED' else ''} FOR EACH ROW EXECUTE FUNCTION act()",
    )
    # A BEFORE trigger may not write to the very row that its statement writes to.
    actions = [action for action in ACTIONS if when != "BEFORE" or "next" in action or "vain" in ACTIONS[action]]
    setting = "SET LOCAL test.rest = 9; SET LOCAL test.action = '{}'; "
    writes = {
        f"a trigger that {action}, on {write}": setting.format(action) + statement
        for action in actions
        for write, statement in TRIGGER_WRITES.items()
        if when != "BEFORE" or write in ("insert", "several statements")
    }
    follow(database, dsn, mode, writes, ROWS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_the_row_that_a_before_trigger_made_is_what_is_indexed(database: Database, dsn: str, mode: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        ROWS,
        "CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.id % 7 = 0 THEN RETURN NULL; "
        "END IF; NEW.k = 'made ' || NEW.k; NEW.v = NEW.v + 1; RETURN NEW; END $$",
        "CREATE TRIGGER change BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION change()",
    )
    follow(database, dsn, mode, TRIGGER_WRITES, ROWS)
