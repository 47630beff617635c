"""The state machines, compared with the control tables, the capture function and the fold."""

from __future__ import annotations

from itertools import product

import psycopg2.errors
import pytest

from airflow_roir.engine import apply_delta, switch
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.partitions import copy_rows, remove_entries
from airflow_roir.entry_state import ENTRY_STATES, EntryState, Happening
from airflow_roir.errors import IllegalTransition, OperationFailed, OperationPaused
from airflow_roir.generation_state import (
    ARROWS,
    STATE_COLUMNS,
    CaptureMode,
    GenerationStatus,
    SegmentStatus,
    UnitStatus,
)
from airflow_roir.operation import TRANSITIONS, Phase, Status, Transition, Verb
from airflow_roir.options import LIVE
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(3)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)", "INSERT INTO t VALUES (1, 'k', 1), (2, NULL, 2)")


# The pairs of an operation's status and phase that exist.
OPERATION_STATES = [
    (status, phase) for status, phase in product(Status, Phase) if (status == Status.COMPLETED) == (phase == Phase.DONE)
]
STATES = {
    "operation": [f"{status.value} {phase.value}" for status, phase in OPERATION_STATES],
    "generation": ["building capture", "building direct", "active active", "retired active", "dropped none"],
    "segment": [status.value for status in SegmentStatus],
    "source_partition": ["present", "leaving", "joining"],
    "scan_range": ["false", "true"],
    "verification_unit": ["false", "true"],
    "compaction_unit": [status.value for status in UnitStatus],
}
CONCEIVABLE = {
    "operation": [f"{status.value} {phase.value}" for status, phase in product(Status, Phase)],
    "generation": [f"{status.value} {mode.value}" for status, mode in product(GenerationStatus, CaptureMode)],
    **{table: [*STATES[table], "none"] for table in ("segment", "source_partition", "compaction_unit")},
}
# The server tries every pair itself: it sets `was` without triggers, and then tries `becomes`.
TRY = """
DO $$
DECLARE p record;
BEGIN
    FOR p IN SELECT a.name AS was, a.sets AS first, b.name AS becomes, b.sets AS second FROM states a, states b LOOP
        PERFORM set_config('session_replication_role', 'replica', true);
        EXECUTE 'UPDATE roir.{table} SET ' || p.first;
        PERFORM set_config('session_replication_role', 'origin', true);
        BEGIN
            EXECUTE 'UPDATE roir.{table} SET ' || p.second;
            INSERT INTO taken VALUES (p.was, p.becomes);
        EXCEPTION WHEN object_not_in_prerequisite_state THEN
            NULL;
        END;
    END LOOP;
END $$
"""


def _sets(table: str, state: str) -> str:
    """SQL for the SET of a state and of the columns that it needs."""
    sets = [f"{column} = '{value}'" for column, value in zip(STATE_COLUMNS[table], state.split(" "), strict=True)]
    match table, state.split(" "):
        case "operation", [status, phase]:
            ended = status in (Status.COMPLETED.value, Status.ABORTED.value)
            kinds = {Phase.SUM: "verify", Phase.CHECK: "verify", Phase.COMPACT: "compact", Phase.FILL: "reference"}
            kind = kinds.get(Phase(phase), "create")
            sets += [f"finished_at = {'now()' if ended else 'NULL'}", f"kind = '{kind}'", "error = 'by hand'"]
        case "generation", _:
            sets.append("drop_after = now()")
        case "compaction_unit", _:
            sets.append("files = '[]'")
    return ", ".join(sets)


def _row_of_each(database: Database, user: psycopg2.extensions.connection) -> None:
    """One row in each control table that has a state."""
    steps.begin(database, ranges=1, segments=1)
    sql(user, "DELETE FROM roir.segment WHERE ordinal > 0")
    sql(
        user,
        "INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, name, condition, status) "
        "VALUES (1, 1, 1, true, 'p', 'true', 'present'); "
        "INSERT INTO roir.verification (index_id, operation_id, generation_id, mode, options, buckets) "
        "VALUES (1, 1, 1, 'only', '{}', 1); "
        "INSERT INTO roir.verification_unit (verification_id, ordinal, stage, side, relation) "
        "VALUES (1, 1, 'total', 'heap', 1); "
        "INSERT INTO roir.compaction_unit "
        "(operation_id, generation_id, ordinal, action, segments, parts, bytes_before) "
        "VALUES (1, 1, 0, 'rewrite', '{1}', '{2}', 0)",
    )
    assert sql(user, "SELECT count(*) FROM roir.scan_range") == [(1,)]


def _arrows(table: str) -> set[tuple[str, str]]:
    """The changes of state that the declared arrows allow."""
    if table != "operation":
        return {(arrow.was, arrow.becomes) for arrow in ARROWS if arrow.table == table}
    named = {(f"{a.status.value} {a.phase.value}", f"{a.to_status.value} {a.to_phase.value}") for a in TRANSITIONS}
    return {(was, becomes) for was, becomes in named if was != becomes}


def _transition(verb: Verb, status: str, phase: str) -> Transition | None:
    """The arrow that `verb` takes from this state, or None if there is none."""
    return next((one for one in TRANSITIONS if (one.verb, one.status, one.phase) == (verb, status, phase)), None)


@pytest.mark.parametrize("machine", STATE_COLUMNS)
def test_the_database_takes_every_arrow_and_no_other(database: Database, dsn: str, machine: str) -> None:
    """Found: a stray `UPDATE` of a control table (an aborted operation runs again, a dropped generation is active, a
    done range isn't): taken, if its own code didn't ask. It holds: the database refuses it, from any writer.
    """
    user = steps.session(dsn)
    _row_of_each(database, user)
    sql(user, "CREATE TEMP TABLE states (name text, sets text); CREATE TEMP TABLE taken (was text, becomes text)")
    for state in STATES[machine]:
        sql(user, "INSERT INTO states VALUES (%s, %s)", state, _sets(machine, state))
    sql(user, TRY.format(table=machine))
    taken = set(sql(user, "SELECT * FROM taken"))
    assert taken == _arrows(machine) | {(state, state) for state in STATES[machine]}


@pytest.mark.parametrize("machine", CONCEIVABLE)
def test_the_database_has_every_state_and_no_other(database: Database, dsn: str, machine: str) -> None:
    """Found: a stray `UPDATE` of a control table (an aborted operation runs again, a dropped generation is active, a
    done range isn't): taken, if its own code didn't ask. It holds: the database refuses it, from any writer.
    """
    user = steps.session(dsn)
    _row_of_each(database, user)
    sql(user, "SET session_replication_role = replica")
    held = []
    for state in CONCEIVABLE[machine]:
        sql(user, "SAVEPOINT before")
        try:
            sql(user, f"UPDATE roir.{machine} SET {_sets(machine, state)}")
            held.append(state)
        except psycopg2.errors.CheckViolation:
            pass
        sql(user, "ROLLBACK TO before")
    assert sorted(held) == sorted(STATES[machine])


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE roir.operation SET kind = 'verify'",  # in phase build
        "UPDATE roir.operation SET status = 'completed'",
        "UPDATE roir.operation SET status = 'aborted', finished_at = NULL",
        "UPDATE roir.operation SET status = 'failed'",  # without an error
        *(
            f"UPDATE roir.operation SET {name} = {value}"
            for name, option in LIVE.items()
            if not option.kind.is_text
            for value in (option.least - 1, option.most + 1)
        ),
        "UPDATE roir.generation SET status = 'retired', capture_mode = 'active', drop_after = NULL",
        "UPDATE roir.segment SET status = 'sealed', claim_epoch = 1, claim_worker = 1",
    ],
)
def test_what_goes_with_a_state_is_checked(database: Database, dsn: str, change: str) -> None:
    user = steps.session(dsn)
    _row_of_each(database, user)
    sql(user, "SET session_replication_role = replica")
    with pytest.raises(psycopg2.errors.CheckViolation):
        sql(user, change)


@pytest.mark.parametrize(("status", "phase"), OPERATION_STATES)
def test_what_users_call_takes_an_operation_along_its_arrows_alone(
    database: Database, dsn: str, status: Status, phase: Phase
) -> None:
    """Pause, resume, abort, tick, and the start of a run, from every state."""
    _, run = steps.begin(database)
    user = steps.session(dsn)
    state = _sets("operation", f"{status.value} {phase.value}")
    sql(user, f"SET session_replication_role = replica; UPDATE roir.operation SET {state}")
    sql(user, "SET session_replication_role = origin")
    user.commit()

    def now() -> tuple[str, str]:
        [state] = sql(user, "SELECT status, phase FROM roir.operation")
        return state

    # If they are asked again for a state that is reached, they say so, and change nothing.
    again = {Verb.PAUSE: Status.PAUSED, Verb.ABORT: Status.ABORTING}
    for verb in (Verb.PAUSE, Verb.RESUME, Verb.ABORT):
        arrow = _transition(verb, status, phase)
        if arrow is None and status != again.get(verb):
            with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match=r"has no .*operation to"):
                sql(user, f"SELECT roir.{verb.value}('ix')")
            user.rollback()
        else:
            sql(user, f"SELECT roir.{verb.value}('ix')")
        expected = (status, phase) if arrow is None else (arrow.to_status, arrow.to_phase)
        assert now() == tuple(part.value for part in expected), verb
        user.rollback()
    assert sql(user, "SELECT roir.tick(id, epoch) FROM roir.operation") == [(status == Status.RUNNING,)]
    assert now() == (status.value, phase.value)
    user.rollback()
    arrow = _transition(Verb.START, status, phase)
    if arrow is None:
        with pytest.raises((IllegalTransition, OperationFailed)):
            start_run(database, "ix", "test", take_over=True)
        assert now() == (status.value, phase.value)
    else:
        assert start_run(database, "ix", "test", take_over=True).epoch > run.epoch
        user.rollback()
        assert now() == (arrow.to_status.value, arrow.to_phase.value)


def test_an_operation_moves_by_its_verbs_alone(database: Database) -> None:
    """Every verb in every status and phase, with the present row, and with a row that was read before a change."""
    prepared, _ = steps.begin(database)
    with database.transaction() as connection:
        for (status, phase), verb in product(OPERATION_STATES, Verb):
            execute(connection, "SET LOCAL session_replication_role = replica")
            execute(connection, f"UPDATE roir.operation SET {_sets('operation', f'{status.value} {phase.value}')}")
            execute(connection, "SET LOCAL session_replication_role = origin")
            row = operations.read_operation(connection, prepared.operation_id)
            arrow = _transition(verb, status, phase)
            ends = arrow is not None and arrow.to_status in (Status.COMPLETED, Status.ABORTED)
            also = "finished_at = started_at" if ends else ""
            if arrow is None:
                # A pause that comes at the end of a phase ends the run as any pause does.
                meets_pause = status == Status.PAUSED and _transition(verb, Status.RUNNING, phase) is not None
                meets_pause = meets_pause and verb in (Verb.ADVANCE, Verb.COMPLETE)
                refusal, said = (OperationPaused, "was paused") if meets_pause else (IllegalTransition, "can't {}")
                with pytest.raises(refusal, match=said.format(verb.value)):
                    operations.move(connection, row, verb, also=also)
                now = operations.read_operation(connection, prepared.operation_id)
                assert (now.status, now.phase) == (status, phase)
            else:
                operations.move(connection, row, verb, also=also)
                now = operations.read_operation(connection, prepared.operation_id)
                assert (now.status, now.phase) == (arrow.to_status, arrow.to_phase)
                if now.status != status or now.phase != phase:
                    again = _transition(verb, now.status, row.phase)
                    if again is None or now.phase != row.phase:
                        with pytest.raises(IllegalTransition):
                            operations.move(connection, row, verb, also=also)


OF_PARTITIONS = (Happening.TRUNCATE, Happening.COPY, Happening.COPY_DIRECT, Happening.LEAVE)


@pytest.mark.parametrize("key", ["'k'", "NULL"])
@pytest.mark.parametrize(
    ("state", "happening"), sorted((case for case in ENTRY_STATES if case[1] not in OF_PARTITIONS), key=str)
)
def test_capture_and_fold_do_to_an_entry_what_the_table_says(
    database: Database, dsn: str, state: EntryState | None, happening: Happening, key: str
) -> None:
    """The delta row of `(key, 1)` is set to the state. Then the event happens, in a real database."""
    _, run = steps.begin(database, include="v")
    direct = happening not in (Happening.WRITE, Happening.REMOVE)
    user = steps.session(dsn)
    sql(user, f"UPDATE t SET k = {key} WHERE id = 1; TRUNCATE roir_data.g1_delta")
    user.commit()
    if direct:
        steps.switch_all(database, run)
    with database.connect() as connection, connection.begin():
        job = load_job(connection, run)
    write = happening in (Happening.WRITE, Happening.WRITE_DIRECT)
    if write or happening == Happening.FOLD_UNMATCHED:
        sql(user, f"ALTER TABLE t DISABLE TRIGGER {steps.capture_triggers(dsn)[0]}")
        sql(user, "DELETE FROM t WHERE id = 1; DELETE FROM roir_data.g1 WHERE c2 = 1")
        sql(user, f"ALTER TABLE t ENABLE ALWAYS TRIGGER {steps.capture_triggers(dsn)[0]}")
    if state is not None:
        sql(user, f"INSERT INTO roir_data.g1_delta VALUES ({key}, 1, -1, '{state.value}')")
    user.commit()
    if write:
        sql(user, f"INSERT INTO t VALUES (1, {key}, 7)")
    elif happening in (Happening.REMOVE, Happening.REMOVE_DIRECT):
        sql(user, "DELETE FROM t WHERE id = 1")
    user.commit()
    if happening in (Happening.FOLD_MATCHED, Happening.FOLD_UNMATCHED):
        with database.connect() as connection:
            steps.fold_blocks(connection, apply_delta.Folding(connection, job.generation_id, job.entry), 0, 100)
    found = sql(user, "SELECT state FROM roir_data.g1_delta WHERE c2 = 1")
    expected = ENTRY_STATES[state, happening]
    assert found == ([] if expected is None else [(expected.value,)])
    in_base = sql(user, "SELECT c3 FROM roir_data.g1 WHERE c2 = 1")
    match happening:
        case Happening.WRITE_DIRECT:
            assert in_base == [(7,)]
        case Happening.REMOVE_DIRECT:
            assert in_base == []
        case Happening.FOLD_MATCHED | Happening.FOLD_UNMATCHED if state == EntryState.REGULAR:
            assert in_base == [(-1,)]
        case Happening.FOLD_MATCHED if state == EntryState.ANTIMATTER:
            assert in_base == []


@pytest.mark.parametrize(
    ("state", "happening"), sorted((case for case in ENTRY_STATES if case[1] in OF_PARTITIONS), key=str)
)
def test_what_happens_to_a_partition_does_to_an_entry_what_the_table_says(
    database: Database, dsn: str, state: EntryState | None, happening: Happening
) -> None:
    run_sql(
        dsn,
        "DROP TABLE t",
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY LIST (id)",
        "CREATE TABLE one PARTITION OF t FOR VALUES IN (1)",
        "CREATE TABLE two PARTITION OF t FOR VALUES IN (2)",
        "INSERT INTO t VALUES (1, NULL, 1), (2, NULL, 2)",
    )
    _, run = steps.begin(database, include="v")
    if happening == Happening.COPY_DIRECT:
        steps.build_all(database, run)
        steps.seal_all(database, run)
        switch.switch(database, run)
    with database.transaction() as connection:
        job = load_job(connection, run)
    user = steps.session(dsn)
    if state is not None:
        sql(user, f"INSERT INTO roir_data.g1_delta VALUES (NULL, 1, -1, '{state.value}')")
    user.commit()
    match happening:
        case Happening.TRUNCATE:
            run_sql(dsn, "TRUNCATE one")
        case Happening.LEAVE:
            run_sql(dsn, "SELECT roir.detach_partition('one')")
            with database.transaction() as connection:
                [row] = remove_entries.leaving(connection)
            remove_entries.remove(database, row, lambda line: None, 5.0)
        case _:
            # The partition is as it was when it was attached with its rows.
            run_sql(
                dsn,
                "SET session_replication_role = replica",
                "UPDATE roir.source_partition SET status = 'joining', link = NULL "
                "WHERE relation = 'one'::regclass::oid::bigint",
            )
            found = "SELECT id, relation FROM roir.source_partition WHERE status = 'joining'"
            [(joining, leaf)] = sql(user, found)
            user.commit()
            assert copy_rows.bring_in(database, job.source, job.generation_id, job.entry, leaf, joining) == 1
    expected = ENTRY_STATES[state, happening]
    found = sql(user, "SELECT state FROM roir_data.g1_delta WHERE c2 = 1")
    assert found == ([] if expected is None else [(expected.value,)])
    if happening == Happening.COPY_DIRECT:
        assert sql(user, "SELECT c3 FROM roir_data.g1 WHERE c2 = 1") == [(1,)]
