"""A partition is dropped, detached, renamed or replaced, by plain DDL and without the guard, in the gaps of a command.

The command succeeds or says what to do, in words; afterwards a sync and a clean-up leave the index exact. A relation
that is gone has a number for a name: a sync once said "syntax error at or near".
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2.errors
import pytest
from sqlalchemy import event

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import sync
from tests.conftest import run_sql
from tests.engine import operators, steps
from tests.engine.meeting import Gaps, Meeting
from tests.engine.operators import CALLS, COMMANDS
from tests.engine.steps import sql
from tests.engine.test_two_operators import gaps as gaps
from tests.engine.test_two_operators import scenes
from tests.engine.test_two_operators import templates as templates

pytestmark = pytest.mark.sample(1, 6)

MOST_GAPS = 5
# Attached with rows that have no entries.
FILLED = "ALTER TABLE t ATTACH PARTITION n FOR VALUES FROM (50) TO (60)"
GONE = {
    "drop": ("DROP TABLE {0}",),
    "detach": ("ALTER TABLE t DETACH PARTITION {0}",),
    "detach and drop": ("ALTER TABLE t DETACH PARTITION {0}", "DROP TABLE {0}"),
    "rename": ("ALTER TABLE {0} RENAME TO other",),
    "replace": (
        "ALTER TABLE t DETACH PARTITION {0}",
        "ALTER TABLE {0} RENAME TO other",
        "CREATE TABLE {0} (d int, id int, k text, v int, PRIMARY KEY (d, id))",
    ),
}
COMMANDS_HERE = [name for name in COMMANDS if name not in (*CALLS, "abort")]
CASES = [
    (scenes(command)[0], command, how, table)
    for command in COMMANDS_HERE
    for how in GONE
    for table in ("n", "t1")
    if (command, table) != ("attach", "n")
]


@pytest.mark.parametrize(("scene", "command", "how", "table"), CASES, ids=["-".join(case) for case in CASES])
def test_a_partition_goes_in_a_gap(
    server: str, templates: dict[str, str], gaps: Gaps, scene: str, command: str, how: str, table: str
) -> None:
    """In some of its gaps; together the cases have them all."""
    gaps.of(scene, command)
    count = len(gaps.known[scene, command])
    step = -(-count // MOST_GAPS) or 1
    wrong: dict[int, list[str]] = {}
    for at in range(1 + CASES.index((scene, command, how, table)) % step, count + 1, step):
        with operators.cloned(server, templates[scene]) as dsn, closing(Meeting(dsn, command, command)) as one:
            if command != "attach":
                run_sql(dsn, FILLED)
            _run(one, at, [line.format(table) for line in GONE[how]])
            _settle(one)
            if one.found:
                wrong[at] = [one.statements[at - 1][:80], *one.found]
    assert wrong == {}


def _run(one: Meeting, at: int, lines: list[str]) -> None:
    seen = 0

    def gap(*given: Any) -> None:
        nonlocal seen
        seen += 1
        one.statements.append(given[2] if len(given) > 2 else "COMMIT")
        if seen == at:
            with closing(steps.session(one.dsn)) as user:
                try:
                    sql(user, "SET lock_timeout = '30ms'")
                    for line in lines:
                        sql(user, line)
                    user.commit()
                except (psycopg2.errors.LockNotAvailable, psycopg2.errors.DeadlockDetected):
                    # The command has it.
                    user.rollback()

    event.listen(one.database.engine, "before_cursor_execute", gap)
    event.listen(one.database.engine, "commit", gap)
    try:
        one._do(one.first, one.database, "first")
    finally:
        event.remove(one.database.engine, "before_cursor_execute", gap)
        event.remove(one.database.engine, "commit", gap)


def _settle(one: Meeting) -> None:
    database = Database(one.dsn, "afterwards")
    (there,) = sql(one.watch, "SELECT count(*) FROM roir.index WHERE dropped_at IS NULL")
    if there != (1,):
        return
    for step in (sync.sync_partitions, clean_up.clean_up, sync.sync_partitions):
        try:
            step(*(database, "t", "test") if step is sync.sync_partitions else (database,))  # type: ignore[operator]
        except Exception as error:
            one.found.append(f"afterwards, {step.__name__}: {type(error).__name__} {error}")
    if sql(one.watch, "SELECT to_regclass('public.ix') IS NOT NULL") == [(True,)]:
        exact = steps.compare(database, "ix")
        if exact.missing or exact.extra or exact.different:
            one.found.append(str(exact))
        one.compare("afterwards")
