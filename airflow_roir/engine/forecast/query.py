"""Asks the server's planner about a user's query: the partitions that it opens, the columns, the conditions.

The query is code of the caller: it runs with the caller's rights and settings, in a transaction that is read only and
has a time limit. Its text is always a bound value. The server takes it as the one query of a cursor, so that a second
statement is refused before the first one begins.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute, said, sqlstate
from airflow_roir.engine.forecast import conditions
from airflow_roir.engine.sessions.session import SESSION_SETTINGS
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput

LONGEST_MS = 5_000
# The median of these.
TIMES = 3
# Settings that a query of the caller's own application has by default. The others end statements and sessions, or say
# how this session quotes.
OF_THE_CALLER = (
    "TimeZone", "DateStyle", "IntervalStyle", "extra_float_digits", "bytea_output", "xmloption", "xmlbinary",
    "lc_monetary", "array_nulls", "search_path", "transform_null_equals", "row_security", "jit", "geqo",
)  # fmt: skip
GIVE = "SELECT pg_catalog.set_config('roir.statement', %(text)s, true)"
OPEN = """
DO $roir$ DECLARE c pg_catalog.refcursor := 'roir_query';
BEGIN OPEN c FOR EXECUTE pg_catalog.current_setting('roir.statement'); END $roir$
"""
RUN = "DO $roir$ BEGIN EXECUTE pg_catalog.current_setting('roir.statement'); END $roir$"
FETCH = "FETCH ALL FROM roir_query"
CLOSE = "CLOSE roir_query"
PREPARED = """
SELECT pg_catalog.cardinality(p.parameter_types) AS parameters, pg_catalog.to_jsonb(p) AS facts
  FROM pg_catalog.pg_prepared_statements p WHERE p.name OPERATOR(pg_catalog.=) 'roir_query'
"""
LEAVES = """
SELECT n.nspname AS schema, c.relname AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = ANY (%(leaves)s::oid[])
"""
ROOTS = """
SELECT DISTINCT coalesce(pg_partition_root(c.oid), c.oid)::regclass::text
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN unnest(%(schemas)s::text[], %(names)s::text[]) x (schema, name) ON x.schema = n.nspname AND x.name = c.relname
 ORDER BY 1
"""
NO_PARAMETER, NO_SUCH_OPTION, MULTIPLE, TIMED_OUT = "42P02", "42601", "42P11", "57014"
GENERIC_SINCE = 160_000
# Nodes that change or lock rows.
WRITES = {"ModifyTable": "it writes rows", "LockRows": "it locks rows: leave FOR UPDATE, FOR SHARE out"}
OF_CONDITIONS = ("Filter", "Index Cond", "Recheck Cond", "Hash Cond", "Merge Cond", "Join Filter")


@dataclass(frozen=True)
class Asked:
    """A query as the planner sees it. columns: those that it needs of the source, `*` for whole rows.

    opened: the leaves of the source that it opens; 0 if it reads none. whole: of them, those that it reads without an
    index. local: the indexes that it uses, by their names on the partitioned table. usable: columns with a condition
    that a B-tree could use; by_order: the column by which it wants the first rows. rows: the planner's estimate.
    planning_ms: measured. run_ms, run_rows: measured, None if it didn't run; run_problem: why it didn't.
    """

    opened: int
    whole: int
    local: tuple[str, ...]
    columns: tuple[str, ...]
    usable: tuple[str, ...]
    by_order: str | None
    rows: int
    parameters: int
    planning_ms: float
    run_ms: float | None = None
    run_rows: int | None = None
    run_problem: str | None = None


def ask(database: Database, source: Source, query: str, run: bool = False) -> Asked:
    """Plans the query as the caller, and runs it a few times if wanted. Changes nothing, and makes no object.

    Raises InvalidInput unless it is one SELECT that the server can plan.
    """
    with database.transaction() as connection:
        leaves = {(row.schema, row.name) for row in execute(connection, LEAVES, {"leaves": list(source.leaves)})}
    with _refusing(), _as_caller(database) as connection:
        plan, planning_ms = _explain(connection, query)
        nodes = list(_walk(plan))
        for node in nodes:
            if (what := WRITES.get(node["Node Type"])) is not None:
                raise InvalidInput(f"the query can't be asked about: {what}. Give one SELECT")
        parameters = _prepare(connection, query)
        scans = [node for node in nodes if (node.get("Schema"), node.get("Relation Name")) in leaves]
        opened = {(node["Schema"], node["Relation Name"]) for node in scans}
        if parameters:
            # The server prunes by a parameter's value when it begins to execute: with NULL it prunes what it can.
            values = ", ".join(["NULL"] * parameters)
            execute(connection, "SET LOCAL plan_cache_mode = force_generic_plan")
            pruned, _ = _explained(connection, f"EXPLAIN (VERBOSE, FORMAT JSON) EXECUTE roir_query({values})")
            if sum(node.get("Subplans Removed", 0) for node in _walk(pruned)):
                left = {(node.get("Schema"), node.get("Relation Name")) for node in _walk(pruned)} & leaves
                # A value has one partition; the planner doesn't say how many a range has.
                opened = left or set(list(opened)[:1])
    found = _of_source(nodes, scans, source)
    with database.transaction() as connection:
        local = _local(connection, scans)
    ran = _run(database, query) if run and not parameters else (None, None, None)
    if run and parameters:
        ran = (None, None, "a query with parameters has no values to run with")
    return Asked(
        opened=len(opened),
        whole=sum("Index Name" not in node and node["Node Type"] != "Bitmap Heap Scan" for node in scans),
        local=local,
        rows=max(1, int(plan["Plan Rows"])),
        parameters=parameters,
        planning_ms=planning_ms,
        run_ms=ran[0],
        run_rows=ran[1],
        run_problem=ran[2],
        **found,
    )


@contextmanager
def _as_caller(database: Database) -> Iterator[Connection]:
    """A transaction that can't write, with the caller's own settings. Always rolled back."""
    with database.connect() as connection:
        transaction = connection.begin()
        try:
            execute(connection, "SET TRANSACTION READ ONLY")
            execute(connection, f"SET LOCAL statement_timeout = {LONGEST_MS}")
            for name in OF_THE_CALLER:
                assert name in SESSION_SETTINGS
                execute(connection, f"SET LOCAL {name} TO DEFAULT")
            yield connection
        finally:
            if not connection.invalidated:
                transaction.rollback()


@contextmanager
def _refusing() -> Iterator[None]:
    """Says the server's error about a query as one about the input."""
    try:
        yield
    except DBAPIError as error:
        if error.connection_invalidated or sqlstate(error) is None:
            raise
        raise InvalidInput(f"the query can't be asked about: {_problem(error)}. Give one SELECT") from error


def _problem(error: DBAPIError) -> str:
    if sqlstate(error) == MULTIPLE:
        return "it isn't one query"
    if sqlstate(error) == TIMED_OUT:
        return f"the server takes longer than {LONGEST_MS // 1000} s"
    return said(error).removesuffix(".")


def _explain(connection: Connection, query: str) -> tuple[dict[str, Any], float]:
    """The plan, and the time of planning in milliseconds. With parameters, the plan for any values."""
    version = int(execute(connection, "SELECT pg_catalog.current_setting('server_version_num')").scalar_one())
    options = "VERBOSE, SUMMARY, FORMAT JSON"
    savepoint = connection.begin_nested()
    try:
        return _planned(connection, f"EXPLAIN ({options}) {query}")
    except DBAPIError as error:
        if sqlstate(error) != NO_PARAMETER:
            raise
        savepoint.rollback()
        if version < GENERIC_SINCE:
            raise InvalidInput(
                "the query has parameters, which EXPLAIN plans since PostgreSQL 16: write values instead of $1"
            ) from error
    return _planned(connection, f"EXPLAIN ({options}, GENERIC_PLAN) {query}")


def _planned(connection: Connection, statement: str) -> tuple[dict[str, Any], float]:
    # The first look also loads the catalogs into the session.
    taken = [_explained(connection, statement) for _ in range(TIMES)]
    return taken[-1][0], statistics.median(ms for _, ms in taken)


def _explained(connection: Connection, statement: str) -> tuple[dict[str, Any], float]:
    """The plan that a statement explains, with the time of planning and, if it ran, of execution."""
    execute(connection, GIVE, {"text": statement})
    execute(connection, OPEN)
    rows = execute(connection, FETCH).all()
    execute(connection, CLOSE)
    if len(rows) != 1 or len(rows[0][0]) != 1 or not isinstance(rows[0][0][0], Mapping):
        raise InvalidInput("the query can't be asked about: it isn't a SELECT. Give one SELECT")
    told = rows[0][0][0]
    return dict(told["Plan"]), float(told.get("Planning Time", 0)) + float(told.get("Execution Time", 0))


def _prepare(connection: Connection, query: str) -> int:
    """Lets the server prepare the query, which it does only for queries; returns the number of its parameters.

    Only after it was explained: so it is known to be one statement.
    """
    execute(connection, GIVE, {"text": f"PREPARE roir_query AS {query}"})
    execute(connection, RUN)
    row = execute(connection, PREPARED).one()
    # Since PostgreSQL 16; NULL for SELECT … INTO, and for what writes and returns nothing.
    if "result_types" in row.facts and row.facts["result_types"] is None:
        raise InvalidInput("the query can't be asked about: it returns no rows. Give one SELECT")
    return int(row.parameters)


def _run(database: Database, query: str) -> tuple[float | None, int | None, str | None]:
    """The milliseconds of the query with planning, its rows, and why it didn't run if it didn't."""
    taken: list[float] = []
    rows = None
    try:
        with _as_caller(database) as connection:
            while len(taken) < TIMES and sum(taken) < LONGEST_MS / TIMES:
                plan, ms = _explained(connection, f"EXPLAIN (ANALYZE, TIMING OFF, SUMMARY, FORMAT JSON) {query}")
                taken.append(ms)
                rows = round(plan["Actual Rows"] * plan.get("Actual Loops", 1))
    except DBAPIError as error:
        if error.connection_invalidated or sqlstate(error) is None:
            raise
        return None, None, _problem(error)
    return statistics.median(taken), rows, None


def _walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _walk(child)


def _of_source(nodes: list[dict[str, Any]], scans: list[dict[str, Any]], source: Source) -> dict[str, Any]:
    """The columns of the source that the plan needs, and how."""
    own = {str(node["Alias"]) for node in scans}
    # Nodes above the partitions name the table by its own alias, without the number of a partition.
    others = {str(node["Alias"]) for node in nodes if "Alias" in node} - own
    aliases = own | ({alias.rpartition("_")[0] for alias in own if alias.rpartition("_")[2].isdigit()} - others)
    types = {column.name: column.cast for column in source.columns.values()}
    needed: set[str] = set()
    usable: set[str] = set()
    for node in scans:
        for text in [*node.get("Output", ()), *(node[name] for name in OF_CONDITIONS if name in node)]:
            needed |= conditions.columns(text, aliases)
    for node in nodes:
        for name in OF_CONDITIONS:
            if name in node:
                usable |= conditions.usable(node[name], aliases, types)
    ordered = None
    if any(node["Node Type"] == "Limit" for node in nodes):
        keys = [node["Sort Key"][0] for node in nodes if node.get("Sort Key")]
        ordered = next((one for key in keys if (one := conditions.first_sorted(key, aliases))), None)
    return {
        "columns": tuple(sorted(needed)),
        "usable": tuple(sorted(usable & set(source.columns))),
        "by_order": ordered,
    }


def _local(connection: Connection, scans: list[dict[str, Any]]) -> tuple[str, ...]:
    """The indexes of the source that the plan uses."""
    used = []
    for scan in scans:
        for node in _walk(scan):
            if "Index Name" in node:
                used.append((scan["Schema"], node["Index Name"]))
    values = {"schemas": [schema for schema, _ in used], "names": [name for _, name in used]}
    return tuple(execute(connection, ROOTS, values).scalars()) if used else ()
