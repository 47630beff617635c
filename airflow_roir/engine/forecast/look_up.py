"""The cost of one look-up by the table, by the planned index's view, and by `roir.rows`, measured on this server.

The table's is that of the query itself. The others are measured on a sample: some rows are copied into a generation as
a build makes it, with its segments, B-trees and view, and all of that is rolled back.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from airflow_roir.definition import DATA_SCHEMA, QualifiedName, quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.forecast import trial
from airflow_roir.engine.forecast.ddl import STAND_IN
from airflow_roir.engine.forecast.query import TIMES, Asked
from airflow_roir.engine.generation import physical
from airflow_roir.engine.locks.locks import EXCLUSIVE, Attempts
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.readers import view
from airflow_roir.engine.scan.findings import DryRun
from airflow_roir.engine.source import catalog, owner
from airflow_roir.options import BuildOptions
from airflow_roir.quantity import counted

# roir.rows takes about 0.1 ms for each row; a look-up of more rows than this tells no more about one.
MOST_FOUND = 1_000
# The server plans the statements of a function again in each of its first five calls in a session.
FIRST_CALLS = 6
# How the first key column compares, as its B-tree does: >= and <=.
COMPARISONS = """
SELECT format('OPERATOR(%%I.%%s)', n.nspname, o.oprname) AS operator
  FROM pg_index i
  JOIN pg_opclass c ON c.oid = i.indclass[0]
  JOIN pg_amop a ON a.amopfamily = c.opcfamily AND a.amoplefttype = c.opcintype AND a.amoprighttype = c.opcintype
                AND a.amopstrategy IN (2, 4)
  JOIN pg_operator o ON o.oid = a.amopopr JOIN pg_namespace n ON n.oid = o.oprnamespace
 WHERE i.indexrelid = to_regclass(%(index)s) ORDER BY a.amopstrategy DESC
"""
# `owner.relation` may have forbidden views to this transaction, so that no view takes a table's name; this one is ours.
ALLOW_VIEWS = """
SELECT set_config('restrict_nonsystem_relation_kind', '', true)
 WHERE current_setting('restrict_nonsystem_relation_kind', true) IS NOT NULL
"""


@dataclass(frozen=True)
class LookUp:
    """What one look-up costs. way: `table`, `view` or `roir.rows`; ms: with planning, None if it isn't known.

    rows: how many it found. sample: the rows that were there to be found; None: all of the table's. problem: why ms
    isn't known.
    """

    way: str
    ms: float | None = None
    rows: int = 0
    sample: int | None = None
    problem: str | None = None

    def __str__(self) -> str:
        if self.ms is None:
            return f"{self.way}: not known: {self.problem}"
        of = "the query itself" if self.sample is None else f"measured on a sample of {counted(self.sample, 'row')}"
        first = "; more in the first five calls of a session" if self.way == "roir.rows" else ""
        return f"{self.way}: {self.ms:,.2f} ms for {counted(self.rows, 'row')}, {of}{first}"


def look_ups(database: Database, dry: DryRun, asked: Asked, serves: bool) -> Iterator[LookUp]:
    """The cost of each way; those of an index only if it serves the query. Leaves nothing behind.

    The others find as many rows as the query did, as far as the sample has them.
    """
    if asked.run_ms is None:
        yield LookUp("table", problem=asked.run_problem or "the query wasn't run")
    else:
        yield LookUp("table", asked.run_ms, asked.run_rows or 0)
    if serves:
        wanted = max(1, asked.rows if asked.run_rows is None else asked.run_rows)
        yield from _on_a_sample(database, dry, asked.columns, wanted)


def _on_a_sample(database: Database, dry: DryRun, columns: Sequence[str], wanted: int) -> Sequence[LookUp]:
    source = dry.source

    def attempt(connection: Connection) -> Sequence[LookUp] | str:
        catalog.hold(connection, source)
        with owner.for_a_while(connection, source):
            return trial.undone(connection, lambda: _measured(connection, dry, columns, wanted))

    attempts = Attempts(database, source.sql, source.relations, BuildOptions.lock_timeout_ms, 5.0, EXCLUSIVE)
    with telling_of_names():
        found = attempts.run(attempt, lambda line: None)
    return [LookUp("view", problem=found), LookUp("roir.rows", problem=found)] if isinstance(found, str) else found


def _measured(connection: Connection, dry: DryRun, columns: Sequence[str], wanted: int) -> Sequence[LookUp] | str:
    source = dry.source
    number = STAND_IN + int(execute(connection, "SELECT pg_backend_pid()").scalar_one())
    # Rows that share a unique key don't matter here.
    entry = physical.create(connection, number, replace(dry.entry, unique=""), dry.plan)
    copied = trial.copy_some(connection, source, entry, physical.base(number))
    if isinstance(copied, str):
        return copied
    for ordinal in range(dry.plan.segments + 1):
        physical.seal_segment(connection, number, ordinal, entry)
        execute(connection, f"ANALYZE {physical.segment(number, ordinal)}")
    physical.create_source_view(connection, number, source, entry)
    name = QualifiedName(DATA_SCHEMA, f"g{number}_look_up")
    execute(connection, view.statement(name, number, entry))
    trusted = owner.is_trusted(connection, source)
    execute(connection, ALLOW_VIEWS)
    # To read the table may run code of its owner, which could write.
    execute(connection, "SET LOCAL transaction_read_only = on")
    # As the view has it: an expression is a column there.
    key = replace(source.columns[entry.columns[0].source], computed=None)
    least, most = execute(connection, COMPARISONS, {"index": physical.base_key(number)}).scalars()
    ours = f"v.{quote(key.name)}"
    condition = f"{ours} {least} %(low)s::{key.comparand} AND {ours} {most} %(high)s::{key.comparand}"
    have = {column.source for column in entry.columns}
    read = ", ".join(f"v.{quote(column)}" for column in columns if column in have) or ours
    by_view = f"SELECT {read} FROM {name.sql} v WHERE {condition}"
    entries = f"ARRAY(SELECT (v.*)::{name.sql} FROM {name.sql} v WHERE {condition})"
    by_rows = f"SELECT * FROM roir.rows(NULL::{source.sql}, {entries})"
    ranges = list(_ranges(connection, f"{name.sql} v", ours, key.text("v"), wanted))
    if not ranges:
        return "the key is NULL in all rows of the sample"
    found = [LookUp("view", *_timed(connection, by_view, ranges), sample=copied.rows)]
    if not trusted:
        # Code of the table's owner runs as the owner alone.
        return [*found, LookUp("roir.rows", problem="the table belongs to another role")]
    return [*found, LookUp("roir.rows", *_timed(connection, by_rows, ranges), sample=copied.rows)]


def _ranges(connection: Connection, entries: str, key: str, text: str, wanted: int) -> Iterator[Mapping[str, str]]:
    """Some ranges of keys, each with about as many entries as are wanted, at random places."""
    there = int(execute(connection, f"SELECT count({key}) FROM {entries}").scalar_one())
    length = min(wanted, there, MOST_FOUND)
    for _ in range(TIMES if there else 0):
        first = random.randrange(there - length + 1)
        # NULLs come last.
        low, high = (
            execute(connection, f"SELECT {text} FROM {entries} ORDER BY {key} LIMIT 1 OFFSET {n}").scalar_one()
            for n in (first, first + length - 1)
        )
        yield {"low": low, "high": high}


def _timed(connection: Connection, statement: str, ranges: Sequence[Mapping[str, str]]) -> tuple[float, int]:
    """The milliseconds with planning, and the rows: medians over the ranges, each several times, in a warm session."""
    explain = f"EXPLAIN (ANALYZE, TIMING OFF, SUMMARY, FORMAT JSON) {statement}"
    taken: list[float] = []
    rows: list[float] = []
    for _ in range(FIRST_CALLS):
        execute(connection, explain, ranges[0])
    for _ in range(TIMES):
        for values in ranges:
            [told] = execute(connection, explain, values).scalar_one()
            taken.append(float(told["Planning Time"]) + float(told["Execution Time"]))
            rows.append(float(told["Plan"]["Actual Rows"]))
    return statistics.median(taken), round(statistics.median(rows))
