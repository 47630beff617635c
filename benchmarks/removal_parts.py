"""The cost of a removed row in active mode, by parts, at 1, 8 and 64 segments; and its cost by the way before.

Run by `make bench-writers ARGS="--parts"`. Each side is the capture function of a published index, cut short: it
returns before the next part begins. So a part is the difference of two sides. The way before is rendered without the
segments' bounds, as for an index whose bounds can't be used: a `DELETE` from the partitioned base, planned each time
unless there is only one segment.

Microseconds that the session computes for each row of a `DELETE`, beyond those without an index, after some in the same
transaction: plans that are kept are there. Last what a session keeps of plans after removals from all segments, in kB.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install, prepare
from airflow_roir.engine.capture import installation, row_function
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation import physical
from airflow_roir.engine.source.catalog import read_source
from airflow_roir.options import BuildOptions
from benchmarks.bulk import computed, publish

SEGMENTS = (1, 8, 64)
ROWS, REMOVED, BEFORE_THESE = 300_000, 20_000, 2_000
# Each side does what the one before does, and the part that it is named for; `before` is beside them.
NONE, ALL, BEFORE = "none", "DELETE from the segment, kept plan", "before"
SIDES = (NONE, "call", "questions", "lookup", "choice of the segment", ALL, BEFORE)
# The way before had no such setting; it decides whether the plan for a base of one segment is kept.
PINNED_SINCE = r"\n SET enable_seqscan .*"
PLANS = """
SELECT coalesce(sum(total_bytes), 0) FROM pg_backend_memory_contexts
WHERE name IN ('CachedPlan', 'CachedPlanSource', 'CachedPlanQuery', 'SPI Plan')
"""


def cut_short(body: str, names: list[str]) -> dict[str, str]:
    """The capture function's text of one generation in active mode, returning after each part of a removal.

    names: of its segments.
    """

    def before(line: str) -> str:
        # The first is the old entry's.
        found = re.search(rf"^ *{line}$", body, re.MULTILINE)
        if found is None:
            raise ValueError(f"the capture function has no line {line!r}")
        return f"{body[: found.start()]}RETURN NULL;\n{body[found.start() :]}"

    one_of = "|".join(re.escape(name) for name in names)
    chosen, removals = re.subn(rf"DELETE FROM ({one_of}) WHERE .*;", "RETURN NULL;", body)
    if removals < len(names):
        raise ValueError(f"the capture function removes from {removals} of {len(names)} segments")
    texts = ("BEGIN\n  RETURN NULL;\nEND", before("IF careful THEN"), before("IF gone THEN"), chosen, body)
    return dict(zip(SIDES[1:-1], texts, strict=True))


def by_parts(taken: dict[str, list[float]]) -> dict[str, float]:
    """The sides' rounds as parts: differences of medians, so that the parts add up to the whole."""
    medians = {side: statistics.median(taken[side]) for side in SIDES}
    parts = {side: medians[side] - medians[shorter] for shorter, side in pairwise(SIDES[:-1])}
    parts |= {"all": medians[ALL] - medians[NONE], "all, before": medians[BEFORE] - medians[NONE]}
    return {part: round(value, 2) for part, value in parts.items()}


class Table:
    """A table with a published index of `segments` segments, one without an index, and the times of the sides."""

    def __init__(self, database: Database, dsn: str, segments: int) -> None:
        self.dsn, self.name = dsn, f"item_{segments}"
        with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
            for name in (self.name, self.bare):
                cursor.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, k int, v int)")
                # Neighbours by id are in different segments.
                rows = f"SELECT i, i * 7919::bigint % 200003, i FROM generate_series(1, {ROWS}) i"
                cursor.execute(f"INSERT INTO {name} {rows}")
                cursor.execute(f"ANALYZE {name}")
        definition = IndexDefinition.parse(f"ours_{segments}", self.name, "k", "v")
        options = BuildOptions(segments=segments, verify="none", revert_window_s=0)
        prepared = prepare.prepare(database, definition, options)
        publish(database, prepared.index)
        with database.transaction() as connection:
            source = read_source(connection, definition.source)
            (target,) = installation.targets(connection, source.oid)
        if target.bounds is None or len(target.bounds) != segments - 1:
            raise SystemExit(f"wanted {segments} segments, got bounds {target.bounds}")
        self.function = f"{row_function.function_name(source.oid)}()"
        self.now = row_function.body(source, [target])
        self.texts = cut_short(
            self.now, [physical.segment(target.generation_id, number + 1) for number in range(segments)]
        )
        self.texts[BEFORE] = row_function.body(source, [replace(target, bounds=None)])
        self.taken: dict[str, list[float]] = {}

    @property
    def bare(self) -> str:
        """The table without an index."""
        return f"{self.name}_bare"

    def measure(self, side: str) -> int:
        """One DELETE, rolled back; the bytes of the plans that the session then has."""
        connection = psycopg2.connect(self.dsn)
        with connection.cursor() as cursor:
            if side != NONE:
                cursor.execute("SELECT pg_get_functiondef(%s::regprocedure)", [self.function])
                definition = cursor.fetchone()[0]
                if self.now not in definition:
                    raise SystemExit(f"the function isn't what is rendered: {definition}")
                definition = definition.replace(self.now, self.texts[side])
                cursor.execute(re.sub(PINNED_SINCE, "", definition) if side == BEFORE else definition)
            delete = f"DELETE FROM {self.bare if side == NONE else self.name} WHERE id BETWEEN %s AND %s"
            cursor.execute(delete, [1, BEFORE_THESE])
            begun = computed(connection)
            cursor.execute(delete, [BEFORE_THESE + 1, BEFORE_THESE + REMOVED])
            taken = computed(connection) - begun
            cursor.execute(PLANS)
            plans = int(cursor.fetchone()[0])
        connection.close()
        self.taken.setdefault(side, []).append(taken * 1e6 / REMOVED)
        return plans


def measure(dsn: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each part, medians of the rounds."""
    database = Database(dsn, "roir bench")
    install.init(database)
    tables = {segments: Table(database, dsn, segments) for segments in SEGMENTS}
    plans = {}
    for number in range(rounds):
        for segments, table in tables.items():
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                plans[segments, side] = table.measure(side)
    columns = {}
    for segments, table in tables.items():
        kept = {
            name: round(plans[segments, side] / 1024)
            for name, side in (("plans, kB", ALL), ("plans, before, kB", BEFORE))
        }
        columns["1 segment" if segments == 1 else f"{segments} segments"] = by_parts(table.taken) | kept
    first = next(iter(columns.values()))
    return [{"part": part, **{name: column[part] for name, column in columns.items()}} for part in first]
