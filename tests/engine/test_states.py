"""The state machines against the real thing: control tables, capture function and fold."""

from __future__ import annotations

from itertools import product

import pytest
from sqlalchemy import update

from airflow_roir.engine import fold, operations, tables
from airflow_roir.engine.database import Database
from airflow_roir.engine.run import load_job
from airflow_roir.entry_state import ENTRY_STATES, EntryState, Happening
from airflow_roir.errors import IllegalTransition
from airflow_roir.operation import Phase, Status, Verb, find_transition
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(11)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)", "INSERT INTO t VALUES (1, 'k', 1), (2, NULL, 2)")


def test_the_control_tables_take_the_operations_arrows_and_no_others(database: Database) -> None:
    """Every verb from every status and phase, with the row as it is, and with a row that was read before it changed."""
    prepared, _ = steps.begin(database)
    states = [
        (status, phase)
        for status, phase in product(Status, Phase)
        if (status == Status.COMPLETED) == (phase == Phase.DONE)
    ]
    with database.transaction() as connection:
        for (status, phase), verb in product(states, Verb):
            ended = status in (Status.COMPLETED, Status.ABORTED)
            connection.execute(
                update(tables.operation).values(
                    status=status.value, phase=phase.value, finished_at=tables.operation.c.started_at if ended else None
                )
            )
            row = operations.read_operation(connection, prepared.operation_id)
            arrow = find_transition(verb, status, phase)
            ends = arrow is not None and arrow.to_status in (Status.COMPLETED, Status.ABORTED)
            values = {"finished_at": row.started_at} if ends else {}
            if arrow is None:
                with pytest.raises(IllegalTransition, match=f"can't {verb.value}"):
                    operations.move(connection, row, verb, **values)
                now = operations.read_operation(connection, prepared.operation_id)
                assert (now.status, now.phase) == (status, phase)
            else:
                operations.move(connection, row, verb, **values)
                now = operations.read_operation(connection, prepared.operation_id)
                assert (now.status, now.phase) == (arrow.to_status, arrow.to_phase)
                if now.status != status or now.phase != phase:
                    again = find_transition(verb, now.status, row.phase)
                    if again is None or now.phase != row.phase:
                        with pytest.raises(IllegalTransition):
                            operations.move(connection, row, verb, **values)


@pytest.mark.parametrize("key", ["'k'", "NULL"])
@pytest.mark.parametrize(("state", "happening"), sorted(ENTRY_STATES, key=str))
def test_capture_and_fold_do_to_an_entry_what_the_table_says(
    database: Database, dsn: str, state: EntryState | None, happening: Happening, key: str
) -> None:
    """The delta row of `(key, 1)` is set to the state, then the thing happens, on the real database."""
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
            fold.FoldWorker(connection, job.generation_id, job.entry).step(0, 100)
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
