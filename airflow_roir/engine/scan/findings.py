"""What a dry run has found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine.generation.cut import Plan
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.entry_size import EntrySize
from airflow_roir.engine.scan.choosing import Choice
from airflow_roir.engine.source.source import Source


class Survey(Protocol):
    """The tables in the shards. table: their full name there; shard_column: the view's column that tells the shard."""

    @property
    def table(self) -> QualifiedName: ...

    @property
    def shard_column(self) -> str: ...

    @property
    def listed(self) -> str:
        """The table and the shards, for people."""


@dataclass(frozen=True)
class DryRun:
    """Everything that prepare would do, found out without changing anything.

    index_id: of the index that is rebuilt. survey: of the shards, where the index is apart from its table; the source
    of one that is new isn't there yet then.
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


# Looks at what was found while the table is held, as its owner.
Also = Callable[[Connection, DryRun], object]
