"""An operation, step by step: what the tests call instead of sleeping and hoping."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import psycopg2
import psycopg2.extensions
from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import apply_delta, build, fold, lifecycle, prepare, publish, seal, switch
from airflow_roir.engine.capture.row_function import trigger_name
from airflow_roir.engine.capture.truncate_function import truncate_trigger_name
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.new_operation import BegunOperation
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.work.phase_work import PhaseWork, Step
from airflow_roir.operation import FINAL, OF_A_BUILD, Phase
from airflow_roir.options import BuildOptions
from tests.comparison import Comparison, compare
from tests.conftest import run_sql


def session(dsn: str, isolation: str = "READ COMMITTED") -> psycopg2.extensions.connection:
    """A user's session. It commits only when the test says so."""
    connection = psycopg2.connect(dsn)
    connection.set_session(isolation_level=isolation)
    return connection


def old_session(dsn: str, isolation: str = "REPEATABLE READ") -> psycopg2.extensions.connection:
    """A transaction whose snapshot is taken now, from another table, so that it has no lock on source and index."""
    user = session(dsn, isolation)
    sql(user, "SELECT count(*) FROM pg_class")
    return user


def sql(connection: psycopg2.extensions.connection, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Runs a statement in a user's session."""
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []


def make_table(dsn: str, rows: int = 100, keys: int = 5) -> None:
    """Creates the table `t` with `keys` different keys and with statistics."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO t SELECT i, (i % {keys})::text, i FROM generate_series(1, {rows}) i",
        "ANALYZE t",
    )


def capture_triggers(dsn: str, source: str = "t") -> tuple[str, str]:
    """The names of a source's capture triggers, for rows and for TRUNCATE."""
    [(oid,)] = sql(session(dsn), "SELECT %s::regclass::oid", source)
    return trigger_name(oid), truncate_trigger_name(oid)


def begin(
    database: Database,
    index: str = "ix",
    table: str | None = "t",
    keys: str | None = "k",
    include: str | None = None,
    **options: Any,
) -> tuple[BegunOperation, Run]:
    """Prepares an operation and starts a run of it. options: also whether the index is unique."""
    uniqueness = {name: options.pop(name) for name in ("unique", "nulls_not_distinct", "where") if name in options}
    definition = IndexDefinition.parse(index, table, keys, include, **uniqueness)
    prepared = prepare.prepare(database, definition, BuildOptions(**options), "test")
    return prepared, start_run(database, prepared.index, "test", take_over=True)


def built(database: Database, *of: Any, **options: Any) -> Run:
    """Does `begin` and copies every range; returns the run."""
    _, run = begin(database, *of, **options)
    build_all(database, run)
    return run


def sealed(database: Database, *of: Any, **options: Any) -> Run:
    """Does `built` and gives every segment its index."""
    run = built(database, *of, **options)
    seal_all(database, run)
    return run


def switched(database: Database, *of: Any, **options: Any) -> Run:
    """Does `sealed` and the switch: writes go to the base."""
    run = sealed(database, *of, **options)
    switch.switch(database, run)
    return run


def folded(database: Database, *of: Any, **options: Any) -> Run:
    """Does `switched` and applies the delta; publishes nothing."""
    run = switched(database, *of, **options)
    fold_delta(database, run)
    return run


def make_index(database: Database, *of: Any, **options: Any) -> Run:
    """Prepares an operation and carries it to its end; returns its run."""
    run = sealed(database, *of, **options)
    lifecycle.run_phases(database, run)
    return run


# The moments that `moments` yields before the last one, which is after the publish.
MOMENTS = ("before prepare", "after prepare", "after build", "after seal", "after switch", "after fold")


def moments(database: Database, *of: Any, **options: Any) -> Iterator[str]:
    """Carries an operation from nothing to its publish; yields each of MOMENTS, and "after publish"."""
    yield "before prepare"
    _, run = begin(database, *of, **options)
    yield "after prepare"
    build_all(database, run)
    yield "after build"
    seal_all(database, run)
    yield "after seal"
    switch.switch(database, run)
    yield "after switch"
    fold.fold_here(database, run)
    yield "after fold"
    fold.finish(database, run)
    publish_all(database, run)
    yield "after publish"


def start_with(database: Database, parallelism: int, index: str = "ix", owner: str = "test", **how: Any) -> Run:
    """Starts a run of the index's operation, with this many workers from now on."""
    requests.change_options(database, index, actor=owner, parallelism=parallelism)
    return start_run(database, index, owner, **how)


def build_all(database: Database, run: Run) -> None:
    """Copies every range by one worker, and ends the build."""
    for _ in build.PHASE.work(database, run, 0):
        pass
    build.finish(database, run)


def build_by_chance(
    database: Database, run: Run, chance: random.Random, between: Callable[[], object] = lambda: None
) -> None:
    """Copies every range as `copy_by_chance` does, and ends the build."""
    copy_by_chance(database, run, chance, between)
    build.finish(database, run)


def copy_by_chance(
    database: Database, run: Run, chance: random.Random, between: Callable[[], object] = lambda: None
) -> None:
    """Copies every range by two workers, whose turns come by chance. between: called before each turn."""
    workers = [worker(database, run, number) for number in range(2)]
    held: dict[int, build.Claim] = {}
    while True:
        between()
        number = chance.randrange(2)
        if number in held:
            outcome = workers[number].step(held.pop(number))
            assert isinstance(outcome, Step)
            if outcome.rest is not None:
                held[number] = outcome.rest
            continue
        claim = workers[number].claim()
        if isinstance(claim, build.Claim):
            held[number] = claim
        elif not held:
            break
    for one in workers:
        one.connection.close()


def step_by_step(database: Database, run: Run, phase: PhaseWork, number: int = 0) -> Generator[Step, None, None]:
    """Yields each step of one worker of a phase, until the worker finds nothing to do."""
    with database.connect() as connection:
        one = phase.worker(database, connection, run, number)
        while not isinstance(hold := one.claim(), Stop):
            while hold is not None:
                step = one.step(hold)
                if isinstance(step, Stop):
                    return
                yield step
                hold = step.rest


def seal_all(database: Database, run: Run) -> None:
    """Seals every segment by one worker."""
    for _ in seal.PHASE.work(database, run, 0):
        pass
    seal.finish(database, run)


def fold_all(database: Database, run: Run) -> apply_delta.Folded:
    """Does the switch and the fold."""
    switch.switch(database, run)
    return fold_delta(database, run)


def fold_delta(database: Database, run: Run) -> apply_delta.Folded:
    """Folds the delta after the switch, in this thread."""
    folded = fold.fold_here(database, run)
    fold.finish(database, run)
    return folded


def fold_blocks(connection: Connection, folding: apply_delta.Folding, first: int, end: int) -> apply_delta.Folded:
    """Does one step of a fold."""
    with connection.begin():
        return folding.blocks(first, end)


def switch_all(database: Database, run: Run) -> None:
    """Does build, seal and switch."""
    build_all(database, run)
    seal_all(database, run)
    switch.switch(database, run)


def fold_and_publish(database: Database, run: Run) -> None:
    """Does the steps that follow the switch."""
    fold_delta(database, run)
    publish_all(database, run)


def finish_all(database: Database, run: Run) -> None:
    """Does everything from the beginning of the build to the publish."""
    through(database, run)


def through(database: Database, run: Run) -> None:
    """Does the phases of a build that are left: the long ones by one worker, the last ones as a run does them."""
    phase = Phase(operations.find_operation(database, run.index).phase)
    for one in OF_A_BUILD[OF_A_BUILD.index(phase) :]:
        if one not in FINAL:
            for _ in lifecycle.PHASES[one].work(database, run, 0):
                pass
            lifecycle.PHASES[one].finish(database, run, lambda line: None)
    lifecycle.run_phases(database, run)


def publish_all(database: Database, run: Run) -> None:
    """Does the publish."""
    publish.publish(database, run)


def worker(database: Database, run: Run, number: int = 0) -> build.BuildWorker:
    """A build worker to be stepped, in a session of its own. The session ends with the process."""
    connection = database.engine.connect()
    with connection.begin():
        job = load_job(connection, run)
    return build.BuildWorker(connection, job, number)


def claimed(database: Database, run: Run, number: int = 0) -> tuple[build.BuildWorker, build.Claim]:
    """A build worker, and a range that it holds."""
    one = worker(database, run, number)
    return one, claim_of(one)


def claim_of(worker: build.BuildWorker) -> build.Claim:
    """Claims the next range."""
    claim = worker.claim()
    assert isinstance(claim, build.Claim)
    return claim


def batches(database: Database, run: Run) -> list[int]:
    """Copies every range by one worker, batch by batch; returns the rows of each batch."""
    one = worker(database, run)
    rows: list[int] = []
    claim = one.claim()
    while isinstance(claim, build.Claim):
        outcome = one.step(claim)
        assert isinstance(outcome, Step)
        rows.append(outcome.rows)
        claim = outcome.rest or one.claim()
    one.connection.close()
    return rows


def half_a_batch(worker: build.BuildWorker, claim: build.Claim) -> int:
    """Copies the rest of a range in the caller's transaction, as a worker does that dies before its commit."""
    relation = worker.standing(claim).name
    source = worker.source
    source.carrier.none()
    return source.insert(relation, source.reader.next(relation, claim.scan, 1_000_000))


def assert_exact(database: Database, index: str = "ix") -> Comparison:
    """Checks I1: index = source, exactly one entry per row."""
    report = compare(database, index)
    assert (report.missing, report.extra, report.different) == (0, 0, 0), report
    return report
