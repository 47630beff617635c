"""Which indexes of a database to compact, the one that gains most for its cost first, and which to rebuild instead.

Only `suggest` changes anything: it writes its advice down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.definition import QualifiedName, argument, parse_name
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.choice import Choice
from airflow_roir.engine.compact.choosing import choose
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.errors import RoirError
from airflow_roir.operation import Kind
from airflow_roir.quantity import counted, size

PUBLISHED = """
SELECT i.id, i.schema_name, i.name FROM roir.index i
 WHERE i.dropped_at IS NULL
   AND EXISTS (SELECT FROM roir.generation g WHERE g.index_id = i.id AND g.status = 'active')
 ORDER BY i.schema_name, i.name
"""


@dataclass(frozen=True)
class Ranked:
    """An index to compact. budget: of this index. choice: the actions; None: an unfinished compaction continues."""

    index: str
    budget: Budget
    choice: Choice | None

    @property
    def gain_per_cost(self) -> float:
        """The page reads that the compaction saves for each page read that it costs."""
        return float("inf") if self.choice is None else _ratio(self.choice)


@dataclass(frozen=True)
class Ranking:
    """worth: to compact, in this order. rebuilds: those that a rebuild serves better. left_out: the others, and why."""

    worth: tuple[Ranked, ...]
    rebuilds: tuple[tuple[str, Choice], ...]
    left_out: tuple[tuple[str, str], ...]


def rank(
    database: Database,
    indexes: Sequence[str] = (),
    each: Budget | None = None,
    all_of_them: Budget | None = None,
    exact: bool = False,
    even_if_rebuild_is_cheaper: bool = False,
) -> Ranking:
    """Chooses actions for each index, and orders the indexes by their gain for its cost, within a budget for all.

    indexes: by name; none: all published ones. each: the budget of one index. exact: as in `choose`. Raises NotFound
    and InvalidInput for a name. If the choice for an index fails, the index is left out, with the reason.
    """
    each, rest = each or Budget(), all_of_them or Budget()
    found: list[Ranked] = []
    rebuilds: list[tuple[str, Choice]] = []
    left_out: list[tuple[str, str]] = []
    for name in _names(database, indexes):
        try:
            unfinished = _unfinished(database, name)
            choice = None if unfinished == "" else choose(database, name, each.within(rest), exact)
        except RoirError as error:
            left_out.append((name, str(error)))
            continue
        if unfinished:
            left_out.append((name, unfinished))
        elif choice is not None and not choice.actions:
            left_out.append((name, "nothing is worth a compaction"))
        elif choice is not None and choice.rebuild_is_cheaper and not even_if_rebuild_is_cheaper:
            rebuilds.append((name, choice))
        else:
            found.append(Ranked(name, each, choice))
    worth: list[Ranked] = []
    left: Budget | None = rest
    for one in sorted(found, key=lambda one: (-one.gain_per_cost, one.index)):
        fitting = one if left is None else Ranked(one.index, each.within(left), one.choice)
        if one.choice is not None and left is not None and left.without(*_takes(one.choice)) is None:
            # The budget that the others left may pay for some of the actions.
            fitting = Ranked(one.index, each.within(left), choose(database, one.index, each.within(left), exact))
        if one.choice is not None and (left is None or fitting.choice is None or not fitting.choice.actions):
            left_out.append((one.index, f"the budget for all of {rest} has no room for it"))
            continue
        worth.append(fitting)
        if left is not None and fitting.choice is not None:
            left = left.without(*_takes(fitting.choice))
    return Ranking(tuple(worth), tuple(rebuilds), tuple(left_out))


def suggest(database: Database, index: str, choice: Choice, actor: str) -> str:
    """Writes an event that advises to rebuild the index instead; returns the advice. Raises NotFound."""
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        found = operations.find_index(connection, parse_name(index, "index"))
        said = (
            f"a rebuild, which writes {size(choice.rebuild_bytes)} with WAL, costs no more than to compact "
            f"{counted(len(choice.ordinals), 'segment')} of {choice.segments:,}: roir build {argument(index)}"
        )
        operations.record_event(connection, found.id, None, actor, "suggest", said)
        return said


def _names(database: Database, indexes: Sequence[str]) -> list[str]:
    with database.transaction() as connection:
        check_schema(connection)
        if not indexes:
            rows = execute(connection, PUBLISHED).all()
            return [str(QualifiedName(row.schema_name, row.name)) for row in rows]
        names = (_full_name(connection, one) for one in indexes)
        return list(dict.fromkeys(names))


def _full_name(connection: Connection, index: str) -> str:
    return str(operations.index_name(operations.find_index(connection, parse_name(index, "index"))))


def _unfinished(database: Database, index: str) -> str | None:
    """Why the index can't be compacted now; '' if it has an unfinished compaction to continue, None if it can be."""
    row = operations.find_operation(database, index)
    if row.status not in operations.LIVE:
        return None
    if row.kind == Kind.COMPACT and row.status in ("running", "paused"):
        return ""
    return f"{operations.named(row)} is {row.status}"


def _takes(choice: Choice) -> tuple[int, float]:
    return int(choice.totals["budgeted"]), choice.totals["seconds"]


def _ratio(choice: Choice) -> float:
    return choice.totals["gain"] / max(choice.totals["cost"], 1.0)
