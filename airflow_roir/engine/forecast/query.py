"""Asks the server's planner about a user's query: the partitions that it opens, the columns that it needs, its rows."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute, sqlstate
from airflow_roir.engine.forecast import conditions
from airflow_roir.engine.forecast.planned import (
    GIVE,
    LONGEST_MS,
    Plan,
    as_caller,
    explain,
    explained,
    milliseconds,
    nodes,
    problem,
    refusing,
)
from airflow_roir.engine.forecast.substitute import Substitute
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput

# The median of these.
TIMES = 3
RUN = "DO $roir$ BEGIN EXECUTE pg_catalog.current_setting('roir.statement'); END $roir$"
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
# Nodes that change or lock rows.
WRITES = {"ModifyTable": "it writes rows", "LockRows": "it locks rows: leave FOR UPDATE, FOR SHARE out"}

OTHER_COLUMNS = (conditions.WHOLE_ROW, "ctid", "tableoid", "xmin", "xmax", "cmin", "cmax")

# Schema and name of each partition that has rows.
Leaves = Collection[tuple[str, str]]


@dataclass(frozen=True)
class Asked:
    """A query as the planner sees it. columns: those that it needs of the source, `*` for whole rows.

    opened: the leaves of the source that it opens; 0 if it reads none, None if that depends on its parameters' values.
    whole: of them, those that it reads without an index. local: the indexes that it uses, by their names on the
    partitioned table. rows: the planner's estimate of those that it needs of the source, at least one of each leaf.
    planning_ms: measured. run_ms, run_rows: measured, None if it didn't run; run_problem: why it didn't.
    """

    opened: int | None
    whole: int
    local: tuple[str, ...]
    columns: tuple[str, ...]
    rows: int
    parameters: int
    planning_ms: float
    run_ms: float | None = None
    run_rows: int | None = None
    run_problem: str | None = None


def ask(
    database: Database,
    source: Source,
    query: str,
    partition_key: Sequence[str] = (),
    run: bool = False,
    known: Sequence[conditions.Known] = (),
) -> tuple[Asked, Substitute]:
    """Plans the query as the caller, and runs it a few times if wanted. Changes nothing, and makes no object.

    known: the expressions of the index, which count as columns by their names, and its condition, which needs none.
    Also returns the substitute by which to ask about indexes. Raises InvalidInput unless it is one SELECT that the
    server can plan.
    """
    with database.transaction() as connection:
        leaves = {(row.schema, row.name) for row in execute(connection, LEAVES, {"leaves": list(source.leaves)})}
        substitute = Substitute.of(connection, source, leaves)
    with refusing(), as_caller(database) as connection:
        # The first look also loads the catalogs into the session.
        plans = [explain(connection, query) for _ in range(TIMES)]
        plan = plans[-1]
        for node in nodes(plan):
            if (what := WRITES.get(node["Node Type"])) is not None:
                raise InvalidInput(f"the query can't be asked about: {what}. Give one SELECT")
        parameters = _prepare(connection, query)
        scans = _scans(plan, leaves)
        aliases = _aliases(plan, scans)
        opened: int | None = len({(node["Schema"], node["Relation Name"]) for node in scans})
        if parameters:
            opened = _opened(connection, parameters, opened or 0, _by_value(plan, aliases, partition_key), leaves)
    with database.transaction() as connection:
        local = _local(connection, scans)
    ran: tuple[float | None, int | None, str | None] = (None, None, None)
    if run:
        ran = _run(database, query, leaves) if not parameters else (None, None, "its parameters have no values")
    needed = _needed(source, scans, aliases, known)
    asked = Asked(
        opened=opened,
        whole=sum("Index Name" not in node and node["Node Type"] != "Bitmap Heap Scan" for node in scans),
        local=local,
        columns=tuple(sorted(needed)),
        rows=max(1, round(_rows(plan, leaves))),
        parameters=parameters,
        planning_ms=statistics.median(map(milliseconds, plans)),
        run_ms=ran[0],
        run_rows=ran[1],
        run_problem=ran[2],
    )
    return asked, substitute


def _needed(
    source: Source, scans: Sequence[Plan], aliases: Collection[str], known: Sequence[conditions.Known]
) -> set[str]:
    """The columns that the scans need, and the names of the expressions."""
    needed: set[str] = set()
    for node in scans:
        for text in _texts(node):
            rest, names = conditions.computed(text, aliases, known)
            needed |= names
            # An alias may rename columns: the names of others aren't the source's.
            columns = conditions.columns(rest, aliases)
            needed |= {column for column in columns if column in source.columns or column in OTHER_COLUMNS}
    return needed


def _texts(node: Plan) -> list[str]:
    return [*node.get("Output", ()), *(node[name] for name in conditions.FIELDS if name in node)]


def _opened(connection: Connection, parameters: int, planned: int, by_value: bool | None, leaves: Leaves) -> int | None:
    """The leaves that a query with parameters opens; None if that depends on their values.

    The server prunes by a parameter's value when it begins to execute: with NULL it prunes what it can.
    """
    if by_value is None:
        return planned
    execute(connection, "SET LOCAL plan_cache_mode = force_generic_plan")
    values = ", ".join(["NULL"] * parameters)
    pruned = explained(connection, f"EXPLAIN (VERBOSE, FORMAT JSON) EXECUTE roir_query({values})")
    # One value of the partition key has one partition.
    is_pruned = any(node.get("Subplans Removed") for node in nodes(pruned))
    return max(1, len(_scans(pruned, leaves))) if by_value and is_pruned else None


def _by_value(plan: Plan, aliases: Collection[str], partition_key: Sequence[str]) -> bool | None:
    """True if all of the partition key is compared with parameters by `=`; None if nothing of it is, in any way."""
    found: dict[str, bool] = {}
    for text in (node[name] for node in nodes(plan) for name in conditions.FIELDS if name in node):
        for column, equal in conditions.with_parameters(text, aliases).items():
            found[column] = equal and found.get(column, True)
    if not found.keys() & set(partition_key):
        return None
    return all(found.get(column, False) for column in partition_key)


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


def _run(database: Database, query: str, leaves: Leaves) -> tuple[float | None, int | None, str | None]:
    """The milliseconds of the query with planning, the rows that it needs, and why it didn't run if it didn't."""
    taken: list[float] = []
    rows = None
    try:
        with as_caller(database) as connection:
            while len(taken) < TIMES and sum(taken) < LONGEST_MS / TIMES:
                plan = explained(connection, f"EXPLAIN (ANALYZE, VERBOSE, TIMING OFF, SUMMARY, FORMAT JSON) {query}")
                taken.append(milliseconds(plan))
                rows = round(_rows(plan, leaves, "Actual Rows"))
    except DBAPIError as error:
        if error.connection_invalidated or sqlstate(error) is None:
            raise
        return None, None, problem(error)
    return statistics.median(taken), rows, None


def _scans(plan: Plan, leaves: Leaves) -> list[Plan]:
    return [node for node in nodes(plan) if (node.get("Schema"), node.get("Relation Name")) in leaves]


def _rows(node: Plan, leaves: Leaves, figure: str = "Plan Rows") -> float:
    """The rows of the source that the query needs, by the planner's estimate or as it was."""
    own = float(node[figure]) * float(node.get("Actual Loops", 1))
    if (node.get("Schema"), node.get("Relation Name")) in leaves:
        return own
    below = sum(_rows(child, leaves, figure) for child in node.get("Plans", ()))
    return min(below, own) if node["Node Type"] == "Limit" else below


def _aliases(plan: Plan, scans: Sequence[Plan]) -> set[str]:
    """The aliases of the source in the plan's texts."""
    own = {str(node["Alias"]) for node in scans}
    # Nodes above the partitions name the table by its own alias, without the number of a partition.
    others = {str(node["Alias"]) for node in nodes(plan) if "Alias" in node} - own
    return own | ({alias.rpartition("_")[0] for alias in own if alias.rpartition("_")[2].isdigit()} - others)


def _local(connection: Connection, scans: Sequence[Plan]) -> tuple[str, ...]:
    """The indexes of the source that the plan uses."""
    used = [(scan["Schema"], node["Index Name"]) for scan in scans for node in nodes(scan) if "Index Name" in node]
    values = {"schemas": [schema for schema, _ in used], "names": [name for _, name in used]}
    return tuple(execute(connection, ROOTS, values).scalars()) if used else ()
