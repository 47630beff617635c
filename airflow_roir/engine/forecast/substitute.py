"""Asks the planner whether a B-tree serves a query: on an empty table in one piece with that B-tree.

The substitute is a temporary table with the table's name, so that the query means it. Views over the table get
substitutes, too. All of it is rolled back. If the query still reads the table itself, as in a function, the answer
isn't known.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.forecast import conditions
from airflow_roir.engine.forecast.planned import as_caller, explain, nodes, problem
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput

INDEX = "roir_substitute"
# The server's limit.
MOST_COLUMNS = 32
MOST_VIEWS = 100
# In the order in which they depend on each other. The path has no schema of users, so that bodies have full names.
VIEWS = """
WITH RECURSIVE above (oid, level) AS (
    SELECT %(source)s::oid, 0
    UNION
    SELECT c.oid, a.level + 1
      FROM above a
      JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = a.oid
                      AND d.classid = 'pg_rewrite'::regclass
      JOIN pg_rewrite r ON r.oid = d.objid AND r.ev_class <> a.oid
      JOIN pg_class c ON c.oid = r.ev_class AND c.relkind = 'v' AND c.relnamespace <> to_regnamespace('roir_data')
     WHERE a.level < 32)
SELECT n.nspname AS schema, c.relname AS name, rtrim(pg_get_viewdef(c.oid), ';') AS body
  FROM (SELECT oid, max(level) AS level FROM above WHERE level > 0 GROUP BY oid ORDER BY 2 LIMIT %(most)s) v
  JOIN pg_class c ON c.oid = v.oid JOIN pg_namespace n ON n.oid = c.relnamespace ORDER BY v.level
"""
# Whether each bare name means its relation, or nothing, under the caller's own path. There other roles may have made
# functions and operators, and the transaction can still write: so each one is named with its schema.
BARE = """
SELECT coalesce(pg_catalog.bool_and(o.bare IS NULL OR o.bare OPERATOR(pg_catalog.=) o.full_one), true)
  FROM ROWS FROM (pg_catalog.unnest(%(schemas)s::pg_catalog.text[]), pg_catalog.unnest(%(names)s::pg_catalog.text[]))
       AS x (schema, name)
 CROSS JOIN LATERAL (
       SELECT pg_catalog.to_regclass(pg_catalog.quote_ident(x.name))::pg_catalog.oid AS bare,
              pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', x.schema, x.name))::pg_catalog.oid AS full_one) o
"""
PATH = """
SELECT pg_catalog.set_config('search_path', pg_catalog.concat_ws(', ', CASE WHEN %(first)s THEN 'pg_temp' END,
       CASE WHEN p.now OPERATOR(pg_catalog.<>) '' THEN p.now END, CASE WHEN NOT %(first)s THEN 'pg_temp' END), true)
  FROM pg_catalog.current_setting('search_path') AS p (now)
"""
SCANS = ("seqscan", "indexscan", "indexonlyscan", "bitmapscan", "tidscan", "sort", "nestloop", "hashjoin", "mergejoin")
# The planner's ways, by what each may not use. A table without rows is read whole unless that is forbidden; some
# conditions need a bitmap; a join needs a loop over the other table. In the first way an index that has all columns is
# read alone.
COVERING = ("seqscan", "bitmapscan", "tidscan")
WAYS = (
    COVERING,
    ("seqscan", "indexonlyscan", "bitmapscan", "tidscan", "hashjoin", "mergejoin"),
    ("seqscan", "indexonlyscan", "indexscan", "tidscan", "hashjoin", "mergejoin"),
    ("hashjoin", "mergejoin", "tidscan"),
)
WITHOUT = ("indexscan", "indexonlyscan", "bitmapscan")
SORTS = ("Sort", "Incremental Sort")

Plan = dict[str, Any]


@dataclass(frozen=True)
class Use:
    """The use of a B-tree for a query. None: not known, for the reason in `why`.

    serves: it finds the query's rows, by a condition on its first column or by its order. covers: it has all columns.
    """

    serves: bool | None
    covers: bool | None
    why: str = ""


@dataclass(frozen=True)
class Substitute:
    """The substitutes for a source and the views over it. names: those that a query may use for them."""

    source: Source
    leaves: Collection[tuple[str, str]]
    views: Sequence[tuple[QualifiedName, str]] = field(default_factory=tuple)

    @classmethod
    def of(cls, connection: Connection, source: Source, leaves: Collection[tuple[str, str]]) -> Substitute:
        """Reads the views over the source."""
        found = execute(connection, VIEWS, {"source": source.oid, "most": MOST_VIEWS}).all()
        return cls(source, leaves, tuple((QualifiedName(row.schema, row.name), row.body) for row in found))

    def use(self, database: Database, query: str, entry: Entry) -> Use:
        """The use of an index's B-tree for a query that the server has planned before. entry: the index's."""
        columns = [column.source for column in entry.columns]
        try:
            with as_caller(database, lambda connection: self._make(connection, entry)) as connection:
                return self._use(connection, query, columns)
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            return Use(None, None, problem(error))

    def _make(self, connection: Connection, entry: Entry) -> None:
        table = f"pg_temp.{quote(str(self.source.name.name))}"
        first_column, *others = entry.columns
        # An INCLUDE can't have expressions.
        known = list(dict.fromkeys(column.source for column in others if not column.call))[: MOST_COLUMNS - 1]
        more = f" INCLUDE ({', '.join(map(quote, known))})" if known else ""
        more += f" WHERE {entry.condition.text}" if entry.condition else ""
        key = f"({first_column.text})" if first_column.call else quote(first_column.source)
        names = [self.source.name]
        every = [*names, *(name for name, _ in self.views)]
        given = {"schemas": [one.schema for one in every], "names": [one.name for one in every]}
        # Before there are substitutes, which bare names would mean.
        first = bool(execute(connection, BARE, given).scalar_one())
        execute(connection, f"CREATE TEMP TABLE {table} AS TABLE {self.source.sql} WITH NO DATA")
        execute(connection, f"CREATE INDEX {INDEX} ON {table} ({key}){more}")
        for name, body in self.views:
            if any(name.name == one.name for one in names):
                continue
            savepoint = connection.begin_nested()
            try:
                execute(connection, f"CREATE TEMP VIEW {quote(name.name)} AS {replaced(body, names)}")
                names.append(name)
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise
                savepoint.rollback()
        execute(connection, PATH, {"first": first})

    def _use(self, connection: Connection, query: str, columns: Sequence[str]) -> Use:
        text, why = query, ""
        names = [self.source.name, *(name for name, _ in self.views)]
        for text in dict.fromkeys((query, replaced(query, names))):
            try:
                plan = _planned(connection, text, COVERING)
            except (DBAPIError, InvalidInput) as error:
                if isinstance(error, DBAPIError) and error.connection_invalidated:
                    raise
                why = str(error) if isinstance(error, InvalidInput) else problem(error)
                continue
            if self._scans(plan) and not self._reads_leaves(plan):
                break
            why = "the query reads the table in a way that can't be tried, for example inside a function"
        else:
            return Use(None, None, why)
        plans = [_planned(connection, text, way) for way in WAYS]
        scans = self._scans(plans[0])
        covers = all(scan["Node Type"] == "Index Only Scan" for scan in scans)
        known = covers or len(dict.fromkeys(columns)) <= MOST_COLUMNS
        serves: bool | None = any(_finds(plan) for plan in plans)
        if not serves and any(node["Node Type"] in SORTS for node in nodes(_planned(connection, text, WITHOUT))):
            serves = any(_comes_first(plan) for plan in plans)
        if not serves and self._may_join_by(plans, columns[0]):
            return Use(None, covers if known else None, f"a join may use {quote(columns[0])}")
        return Use(serves, covers if known else None)

    def _scans(self, plan: Plan) -> list[Plan]:
        mine = self.source.name.name
        return [n for n in nodes(plan) if n.get("Relation Name") == mine and str(n.get("Schema")).startswith("pg_temp")]

    def _reads_leaves(self, plan: Plan) -> bool:
        return any((node.get("Schema"), node.get("Relation Name")) in self.leaves for node in nodes(plan))

    def _may_join_by(self, plans: Sequence[Plan], column: str) -> bool:
        """True if a plan has other scans and a condition on the column: another order of the join might use it."""
        aliases = {str(scan["Alias"]) for plan in plans for scan in self._scans(plan)}
        return any(
            len([node for node in nodes(plan) if "Alias" in node]) > 1
            and any(column in conditions.columns(text, aliases) for node in nodes(plan) for text in of_node(node))
            for plan in plans
        )


def of_node(node: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a node's conditions."""
    return (node[name] for name in conditions.FIELDS if name in node)


def replaced(text: str, names: Sequence[QualifiedName]) -> str:
    """The text with these names, where their schema is named, as those of substitutes.

    In a string it does no harm: only the shape of the plan counts.
    """
    for name in names:
        found = rf"(?<![\w$\"]){_written(str(name.schema))}\s*\.\s*{_written(name.name)}(?![\w$\"])"
        ours = f"pg_temp.{quote(name.name)}"
        text = re.sub(found, ours.replace("\\", r"\\"), text)
    return text


def _written(name: str) -> str:
    """A pattern for a name as users may write it."""
    quoted = re.escape(quote(name))
    plain = rf"(?i:{re.escape(name)})"
    return rf"(?:{quoted}|{plain})" if re.fullmatch(r"[^\W\dA-Z][\w$]*", name) and name == name.lower() else quoted


def _planned(connection: Connection, query: str, without: Sequence[str]) -> Plan:
    savepoint = connection.begin_nested()
    try:
        for name in SCANS:
            execute(connection, f"SET LOCAL enable_{name} = {'off' if name in without else 'on'}")
        return explain(connection, query)
    finally:
        if not connection.invalidated:
            savepoint.rollback()


def _finds(plan: Plan) -> bool:
    return any(node.get("Index Name") == INDEX and "Index Cond" in node for node in nodes(plan))


def _comes_first(plan: Plan, limited: bool = False) -> bool:
    """True if the first rows are read in the index's order."""
    if plan.get("Index Name") == INDEX:
        return limited
    below = (limited or plan["Node Type"] == "Limit") and plan["Node Type"] != "Sort"
    return any(_comes_first(child, below) for child in plan.get("Plans", ()))
