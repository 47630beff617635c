"""Plain DDL of each level of a partitioned table, in sequences, under the guard or with a sync after each transaction.

After that readers see the table's rows, and status raises no false alarm. Only the guard refuses statements: those that
would bring rows that no capture has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import psycopg2.errors
import pytest

from airflow_roir.engine import build, clean_up
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.partitions import sync
from airflow_roir.engine.schema import tamper
from airflow_roir.engine.work.phase_work import Step
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_detach import assert_shown

COLUMNS = "(d int, id int, k text, v int, PRIMARY KEY (d, id))"
# For each table: its parent, its bounds, and whether it has partitions. Between the bounds is room.
TREE = {
    "t1": ("t", 0, 10, False),
    "s": ("t", 20, 50, True),
    "s1": ("s", 20, 30, True),
    "s11": ("s1", 20, 25, False),
    "s12": ("s1", 27, 30, False),
    "s2": ("s", 35, 45, False),
}
LEVELS = ("t1", "s", "s1", "s11")
# The state to which a word brings a partition, a table that was detached, and one that was dropped; None: not possible.
WORDS = {
    "detach": ("out", None, None),
    "drop": ("gone", "gone", None),
    "truncate": ("in", "out", None),
    "write": ("in", "out", None),
    "rename": ("in", "out", None),
    "attach": (None, "in", None),
    "rebound": (None, "in", None),
    "create": (None, None, "in"),
}
LONGEST = 3
CHAINS = 12


def sequences(state: str = "in", words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The sequences that begin with a partition, bring or take rows, and end with a word that readers notice."""
    if {"detach", "drop"} & set(words) and (state == "in" or words[-1] in ("detach", "drop")) and words[-1] != "rename":
        yield words
    for word, (of_in, of_out, of_gone) in WORDS.items():
        after = {"in": of_in, "out": of_out, "gone": of_gone}[state]
        often = words.count(word) < (1 if word in ("write", "rename") else 2)
        if after is not None and often and len(words) < LONGEST and words[-1:] != (word,):
            yield from sequences(after, (*words, word))


# Longer sequences, some of which a user has run.
LONG = (
    ("detach", "truncate", "attach", "write"),
    ("detach", "truncate", "rebound", "drop"),
    ("detach", "write", "truncate", "attach"),
    ("truncate", "detach", "attach", "detach"),
    ("drop", "create", "write", "drop"),
    ("detach", "truncate", "attach", "write", "truncate", "detach", "truncate", "rebound"),
    ("detach", "write", "truncate", "rename", "attach", "write", "drop", "create", "write"),
    ("truncate", "detach", "attach", "detach", "rebound", "write", "detach", "drop"),
)


@dataclass
class Level:
    """One table of the tree, as the sequence has left it."""

    root: str
    name: str
    filled: bool = True

    def statements(self, word: str) -> list[str]:
        parent, low, high, _ = TREE[self.root]
        rows = f"SELECT {low} + i % 2, {{}} + i, 'k' || i % 3, i FROM generate_series(1, 6) i"
        match word:
            case "detach":
                return [f"ALTER TABLE {parent} DETACH PARTITION {self.name}"]
            case "drop":
                return [f"DROP TABLE {self.name}"]
            case "truncate":
                self.filled = False
                return [f"TRUNCATE {self.name}"]
            case "write":
                self.filled = True
                return [
                    f"INSERT INTO {self.name} {rows.format('(SELECT coalesce(max(id), 0) FROM ' + self.name + ')')}",
                    f"UPDATE {self.name} SET k = k || 'x', v = v + 1 WHERE id % 2 = 0",
                    f"DELETE FROM {self.name} WHERE id % 5 = 0",
                ]
            case "rename":
                was, self.name = self.name, f"{self.root}_renamed"
                return [f"ALTER TABLE {was} RENAME TO {self.name}"]
            case "attach" | "rebound":
                bounds = f"FROM ({low}) TO ({high + (word == 'rebound')})"
                return [f"ALTER TABLE {parent} ATTACH PARTITION {self.name} FOR VALUES {bounds}"]
        self.name, self.filled = self.root, False
        return [created(name, parent) for name, parent in below(self.root)]


def below(root: str) -> Iterator[tuple[str, str]]:
    """A table and all tables below it, each with its parent."""
    yield root, TREE[root][0]
    for name, (parent, *_) in TREE.items():
        if parent == root:
            yield from below(name)


def created(name: str, parent: str) -> str:
    _, low, high, levels = TREE[name]
    more = " PARTITION BY RANGE (d)" if levels else ""
    return f"CREATE TABLE {name} PARTITION OF {parent} FOR VALUES FROM ({low}) TO ({high}){more}"


def make(dsn: str) -> None:
    run_sql(
        dsn,
        f"CREATE TABLE t {COLUMNS} PARTITION BY RANGE (d)",
        *(created(name, parent) for name, (parent, *_) in TREE.items()),
        "INSERT INTO t SELECT d, i, nullif(i % 7, 3)::text, i "
        "FROM generate_series(1, 60) i, LATERAL (SELECT (ARRAY[1, 5, 21, 24, 28, 36])[1 + i % 6] AS d) d",
        "ANALYZE t",
    )


class Case:
    """An index of the tree, published or half built, and a level of the tree that leaves and comes back."""

    def __init__(self, database: Database, root: str, built: bool, guarded: bool) -> None:
        self.database, self.root, self.built, self.guarded = database, root, built, guarded
        make(database.dsn)
        if guarded:
            run_sql(database.dsn, "SELECT roir.guard()")
        _, run = steps.begin(database, include="v", batch_rows=2, segments=2)
        self.worker = steps.worker(database, run)
        if built:
            steps.finish_all(database, run)

    def go_through(self, words: tuple[str, ...], at_once: bool) -> None:
        """Creates the level's table and runs a sequence; checks that readers see the result and writes are followed."""
        dsn = self.database.dsn
        for name in (self.root, f"{self.root}_renamed"):
            run_sql(dsn, f"DROP TABLE IF EXISTS {name}")
        level = Level(self.root, self.root)
        run_sql(dsn, *level.statements("create"), *level.statements("write"))
        self.look()
        self.copy_on()
        # A clean-up or a drain does this. Only tables with marks are then reported as others for a while.
        with self.database.transaction() as connection:
            tamper.follow(connection, self.worker.job.generation_id)
        with closing(steps.session(dsn)) as user:
            user.autocommit = not at_once
            refused = self.say(user, level, words)
            if not refused:
                user.commit()
        self.look()
        self.copy_on()
        # The index follows each table that is a partition now, and its TRUNCATE.
        run_sql(dsn, "UPDATE t SET k = k || 'y', v = v - 1 WHERE id % 3 = 0")
        if not refused and words[-1] not in ("detach", "drop"):
            run_sql(dsn, f"TRUNCATE {level.name}", f"INSERT INTO t VALUES ({TREE[self.root][1]}, 999, 'new', 1)")
        self.look()

    def say(self, user: psycopg2.extensions.connection, level: Level, words: tuple[str, ...]) -> bool:
        """True if a statement would have brought rows that no capture has seen, which the guard refused."""
        for word in words:
            brings = self.guarded and level.filled and word in ("attach", "rebound")
            statements = level.statements(word)
            if brings:
                with pytest.raises(psycopg2.errors.ObjectInUse, match="would bring rows into"):
                    sql(user, *statements)
                return True
            for statement in statements:
                sql(user, statement)
            if user.autocommit:
                self.look()
        return False

    def look(self) -> None:
        """Checks that readers see exact entries and that the status warns of nothing."""
        if not self.guarded:
            sync.sync_partitions(self.database, "t", "test")
        if self.built:
            assert_shown(self.database)
        with self.database.transaction() as connection:
            assert faults.warnings(connection) == []

    def copy_on(self) -> None:
        """Copies two batches of the build, which check the partitions."""
        for _ in range(0 if self.built else 2):
            if isinstance(claim := self.worker.claim(), build.Claim):
                assert isinstance(self.worker.step(claim), Step)

    def end(self) -> None:
        self.worker.connection.close()
        if not self.built:
            self.built = True
            steps.finish_all(self.database, start_run(self.database, "ix", "test", take_over=True))
            self.look()
        clean_up.clean_up(self.database)
        steps.assert_exact(self.database)
        self.look()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("state", ["built", "half built"])
@pytest.mark.parametrize("commits", ["at once", "one by one"])
@pytest.mark.parametrize("root", LEVELS)
@pytest.mark.parametrize("chain", range(CHAINS))
@pytest.mark.parametrize("watch", ["guarded", "synchronised"])
def test_each_level_goes_and_comes(
    database: Database, watch: str, chain: int, root: str, commits: str, state: str
) -> None:
    """Many sequences in one index. Some leave entries that are still to be removed during the next ones."""
    case = Case(database, root, state == "built", watch == "guarded")
    for number, words in enumerate([*sequences(), *LONG][chain::CHAINS]):
        case.go_through(words, commits == "at once")
        if number % 3 == 2:
            clean_up.clean_up(database)
    case.end()
