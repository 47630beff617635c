"""Units of a compaction, given by hand and taken to their swap step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from airflow_roir.engine.compact import compaction
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.compact.compaction import CompactOptions
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.compact.worker import CompactWorker, finish
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.job import load_job
from airflow_roir.engine.run import Run, end_run, start_run


def action(kind: str, ordinals: Sequence[int], parts: int = 1) -> Action:
    """An action whose figures don't matter."""
    return Action(Kind(kind), tuple(ordinals), parts, 1000, 500, 1, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, "by hand")


def begin(database: Database, *actions: Action, index: str = "ix", **options: object) -> Run:
    """Begin a compaction of these actions, and a run of it."""
    compaction.begin(database, index, actions, CompactOptions(**options), "test")  # type: ignore[arg-type]
    return start_run(database, index, "test", take_over=True)


def worker(database: Database, run: Run, number: int = 0) -> CompactWorker:
    """A worker of the run, with a session of its own."""
    connection = database.engine.connect()
    with connection.begin():
        job = load_job(connection, run)
    return CompactWorker(database, connection, job, number)


def claim(one: CompactWorker) -> UnitClaim:
    """The worker's next unit."""
    found = one.claim()
    assert isinstance(found, UnitClaim), found
    return found


def to_the_end(one: CompactWorker, between: Callable[[str], object] = lambda status: None) -> list[str]:
    """All units that are free, step by step; the statuses in which a step began. between: called before each step."""
    seen = []
    while isinstance(found := one.claim(), UnitClaim):
        unit: UnitClaim | None = found
        while unit is not None:
            between(unit.status.value)
            seen.append(unit.status.value)
            unit, _ = one.step(unit)
    return seen


def compact(database: Database, *actions: Action, between: Callable[[str], object] = lambda status: None) -> list[str]:
    """From begin to end, by one worker."""
    run = begin(database, *actions)
    one = worker(database, run)
    try:
        seen = to_the_end(one, between)
    finally:
        one.connection.close()
    finish(database, run)
    end_run(database, run)
    return seen


def segments(database: Database) -> dict[int, tuple[object, object]]:
    """The bounds of all segments, by ordinal."""
    with database.transaction() as connection:
        rows = execute(connection, "SELECT ordinal, lower, upper FROM roir.segment ORDER BY ordinal").all()
    return {row.ordinal: (row.lower, row.upper) for row in rows}


def leftovers(database: Database) -> list[str]:
    """What units have made and not taken back: tables, functions, triggers, by name."""
    query = """
    SELECT c.relname::text FROM pg_class c WHERE c.relnamespace = 'roir_data'::regnamespace AND c.relname ~ '_u\\d+'
    UNION ALL SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'roir_data'::regnamespace AND p.proname ~ '_u\\d+'
    UNION ALL SELECT t.tgname FROM pg_trigger t WHERE t.tgname = 'roir_touch'
    UNION ALL SELECT k.conname FROM pg_constraint k WHERE k.conname = 'roir_bounds' ORDER BY 1
    """
    with database.transaction() as connection:
        return list(execute(connection, query).scalars())
