"""The result of a dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine.generation.cut import Plan
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.entry_size import EntrySize
from airflow_roir.engine.scan.choosing import Choice
from airflow_roir.engine.source.expressions import Expression
from airflow_roir.engine.source.source import Source


class Survey(Protocol):
    """The tables in the shards. table: their full name there; shard_column: the view's column with the shard."""

    @property
    def table(self) -> QualifiedName: ...

    @property
    def shard_column(self) -> str: ...

    @property
    def listed(self) -> str:
        """The table and the shards, as messages name them."""


@dataclass(frozen=True)
class DryRun:
    """Everything that prepare would do; the dry run has changed nothing.

    index_id: that of the index to rebuild. survey: the findings in the shards, for an index over shards; if that index
    is new, the table that stands for its source doesn't exist yet. expressions: of a new index; the entry calls their
    functions by the names that these have in a plan.
    """

    index: QualifiedName
    source: Source
    definition: IndexDefinition
    entry: Entry
    plan: Plan
    choice: Choice
    kind: str
    entry_size: EntrySize
    index_id: int | None
    survey: Survey | None = None
    expressions: Sequence[Expression] = ()


# Looks at the findings while the table is locked, as its owner.
Also = Callable[[Connection, DryRun], object]
