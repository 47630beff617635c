"""The checks of the state machine can fail: a short schedule of the machine's rules finds each broken variant of the
engine here, and `make test-stateful` finds them at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from sqlalchemy.exc import DBAPIError

from tests.conftest import run_sql
from tests.engine import variants
from tests.engine.machine import KeptSessions, Machine
from tests.engine.users import TOUCH, Write
from tests.engine.variants import FOUND, VARIANTS, Variant

pytestmark = pytest.mark.sample(1, 99)

Schedule = Callable[[Machine], None]

UPDATE = "UPDATE {t} SET v = v + 1 WHERE id = {i}"
DELETE = "DELETE FROM {t} WHERE id = {i}"
INSERT = "INSERT INTO {t} VALUES ({i}, '{k}', 0)"
NESTED = "UPDATE {t} SET k = '{k}' WHERE id = {i} RETURNING touch('{t}', {i})"
# The number of phases that `start` goes through: built, sealed, in direct mode, folded, published.
SEALED, DIRECT, PUBLISHED = 2, 3, 5


@contextmanager
def begin(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    run_sql(dsn, TOUCH)
    monkeypatch.setattr(Machine, "database", KeptSessions(dsn), raising=False)
    state = Machine()
    yield state
    state.database.engine.dispose()


def write(state: Machine, sql: str, i: int, session: int = 0, commit: bool = True, k: str = "0") -> None:
    """The key of row i is i % 3 at the beginning."""
    state.write(write=Write(session, sql, i, i, k, commit))
    state.is_right()


def advance(state: Machine, times: int = 1) -> None:
    for _ in range(times):
        state.advance(meanwhile=[])
        state.is_right()


def a_create_and_a_rebuild(state: Machine) -> None:
    """A write of each kind in each mode."""
    state.start(published=0, phases=0)
    state.work(number=0, meanwhile=[])  # copies the first two rows
    write(state, DELETE, 1)
    write(state, DELETE, 2)
    write(state, INSERT, 2, k="2")
    write(state, NESTED, 4, k="2")
    write(state, UPDATE, 5)
    advance(state, 3)  # built, sealed, in direct mode
    write(state, UPDATE, 5)
    advance(state, 2)  # folded, published
    advance(state)  # a rebuild has begun
    write(state, UPDATE, 6)
    advance(state, 5)
    write(state, UPDATE, 7)


def a_writer_is_open_at_prepare(state: Machine) -> None:
    state.start(published=0, phases=PUBLISHED)
    write(state, UPDATE, 1, commit=False)
    advance(state, 2)  # a rebuild has begun, and is built
    state.end(session=0, commit=True)
    state.is_right()


def a_writer_is_open_at_the_switch(state: Machine) -> None:
    state.start(published=0, phases=SEALED)
    write(state, UPDATE, 1, commit=False)
    advance(state)
    state.end(session=0, commit=True)
    state.is_right()


def a_writer_of_a_delta_row_is_open_at_publish(state: Machine) -> None:
    state.start(published=0, phases=SEALED)
    write(state, UPDATE, 1)
    advance(state)
    write(state, UPDATE, 1, commit=False)
    advance(state, 2)  # folded without that row, published
    state.end(session=0, commit=False)
    state.is_right()


def a_worker_dies_before_each_statement(state: Machine) -> None:
    state.start(published=0, phases=0)
    for statement in range(1, 20):
        state.work(number=0, meanwhile=[(statement, None)])
        state.is_right()


def a_worker_comes_back(state: Machine) -> None:
    state.start(published=0, phases=0)
    state.work(number=0, meanwhile=[])
    state.lose(number=0)
    state.work(number=1, meanwhile=[])
    state.is_right()
    state.come_back(meanwhile=[])
    state.is_right()


def an_old_snapshot_writes_after_the_switch(state: Machine) -> None:
    state.start(published=0, phases=SEALED)
    write(state, DELETE, 1, commit=False)
    state.read(session=1, index=False)
    state.end(session=0, commit=True)
    advance(state)
    write(state, INSERT, 1, session=1, k="1")


def an_old_snapshot_reads_after_the_publish(state: Machine) -> None:
    state.start(published=0, phases=0)
    state.read(session=1, index=False)
    advance(state, PUBLISHED)
    state.read(session=1, index=True)


SCHEDULES: dict[Schedule, tuple[Variant, ...]] = {
    a_create_and_a_rebuild: (
        variants.forgets_the_base,
        variants.forgets_the_delta,
        variants.lets_the_base_win,
        variants.deletes_the_delta_unconditionally,
        variants.drops_antimatter_at_insert,
        variants.forgets_moved_keys,
        variants.forgets_the_delta_in_direct_mode,
        variants.forgets_the_active_generation,
        variants.forgets_the_retired_generation,
    ),
    a_writer_is_open_at_prepare: (variants.prepares_without_a_drain,),
    a_writer_is_open_at_the_switch: (variants.switches_without_a_drain,),
    a_writer_of_a_delta_row_is_open_at_publish: (
        variants.publishes_without_a_drain,
        variants.folds_without_locks,
        variants.folds_without_skipping,
    ),
    a_worker_dies_before_each_statement: (variants.commits_the_watermark_first,),
    a_worker_comes_back: (variants.forgets_the_fence, variants.begins_a_range_anew),
    an_old_snapshot_writes_after_the_switch: (variants.forgets_the_mode,),
    an_old_snapshot_reads_after_the_publish: (variants.forgets_old_readers,),
}
CASES = [(schedule, variant) for schedule, found in SCHEDULES.items() for variant in found]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_a_schedule_does_the_engine_no_harm(dsn: str, monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> None:
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
        with suppress(AssertionError, DBAPIError):
            state.teardown()


def test_each_variant_has_a_schedule() -> None:
    assert {variant for _, variant in CASES} == set(VARIANTS)
