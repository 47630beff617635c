"""The checks of a unique index can fail: a short schedule finds each broken variant of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg2
import psycopg2.extras
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.errors import RoirError
from tests.conftest import run_sql
from tests.engine import unique_variants as variants
from tests.engine.machine import KeptSessions
from tests.engine.steps import session, sql
from tests.engine.test_variants import PUBLISHED, SEALED, advance
from tests.engine.unique_machine import UniqueMachine
from tests.engine.unique_variants import FOUND, VARIANTS, Variant
from tests.engine.users import TOUCH, Write

pytestmark = pytest.mark.sample(1, 99)

Schedule = Callable[[UniqueMachine], None]
BUILT = 1


@contextmanager
def begin(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[UniqueMachine]:
    run_sql(dsn, TOUCH)
    monkeypatch.setattr(UniqueMachine, "database", KeptSessions(dsn), raising=False)
    state = UniqueMachine()
    yield state
    state.database.engine.dispose()


def write(state: UniqueMachine, statement: str, by: int = 0, commit: bool = True) -> None:
    """Runs a user's statement, which must succeed. The key of row i is i at first."""
    user = state.users.sessions[by]
    try:
        sql(user, statement.replace("{t}", state.table))
    except psycopg2.Error as error:
        user.rollback()
        raise AssertionError(f"duplicate key, it says (U4): {error}") from None
    if commit:
        user.commit()
    state.is_right()


def refused(state: UniqueMachine, statement: str, by: int = 0) -> None:
    """Runs a user's statement that may be refused. The machine then finds what is wrong."""
    user = state.users.sessions[by]
    with suppress(psycopg2.Error):
        sql(user, statement.replace("{t}", state.table))
        user.commit()
    user.rollback()
    state.is_right()


def keys_change_rows_while_it_is_built(state: UniqueMachine) -> None:
    """Row 1's key goes to a new row, before its segment is sealed and after; no two rows share a key."""
    state.start(published=0, phases=0)
    state.work(number=0, meanwhile=[])  # copies the first two rows
    write(state, "UPDATE {t} SET k = 'was 1' WHERE id = 1")
    write(state, "UPDATE {t} SET k = '1' WHERE id = 12")
    advance(state)
    write(state, "UPDATE {t} SET k = 'was 4' WHERE id = 4")
    write(state, "INSERT INTO {t} VALUES (21, '4', 0)")
    write(state, "DELETE FROM {t} WHERE id = 2")
    write(state, "UPDATE {t} SET k = '2' WHERE id = 3")
    advance(state, 1)
    assert state.row.phase == "fold", "sealed with a stale copy (U2)"
    write(state, "DELETE FROM {t} WHERE id = 5")
    write(state, "INSERT INTO {t} VALUES (25, '5', 0)")
    advance(state, 3)


def a_pair_beside_antimatter(state: UniqueMachine) -> None:
    """Two rows get one key, and a third row with it is deleted."""
    state.start(published=0, phases=SEALED)
    write(state, "INSERT INTO {t} VALUES (21, '1', 0), (22, '1', 0)")
    write(state, "DELETE FROM {t} WHERE id = 22")
    advance(state)
    assert state.reached["duplicates found"] == 1, "no duplicate is found (U2)"
    state.users.heal()
    advance(state, 3)


def a_pair_comes_between_the_two_looks(state: UniqueMachine) -> None:
    """A row is written before each statement of the switch."""
    state.start(published=0, phases=SEALED)
    late = Write(0, f"INSERT INTO {state.table} VALUES (21, '1', 0)", 1, 1, "0", True)
    for statement in range(1, 60):
        if state.mode != "capture":
            return
        state.advance(meanwhile=[(statement, late)])
        state.is_right()
        run_sql(state.database.dsn, f"DELETE FROM {state.table} WHERE id = 21")


def a_writer_is_in_flight_at_the_look(state: UniqueMachine) -> None:
    """The look can't see the writer, which commits before the next look."""
    state.start(published=0, phases=SEALED)
    write(state, "INSERT INTO {t} VALUES (21, '1', 0)", commit=False)
    advance(state)  # it looks, and waits for the writer until it gives up
    state.end(session=0, commit=True)
    advance(state)
    assert state.mode == "capture", "switched with a pair (U3)"
    state.users.heal()
    advance(state, 3)


def a_pair_is_not_healed(state: UniqueMachine) -> None:
    """The operation is resumed with the pair."""
    state.start(published=0, phases=SEALED)
    write(state, "INSERT INTO {t} VALUES (21, '1', 0)")
    advance(state, 4)
    assert state.mode == "capture", "switched with a pair (U3)"
    state.users.heal()
    advance(state, 4)


def a_group_of_which_one_is_deleted(state: UniqueMachine) -> None:
    """Two rows of the base and one of the delta: one of the base goes, and the other two are still reported."""
    state.start(published=0, phases=0)
    write(state, "UPDATE {t} SET k = '1' WHERE id = 2")
    advance(state, 1)
    write(state, "INSERT INTO {t} VALUES (21, '1', 0)")
    advance(state, 2)
    write(state, "DELETE FROM {t} WHERE id = 2")
    advance(state, 4)
    state.users.heal()
    advance(state, 4)


def keys_are_swapped_and_shifted(state: UniqueMachine) -> None:
    """In direct mode and in active mode. Only real duplicates are refused."""
    state.start(published=0, phases=SEALED)
    write(state, "UPDATE {t} SET v = v + 1 WHERE id IN (3, 4)")  # these entries are in the delta
    advance(state)
    for _ in range(3):
        write(state, "UPDATE {t} SET k = (3 - k::int)::text WHERE id IN (1, 2)")
        write(state, "UPDATE {t} SET k = (7 - k::int)::text WHERE id IN (3, 4)")
        write(state, "UPDATE {t} SET k = (k::int + 1)::text WHERE k <> 'free'")
        refused(state, "INSERT INTO {t} VALUES (22, '5', 0)")
        refused(state, "UPDATE {t} SET k = (SELECT k FROM {t} WHERE id = 9) WHERE id = 8")
        advance(state)
    refused(state, "INSERT INTO {t} VALUES (22, '5', 0)")


def a_key_of_the_delta_is_taken(state: UniqueMachine) -> None:
    """The holder's entry is in the delta alone."""
    state.start(published=0, phases=SEALED)
    write(state, "INSERT INTO {t} VALUES (21, 'a', 0)")
    advance(state)
    assert state.mode == "direct"
    refused(state, "INSERT INTO {t} VALUES (22, 'a', 0)")
    advance(state, 2)


def a_duplicate_while_it_is_built(state: UniqueMachine) -> None:
    """No writer is refused."""
    state.start(published=0, phases=BUILT)
    write(state, "INSERT INTO {t} VALUES (21, 'a', 0)")
    state.write(write=Write(0, "INSERT INTO {t} VALUES (22, 'a', 0)", 1, 1, "0", True))
    state.users.heal()
    advance(state, 3)


def a_holder_is_changed_in_the_midst_of_a_statement(state: UniqueMachine) -> None:
    """Row 1 has given its key away, and its event is still to come. Then the transaction is rolled back."""
    state.start(published=0, phases=PUBLISHED)
    # The statement's second row belongs to another transaction, so that the first row's event waits.
    dsn, table = state.database.dsn, state.table
    run_sql(dsn, f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_lock(7); "
            f"PERFORM pg_advisory_unlock(7); RETURN NEW; END $$; CREATE TRIGGER a AFTER UPDATE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION slow()")  # fmt: skip
    key, mover, other = (session(dsn) for _ in range(3))
    sql(key, "SELECT pg_advisory_lock(7)")
    in_flight = psycopg2.connect(dsn, async_=True)
    psycopg2.extras.wait_select(in_flight)
    cursor = in_flight.cursor()
    cursor.execute(f"UPDATE {table} SET k = 'gone' WHERE id = 1; SELECT 1 / (SELECT 0)")
    while not sql(key, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
        key.rollback()
    sql(other, "SET lock_timeout = '200ms'")
    try:
        sql(other, f"INSERT INTO {table} VALUES (21, '1', 0)")
        other.commit()
    except psycopg2.errors.LockNotAvailable:
        other.rollback()
    except psycopg2.errors.UniqueViolation as error:
        raise AssertionError("refused for a row that is being changed (U4)") from error
    finally:
        other.rollback()
        sql(key, "SELECT pg_advisory_unlock(7)")
    with suppress(psycopg2.Error):
        psycopg2.extras.wait_select(in_flight)
    for one in (key, mover, other, in_flight):
        one.close()
    state.is_right()


SCHEDULES: dict[Schedule, tuple[Variant, ...]] = {
    keys_change_rows_while_it_is_built: (variants.reports_stale_base_copies, variants.seals_over_touched_entries),
    a_pair_beside_antimatter: (variants.lets_antimatter_hide_a_pair,),
    a_pair_comes_between_the_two_looks: (variants.switches_without_the_last_look,),
    a_writer_is_in_flight_at_the_look: (variants.forgets_writers_in_flight_at_the_look,),
    a_pair_is_not_healed: (variants.takes_what_was_found_for_healed,),
    a_group_of_which_one_is_deleted: (),
    keys_are_swapped_and_shifted: (
        variants.takes_over_without_asking,
        variants.refuses_without_asking,
        variants.removes_what_was_taken_over,
    ),
    a_key_of_the_delta_is_taken: (variants.forgets_the_delta_of_others,),
    a_duplicate_while_it_is_built: (variants.enforces_in_capture_mode,),
    a_holder_is_changed_in_the_midst_of_a_statement: (variants.asks_without_waiting,),
}
CASES = [(schedule, variant) for schedule, found in SCHEDULES.items() for variant in found]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_a_schedule_does_a_unique_index_no_harm(dsn: str, monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    with begin(dsn, monkeypatch) as state:
        schedule(state)
        state.teardown()


@pytest.mark.parametrize(("schedule", "variant"), CASES, ids=lambda function: function.__name__)
def test_a_schedule_finds_what_was_broken_on_purpose(
    dsn: str, monkeypatch: pytest.MonkeyPatch, schedule: Schedule, variant: Variant
) -> None:
    variant(monkeypatch)
    with begin(dsn, monkeypatch) as state:
        with pytest.raises((AssertionError, DBAPIError), match=FOUND):
            schedule(state)
        with suppress(AssertionError, DBAPIError, RoirError, psycopg2.Error):
            state.teardown()


def test_each_variant_has_a_schedule() -> None:
    assert {variant for _, variant in CASES} == set(VARIANTS)
