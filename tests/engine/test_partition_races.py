"""A partition is dropped, detached, renamed or replaced, by plain DDL and without the guard, in the gaps of a command.

The command succeeds, or says in words what to do. Afterwards a sync and a clean-up leave the index exact. A relation
that is gone has a number for a name: a sync once said "syntax error at or near".
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial

import psycopg2.errors
import pytest

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

pytestmark = pytest.mark.sample(1)

MOST_GAPS = 5
# This partition has rows without entries.
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


@dataclass
class Going(Meeting):
    """A first command, with plain DDL of a user in its gap."""

    lines: tuple[str, ...] = ()

    def run(self, at: int) -> None:
        self._run(at)

    def _in_the_gap(self, then: object) -> None:
        with closing(steps.session(self.dsn)) as user:
            try:
                sql(user, "SET lock_timeout = '30ms'")
                for line in self.lines:
                    sql(user, line)
                user.commit()
            except (psycopg2.errors.LockNotAvailable, psycopg2.errors.DeadlockDetected):
                # The command has the table.
                user.rollback()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize(("scene", "command", "how", "table"), CASES, ids=["-".join(case) for case in CASES])
def test_a_partition_goes_in_a_gap(
    server: str, templates: dict[str, str], gaps: Gaps, scene: str, command: str, how: str, table: str
) -> None:
    """Each case takes some of the command's gaps. Together the cases take them all."""
    gaps.of(scene, command)
    count = len(gaps.known[scene, command])
    step = -(-count // MOST_GAPS) or 1
    wrong: dict[int, list[str]] = {}
    for at in range(1 + CASES.index((scene, command, how, table)) % step, count + 1, step):
        lines = tuple(line.format(table) for line in GONE[how])
        with (
            operators.cloned(server, templates[scene]) as dsn,
            closing(Going(dsn, command, command, lines=lines)) as one,
        ):
            if command != "attach":
                run_sql(dsn, FILLED)
            one.run(at)
            _settle(one)
            if one.found:
                wrong[at] = [one.statements[at - 1][:80], *one.found]
    assert wrong == {}


def _settle(one: Meeting) -> None:
    database = Database(one.dsn, "afterwards")
    (there,) = sql(one.watch, "SELECT count(*) FROM roir.index WHERE dropped_at IS NULL")
    if there != (1,):
        return
    again = partial(sync.sync_partitions, database, "t", "test")
    for name, step in (("sync", again), ("clean-up", partial(clean_up.clean_up, database)), ("sync again", again)):
        try:
            step()
        except Exception as error:
            one.found.append(f"afterwards, {name}: {type(error).__name__} {error}")
    if sql(one.watch, "SELECT to_regclass('public.ix') IS NOT NULL") == [(True,)]:
        exact = steps.compare(database, "ix")
        if exact.missing or exact.extra or exact.different:
            one.found.append(str(exact))
        one.compare("afterwards")
