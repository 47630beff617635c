"""Whether an index will pay: for look-ups of its key in general, and for one query of the user.

The bounds are those that `make bench-partitions` measured (docs/reading.md). If look-ups were timed here, these decide.
Where nothing was measured, or the planner can't be asked, the answer is "perhaps".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName, quote
from airflow_roir.definition_text import bare
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.forecast import query as queries
from airflow_roir.engine.forecast.conditions import WHOLE_ROW, Known
from airflow_roir.engine.forecast.look_up import LookUp, look_ups
from airflow_roir.engine.forecast.query import Asked
from airflow_roir.engine.forecast.substitute import Substitute
from airflow_roir.engine.forecast.verdict import FEW, MANY, NO, PERHAPS, YES, in_general, partition_key
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.scan.findings import DryRun
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput
from airflow_roir.quantity import counted

# The sample's B-tree lacks a level or two, and it isn't vacuumed: times that differ by less than this don't decide.
CLEARLY = 2

# The other indexes of the table that readers see.
OTHERS = """
SELECT i.schema_name, i.name, g.entry FROM roir.index i JOIN roir.generation g ON g.index_id = i.id
 WHERE g.status = 'active' AND i.dropped_at IS NULL AND i.source_oid = %(source)s
   AND i.id IS DISTINCT FROM %(index)s ORDER BY i.schema_name, i.name
"""


@dataclass(frozen=True)
class OfQuery:
    """The use of the index for one query. serves: it finds the rows; covers: its view has all columns.

    serves is None if the planner couldn't be asked, for the reason in `untold`. lacks: the columns that the view lacks;
    other: a published roir index that serves and covers the query.
    """

    asked: Asked
    serves: bool | None
    untold: str
    covers: bool
    lacks: tuple[str, ...]
    other: str | None
    look_ups: tuple[LookUp, ...]


@dataclass(frozen=True)
class Worth:
    """Whether the index will pay, and why. partitions: those that have rows; 0 if the table has none.

    partition_key: the columns that the table is partitioned by, on all levels. query: None if none was given.
    """

    pays: str
    why: str
    partitions: int
    partition_key: tuple[str, ...]
    query: OfQuery | None = None

    def __str__(self) -> str:
        return f"{self.pays}: {self.why}"

    def lines(self) -> dict[str, list[str]]:
        """Texts for the user, by topic."""
        found = {"will it pay": [str(self)]}
        if self.query is not None:
            found["query"] = list(_of_query(self.query, self.partitions))
            if self.query.look_ups:
                found["a look-up"] = [str(one) for one in self.query.look_ups]
                if any(one.sample is not None for one in self.query.look_ups):
                    found["a look-up"].append("the B-tree of all rows has a level or two more than that of a sample")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"worth": asdict(self)}


def of_index(connection: Connection, dry: DryRun) -> Worth | None:
    """The worth for look-ups in general, by the catalogs alone. None over shards, whose tables it doesn't know."""
    return None if dry.survey is not None else of_source(connection, dry.source, dry.definition)


def of_source(connection: Connection, source: Source, definition: IndexDefinition) -> Worth:
    """As `of_index`, of an index that needn't be fit to be built."""
    partitions = len(source.leaves) if source.partitioned else 0
    by = partition_key(connection, source.relations) if source.partitioned else ()
    texts = dict(definition.expressions)
    # An expression is no column of the table, whatever its name.
    key = [texts.get(name, name) for name in definition.key]
    first = texts.get(definition.key[0], quote(definition.key[0]))
    found = in_general(partitions, by, key, first, definition.unique, bool(definition.include))
    return Worth(found.pays, found.why, partitions, by)


def of_query(database: Database, dry: DryRun, worth: Worth | None, query: str, run: bool) -> Worth:
    """The worth for one query, as the caller. run: run the query, and time look-ups on a sample. Leaves nothing behind.

    Raises InvalidInput unless it is one SELECT that the server can plan.
    """
    if worth is None:
        raise InvalidInput("the table is in shards, where the query isn't planned: leave --query out")
    known = _known(dry.entry)
    asked, substitute = queries.ask(database, dry.source, query, worth.partition_key, run, known)
    columns = [column.source for column in dry.entry.columns]
    use = substitute.use(database, query, dry.entry)
    lacks = tuple(column for column in asked.columns if column not in columns)
    if use.covers is not None:
        # The server reads no expression from an index alone; the view has it as a column.
        computes = any(one.name in asked.columns for one in known)
        lacks = () if use.covers else lacks or (() if computes else (WHOLE_ROW,))
    other = _other(database, dry, substitute, query)
    costs = tuple(look_ups(database, dry, asked, use.serves is True)) if run else ()
    found = OfQuery(asked, use.serves, use.why, not lacks, lacks, other, costs)
    pays, why = _for_query(worth, found, dry)
    return Worth(pays, why, worth.partitions, worth.partition_key, found)


def _known(entry: Entry) -> list[Known]:
    """The expressions of an index, and its condition, which all rows of its view satisfy."""
    found = [Known(column.source, column.text, column.arguments) for column in entry.columns if column.call]
    condition = entry.condition
    return found + ([Known("", bare(condition.text), condition.arguments)] if condition else [])


def _other(database: Database, dry: DryRun, substitute: Substitute, query: str) -> str | None:
    with database.transaction() as connection:
        rows = execute(connection, OTHERS, {"source": dry.source.oid, "index": dry.index_id}).all()
    for row in rows:
        use = substitute.use(database, query, Entry.from_json(row.entry))
        if use.serves and use.covers:
            return str(QualifiedName(row.schema_name, row.name))
    return None


def _for_query(worth: Worth, found: OfQuery, dry: DryRun) -> tuple[str, str]:
    asked, key = found.asked, dry.entry.columns[0]
    first = key.text or quote(key.source)
    if not worth.partition_key or (dry.definition.unique and worth.pays == YES):
        return worth.pays, worth.why
    if asked.opened == 0:
        return PERHAPS, (
            f"the planner doesn't show that the query reads {dry.source.name}: a function in it may, or no row can "
            "meet its conditions. Give the query itself"
        )
    if found.serves is False and dry.entry.condition is not None:
        return NO, (
            f"the query has no condition on {first} that an index could use, or reads also rows that aren't in the "
            f"index: its condition must imply {bare(dry.entry.condition.text)}"
        )
    if found.serves is False:
        return NO, f"the query has no condition on {first} that an index could use: its key must begin with another"
    if asked.opened is None:
        return PERHAPS, "how many partitions the query opens depends on its parameters: write values instead"
    if asked.opened <= min(FEW, worth.partitions - 1):
        return NO, f"the query opens only {asked.opened:,} of {counted(worth.partitions, 'partition')}"
    if found.other is not None:
        return NO, f"the index {found.other} serves this query already: query its view"
    if worth.partitions <= FEW:
        return NO, worth.why
    if found.serves is None:
        return PERHAPS, f"whether the index can serve the query isn't known: {found.untold}"
    return _best(found) or _by_bounds(found, asked.opened)


def _by_bounds(found: OfQuery, opened: int) -> tuple[str, str]:
    """The answer by what was measured elsewhere."""
    asked = found.asked
    if found.covers:
        return YES, f"the view answers it and opens no partition; the table opens {opened:,}"
    is_whole = WHOLE_ROW in found.lacks
    what = "whole rows" if is_whole else f"columns that the index lacks ({_list(found.lacks)})"
    include = "" if is_whole else ". With these in --include the view answers it"
    if opened < MANY:
        return PERHAPS, (
            f"the query needs {what}. A local index reads rows faster in {FEW} partitions, roir.rows in {MANY}: "
            f"--run-query times both for {opened:,}{include}"
        )
    if asked.rows > opened:
        return PERHAPS, (
            f"the query needs {what} of about {counted(asked.rows, 'row')}, and roir.rows reads each row apart: "
            f"--run-query times that{include}"
        )
    return YES, f"roir.rows opens only the partitions of the rows that it finds; the table opens {opened:,}"


def _best(found: OfQuery) -> tuple[str, str] | None:
    """The answer by the times. None if they don't tell: some weren't found, or a local index could be as fast."""
    way = "view" if found.covers else "roir.rows"
    timed = {one.way: one for one in found.look_ups}
    if "table" not in timed or way not in timed:
        return None
    ours, table = timed[way], timed["table"]
    if ours.ms is None or table.ms is None or ours.rows < table.rows:
        return None
    by = "the view" if way == "view" else way
    times = f"the query takes {table.ms:,.2f} ms by the table, and {ours.ms:,.2f} ms by {by}, on a sample"
    if table.ms * CLEARLY < ours.ms:
        return NO, times
    if ours.ms * CLEARLY < table.ms:
        return None if found.asked.whole else (YES, times)
    return PERHAPS, f"{times}: about as long"


def _of_query(found: OfQuery, partitions: int) -> Iterator[str]:
    asked = found.asked
    if asked.opened == 0:
        yield "the plan reads nothing of the table"
        return
    by = f"by {_list(asked.local)}" if asked.local else "by no index"
    whole = f", {asked.whole:,} of them whole" if asked.whole else ""
    opened = "some" if asked.opened is None else f"{asked.opened:,}"
    of = f"{opened} of {counted(partitions, 'partition')}{whole}" if partitions else "the table"
    yield f"now opens {of}, {by}; planning takes {asked.planning_ms:,.2f} ms"
    yield f"needs {_list(asked.columns) or 'no columns'}" + (
        "" if found.covers else f"; the index lacks {_list(found.lacks)}"
    )
    if found.serves is None:
        yield f"whether the planned index serves it isn't known: {found.untold}"
    else:
        yield "the planned index serves it" if found.serves else "the planned index doesn't serve it"
    if found.other is not None:
        yield f"index {found.other} serves it already"


def _list(names: tuple[str, ...]) -> str:
    return ", ".join("whole rows" if name == WHOLE_ROW else name for name in names)
