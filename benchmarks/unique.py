"""A unique index over many partitions, built while writers make and heal duplicates, and everything is killed.

`make bench-unique`, or `make bench-unique ARGS="--rows 50000 --partitions 20 --groups 100"` for a quick look. It starts
a PostgreSQL of its own. Results: benchmarks/results/unique.json, and what it says.

Workers and the driver are processes of their own, killed at random moments by a printed seed; pauses come likewise. At
each pause one snapshot tells which keys rows share (`GROUP BY`), and which of them are written down in
`roir.duplicate`: all that were there when the operation looked last, and none that wasn't. The writers' log tells which
keys changed since. Then all are healed, the operation goes on to its end, and the index is exact and enforced.

With `--cost ROUNDS` it measures what a unique build costs instead, see benchmarks/unique_cost.py.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.errors

from airflow_roir.engine import install, prepare
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.options import BuildOptions
from benchmarks import unique_cost
from benchmarks.server import bench_server, described, facts
from benchmarks.unique_operation import Operation, draw
from benchmarks.unique_table import GROUPS, INDEX, Table
from benchmarks.unique_writers import INSERT, MOVE, REMOVE, SWAP, Writer

RESULTS = Path(__file__).parent / "results" / "unique.json"
WRITERS = 2
# The share of the groups that are in the table before; writers make the rest.
LOADED = 0.7
RECORDED = """
SELECT (key ->> 0)::bigint, array_agg(ARRAY[(primary_key ->> 0)::bigint, (primary_key ->> 1)::bigint]
                                      ORDER BY (primary_key ->> 0)::bigint, (primary_key ->> 1)::bigint)
  FROM roir.duplicate WHERE healed_at IS NULL GROUP BY 1
"""
KNOWN = (
    "SELECT (key ->> 0)::bigint, extract(epoch FROM min(found_at))::float8 FROM roir.duplicate "
    "WHERE healed_at IS NULL GROUP BY 1"
)
MARK = "SELECT coalesce(max(looked_xid::numeric), 0)::bigint FROM roir.generation WHERE status = 'building'"

Groups = dict[int, list[list[int]]]


def compared(oracle: Groups, recorded: Groups, since: set[int], all_of_them: bool = True) -> dict[str, list[int]]:
    """Keys by what is wrong with them. since: of these nothing is known. all_of_them: each must be written down."""
    known = (oracle.keys() | recorded.keys()) - since
    both = known & oracle.keys() & recorded.keys()
    return {
        "not found": sorted(known - recorded.keys()) if all_of_them else [],
        "invented": sorted(known - oracle.keys()),
        "of other rows": sorted(key for key in both if all_of_them and oracle[key] != recorded[key]),
    }


class Show:
    """One build from prepare to an enforced index, and what was seen on the way."""

    def __init__(self, dsn: str, chosen: argparse.Namespace) -> None:
        self.dsn, self.chosen = dsn, chosen
        self.chance = random.Random(chosen.seed)
        self.database = Database(dsn, "roir bench")
        install.init(self.database)
        self.table = Table(chosen.rows, chosen.partitions)
        self.connection = psycopg2.connect(dsn)
        self.connection.autocommit = True
        self.failures: list[str] = []
        self.said: dict[str, Any] = {}
        with self.connection.cursor() as cursor:
            self.table.load(cursor)
            loaded = int(chosen.groups * LOADED)
            each = min(20_000, (chosen.rows // 2 - loaded * 3) // WRITERS)
            rows = self.table.some_rows(self.chance, loaded * 3 + each * WRITERS)
            self.loaded = self.table.make_groups(cursor, self.chance, rows, loaded)
            cursor.execute("VACUUM (ANALYZE) customer")
        self.writers = self._writers(rows, chosen.groups - loaded)

    def _writers(self, rows: list[int], standing: int) -> list[Writer]:
        pairs = [(self.table.key(group[0]), group[1]) for group in self.loaded if len(group) == 2]
        to_heal = self.chance.sample(pairs, len(pairs) // 20)
        return [
            Writer(
                self.dsn, number, random.Random(f"{self.chosen.seed} {number}"), self.table, rows[number::WRITERS],
                to_heal[number::WRITERS], (standing + number) // WRITERS, self.chosen.writes / WRITERS,
            )
            for number in range(WRITERS)
        ]  # fmt: skip

    def play(self) -> None:
        """All of it."""
        chosen = self.chosen
        options = BuildOptions(parallelism=chosen.parallelism, ranges=chosen.ranges, segments=chosen.segments,
                               batch_rows=chosen.batch_rows, revert_window_s=0)  # fmt: skip
        prepare.prepare(self.database, self.table.definition(), options, "bench")
        moments = draw(self.chance, chosen.kills)
        self.tell("moments", [f"{one.what} at {one.share:.2f} of {one.phase}" for one in moments])
        self.operation = Operation(self.dsn, self.database, chosen.parallelism, moments, self.check_pause)
        begun = time.time()
        try:
            for writer in self.writers:
                writer.start()
            self.operation.carry_on()
            self.tell_when_known(begun, time.time())
            self.check("the first pause, under writers")
            for writer in self.writers:
                writer.honest.set()
            self.hold_writers()
            self.operation.carry_on()
            self.check("the second pause, writers at rest", exactly=True)
            self.heal()
            self.let_writers_go()
            self.operation.carry_on()
            self.completed()
        finally:
            for writer in self.writers:
                writer.halt.set()
            for writer in self.writers:
                writer.join()
            self.operation.close()
        self.failures += [f"a writer failed: {writer.failed!r}" for writer in self.writers if writer.failed]
        done: dict[str, int] = {}
        for writer in self.writers:
            for name, count in writer.log.done.items():
                done[name] = done.get(name, 0) + count
        self.tell("happened", self.operation.happened)
        self.tell("writers did", dict(sorted(done.items())))

    def tell(self, name: str, value: Any) -> None:
        """Print and keep."""
        self.said[name] = value
        print(f"{name}: {value}", flush=True)

    def fail(self, why: str) -> None:
        """Records a failure, and continues."""
        self.failures.append(why)
        print(f"WRONG: {why}", flush=True)

    def hold_writers(self) -> None:
        """The writers do nothing until `let_writers_go`."""
        for writer in self.writers:
            writer.still.set()
        for writer in self.writers:
            writer.idle.wait()

    def let_writers_go(self) -> None:
        """The writers continue."""
        for writer in self.writers:
            writer.idle.clear()
            writer.still.clear()

    @contextmanager
    def one_snapshot(self) -> Iterator[Any]:
        """A cursor."""
        connection = psycopg2.connect(self.dsn)
        connection.set_session("REPEATABLE READ", readonly=True)
        with connection.cursor() as cursor:
            yield cursor
        connection.close()

    def check_pause(self, phase: str) -> None:
        """At a pause in the middle, groups may be missing, but those that are recorded must be right."""
        self.check(f"paused in {phase}", all_of_them=False)

    def check(self, where: str, exactly: bool = False, all_of_them: bool = True) -> None:
        """Compares the recorded groups with the oracle. exactly: no writer has written since the operation looked."""
        with self.one_snapshot() as cursor:
            cursor.execute(GROUPS)
            oracle: Groups = dict(cursor.fetchall())
            cursor.execute(RECORDED)
            recorded: Groups = dict(cursor.fetchall())
            cursor.execute(MARK)
            mark = cursor.fetchone()[0]
        events = [event for writer in self.writers for event in list(writer.log.events)]
        never = {key for writer in self.writers for key in writer.log.never.copy()}
        since = set() if exactly else {event.key for event in events if event.ended is None or event.xid >= mark}
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT DISTINCT (key ->> 0)::bigint FROM roir.duplicate")
            ever = {row[0] for row in cursor.fetchall()}
        made = {self.table.key(group[0]) for group in self.loaded} | {event.key for event in events if event.makes}
        wrong = compared(oracle, recorded, since, all_of_them)
        wrong["never were one"] = [*(ever & never), *(ever - made - never)]
        for what, keys in wrong.items():
            if keys:
                self.fail(f"{where}: {len(keys)} groups {what}: {keys[:5]}")
        self.tell(
            where,
            {"groups by GROUP BY": len(oracle), "written down": len(recorded),
             **{what: len(keys) for what, keys in wrong.items()},
             "changed since the last look": len(since & (oracle.keys() | recorded.keys())),
             "keys that only seemed one": len(never), "healed meanwhile": len(ever) - len(recorded)},
        )  # fmt: skip

    def tell_when_known(self, begun: float, paused: float) -> None:
        """Reports how early the groups that are left were found."""
        with self.connection.cursor() as cursor:
            cursor.execute(KNOWN)
            found = dict(cursor.fetchall())
            known = sorted(found.values())
        diary = self.operation.diary
        built = next((at for at, phase, _ in diary if phase not in ("build", "prepare")), paused)

        def when(at: float) -> str:
            share = max((share for seen, _, share in diary if seen <= at), default=0.0)
            return f"{at - begun:.1f} s, {share:.0%} of the ranges"

        made: dict[int, float] = {}
        for event in (event for writer in self.writers for event in list(writer.log.events)):
            if event.makes:
                made.setdefault(event.key, event.ended or paused)
        loaded = {self.table.key(group[0]) for group in self.loaded}

        def share_of(end: float, those: set[int]) -> str:
            known = sum(found[key] <= end for key in those)
            return f"{known / max(1, len(those)):.0%}"

        def shares(end: float) -> str:
            there = {key for key in found if key in loaded or made.get(key, paused) <= end}
            of_table = share_of(end, found.keys() & loaded)
            return f"{share_of(end, there)} of {len(there)} that were there, {of_table} of the table's own"

        if known:
            half_done = next((at for at, _, share in diary if share >= 0.5), built)
            self.tell(
                "known",
                {"the first": when(known[0]), "half of them": when(statistics.median_low(known)),
                 "all": when(known[-1]), "the build's end": f"{built - begun:.1f} s",
                 "at half of the ranges": shares(half_done), "at the build's end": shares(built),
                 "the pause": f"{paused - begun:.1f} s"},
            )  # fmt: skip

    def heal(self) -> None:
        """Heals the groups as a user does who reads the table of duplicates: one row of each group keeps the key."""
        with self.connection.cursor() as cursor:
            cursor.execute(RECORDED)
            for number, (_, rows) in enumerate(cursor.fetchall()):
                for place, (day, row) in enumerate(rows[1:]):
                    if (number + place) % 2:
                        cursor.execute(REMOVE, (day, row))
                    else:
                        cursor.execute(MOVE, (-row, day, row))

    def completed(self) -> None:
        """The index is there, exact and enforced."""
        if (state := self.operation.state())[0] != "completed":
            self.fail(f"not completed: {state}")
            return
        self.hold_writers()
        with self.connection.cursor() as cursor:
            cursor.execute(GROUPS)
            if left := cursor.fetchall():
                self.fail(f"{len(left)} keys are shared in a unique index: {left[:5]}")
        report = verify(self.database, INDEX)
        if not report.is_exact:
            self.fail(f"not exact: {report}")
        self.let_writers_go()
        refused = self.enforced()
        self.tell("published", {"exact": report.is_exact, "refused": refused})

    def enforced(self) -> str:
        """Try to make duplicates."""
        tried = refused = 0
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT day, id, number FROM customer WHERE number < 0 OR id < 200 ORDER BY id LIMIT 60")
            rows = [row for row in cursor.fetchall() if row[2] is not None]
            for (day, row, number), (_, _, other) in pairwise(rows):
                for statement, values in ((INSERT, (day, -row, number)), (MOVE, (other, day, row))):
                    tried += 1
                    try:
                        cursor.execute(statement, values)
                    except psycopg2.errors.UniqueViolation as error:
                        refused += error.diag.constraint_name == "customer_number"
            (day, row, number), (on, another, other) = rows[:2]
            cursor.execute(SWAP, {"d": day, "a": row, "n": number, "e": on, "b": another, "m": other})
            swapped = cursor.rowcount
        if (refused, swapped) != (tried, 2):
            self.fail(f"{refused} of {tried} duplicates refused, {swapped} rows swapped")
        return f"{refused} of {tried}"


def main() -> int:
    """See the module. Returns 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--partitions", type=int, default=200)
    parser.add_argument("--groups", type=int, default=1000, help="of rows that share a key")
    parser.add_argument("--writes", type=int, default=200, help="a second, of all writers")
    parser.add_argument("--kills", type=int, default=8, help="and pauses")
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--ranges", type=int, help="at least; the plan chooses by default")
    parser.add_argument("--segments", type=int, help="the plan chooses by default")
    parser.add_argument("--batch-rows", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--cost", type=int, metavar="ROUNDS", help="measure what a unique build costs, in so many")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="with --cost: a checkout of another commit")
    parser.add_argument("--pg", type=int, default=18, choices=(15, 16, 17, 18))
    parser.add_argument("--shared-buffers", default="1GB")
    parser.add_argument("--results", type=Path, metavar="FILE", help="elsewhere than in benchmarks/results")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    with bench_server(chosen.pg, chosen.shared_buffers) as server:
        dsn = server.dsn("bench")
        connection = psycopg2.connect(dsn)
        with connection.cursor() as cursor:
            known = facts(cursor)
        connection.close()
        print(described(known), flush=True)
        path = chosen.results or (RESULTS if chosen.cost is None else unique_cost.RESULTS)
        if chosen.cost is not None:
            found = unique_cost.measure(server, Table(chosen.rows, chosen.partitions), chosen)
            path.write_text(json.dumps({**known, **found}, indent=1) + "\n")
            print(unique_cost.table(found["sides"]))
            return 0
        show = Show(dsn, chosen)
        show.play()
        show.connection.close()
    asked = {name: value for name, value in vars(chosen).items() if not isinstance(value, Path)}
    path.write_text(json.dumps({**known, **asked, **show.said, "wrong": show.failures}, indent=1) + "\n")
    print(f"{len(show.failures)} things were wrong")
    return 1 if show.failures else 0


if __name__ == "__main__":
    sys.exit(main())
