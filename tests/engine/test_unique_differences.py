"""The differences between a unique index and `UNIQUE … DEFERRABLE INITIALLY IMMEDIATE`:
docs/architecture.md#uniqueness.

Each difference is seen on both sides, so that the list is neither too long nor too short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.engine import steps
from tests.engine.twins import INDEX, Twins
from tests.engine.unique_keys import KINDS

pytestmark = pytest.mark.sample(1)

INT = KINDS[0]
# `a` fires before the capture, and after PostgreSQL's own check.
CORRECTING = (
    "CREATE FUNCTION correct() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "UPDATE t SET k = 100 + NEW.id WHERE id = NEW.id AND v = 77; RETURN NULL; END $$",
    "CREATE TRIGGER {name} AFTER INSERT OR UPDATE ON t FOR EACH ROW WHEN (NEW.v = 77 AND NEW.k < 100) "
    "EXECUTE FUNCTION correct()",
)
# A function that a statement calls, and that catches the error.
NESTED = (
    "CREATE FUNCTION nested(i int, n int) RETURNS text LANGUAGE plpgsql AS $$ BEGIN "
    "INSERT INTO t VALUES (i, 0, n, 0); RETURN 'inserted'; "
    "EXCEPTION WHEN unique_violation THEN RETURN 'refused'; END $$",
)


@dataclass(frozen=True)
class Difference:
    """A statement with two outcomes: SQLSTATEs, or '' for success. ddl: for the statement. first: runs before it."""

    statement: str
    ours: str
    theirs: str
    ddl: tuple[str, ...] = ()
    first: str = ""


DIFFERENCES = {
    # Impossible: the unique index isn't on the table itself.
    "ON CONFLICT of the key": Difference(
        "INSERT INTO t VALUES (21, 0, 1, 0) ON CONFLICT (k) DO NOTHING", "42P10", "55000"
    ),
    "ON CONFLICT of anything": Difference(
        "INSERT INTO t VALUES (21, 0, 1, 0) ON CONFLICT DO NOTHING", "23505", "55000"
    ),
    "SET CONSTRAINTS": Difference(f"SET CONSTRAINTS {INDEX} DEFERRED", "42704", ""),
    "a foreign key to it": Difference("CREATE TABLE child (k int REFERENCES t (k))", "42830", "55000"),
    # A trigger that corrects the key. Its name sorts before the capture's.
    "an AFTER trigger corrects the key": Difference(
        "INSERT INTO t VALUES (21, 0, 1, 77)", "", "23505", tuple(one.format(name="a") for one in CORRECTING)
    ),
    # Events of the outer statement come at its end: a nested statement doesn't meet its rows yet.
    "a nested statement meets the outer one's row": Difference(
        "INSERT INTO t VALUES (21, 0, 50, 0) RETURNING nested(22, 50)", "23505", "", NESTED
    ),
    "a nested statement, and the outer one's row goes": Difference(
        "WITH a AS (UPDATE t SET k = 50 WHERE id = 1 RETURNING nested(22, 50) AS told) "
        "SELECT 1 / (told = 'refused')::int "
        "FROM a",
        "22012",
        "",
        NESTED,
    ),
}


@pytest.fixture
def no_twins_left() -> Iterator[list[Twins]]:
    made: list[Twins] = []
    yield made
    for twins in made:
        twins.close()


def both(twins: Twins, statement: str) -> tuple[str, str]:
    """The outcomes of a statement on both sides. Nothing is committed."""
    ended = []
    for side in (twins.ours, twins.theirs):
        ended.append(side.run(statement).error)
        side.session.rollback()
    return ended[0], ended[1]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_is_as_it_is_said(dsn: str, no_twins_left: list[Twins], difference: str) -> None:
    of = DIFFERENCES[difference]
    twins = Twins(dsn, INT, ddl=of.ddl)
    no_twins_left.append(twins)
    twins.publish()
    assert both(twins, of.statement) == (of.ours, of.theirs)
    twins.check()


@pytest.mark.parametrize("name", ["A", "z"])
def test_triggers_with_other_names_make_no_difference(dsn: str, no_twins_left: list[Twins], name: str) -> None:
    """Triggers that come first on both sides, and triggers that come after the capture."""
    ddl = tuple(one.format(name=f'"{name}"') for one in CORRECTING)
    twins = Twins(dsn, INT, ddl=ddl)
    no_twins_left.append(twins)
    for _ in range(2):
        assert both(twins, "INSERT INTO t VALUES (21, 0, 1, 77)") == (("", "") if name == "A" else ("23505", "23505"))
        assert both(twins, "INSERT INTO t VALUES (21, 0, 1, 77), (22, 1, 101, 0)")[0] in ("", "23505")
        if twins.direct:
            twins.publish()
    twins.check()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_duplicate_that_is_younger_than_the_snapshot_is_40001(
    dsn: str, no_twins_left: list[Twins], isolation: str
) -> None:
    """The retried transaction is refused. PostgreSQL's own check looks past the snapshot."""
    twins = Twins(dsn, INT)
    no_twins_left.append(twins)
    twins.publish()
    twins.begin(isolation)
    for schema in ("public", "twin"):
        steps.run_sql(dsn, f"INSERT INTO {schema}.t VALUES (21, 0, 50, 0)")
    ours, theirs = both(twins, "INSERT INTO t VALUES (22, 1, 50, 0)")
    assert ours == "40001"
    assert theirs in ("23505", "40001")
    assert both(twins, "INSERT INTO t VALUES (22, 1, 50, 0)") == ("23505", "23505")


def test_a_row_that_is_only_locked_is_waited_for(dsn: str, no_twins_left: list[Twins]) -> None:
    """The transaction that has locked the holder's row may be about to change its key."""
    twins = Twins(dsn, INT)
    no_twins_left.append(twins)
    twins.publish()
    for schema in ("public", "twin"):
        locker = steps.session(dsn)
        steps.sql(locker, f"SELECT FROM {schema}.t WHERE id = 1 FOR UPDATE")
        no_twins_left[-1].watcher.rollback()
        side = twins.ours if schema == "public" else twins.theirs
        steps.sql(side.session, "SET LOCAL lock_timeout = '100ms'")
        assert side.run("INSERT INTO t VALUES (21, 0, 1, 0)").error == ("55P03" if schema == "public" else "23505")
        side.session.rollback()
        locker.close()


def test_two_rows_of_one_deferred_primary_key_may_share_a_key_until_it_is_checked(
    dsn: str, no_twins_left: list[Twins]
) -> None:
    """Both rows have one entry. The primary key refuses them at the end."""
    twins = Twins(dsn, INT, deferrable=True)
    no_twins_left.append(twins)
    twins.publish()
    for side in (twins.ours, twins.theirs):
        steps.sql(side.session, "SET CONSTRAINTS t_pkey DEFERRED")
    ours, theirs = (side.run("INSERT INTO t VALUES (1, 1, 1, 0)").error for side in (twins.ours, twins.theirs))
    assert (ours, theirs) == ("", "23505")
    with pytest.raises(steps.psycopg2.errors.UniqueViolation):
        twins.ours.session.commit()
    twins.theirs.session.rollback()
    twins.check()
