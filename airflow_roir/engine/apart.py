"""The hooks for indexes over shards that the core calls while it builds and publishes an index.

The package `airflow_roir.shards` implements them (`shards/hooks.py`); the core imports nothing of it, which a contract
checks. Here are the hooks of an operation, in the order of its phases. The hooks for the end of a generation are in
`generation/feeds.py`, beside all that the core knows of shards without the package; those of a verification are in
`verify/apart.py`. A method's body is the answer without the package, right for an index whose source table is in this
database.
"""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import Connection, Row

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.control.run import Report, Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.feeds import Ends, implementation
from airflow_roir.engine.scan.copier import Copier
from airflow_roir.engine.scan.findings import Also, DryRun
from airflow_roir.errors import RoirError
from airflow_roir.options import BuildOptions


class CopierApart(Copier, Protocol):
    """Copies the ranges of shards."""

    def count_claims(self, connection: Connection) -> None:
        """Called before a claim, in its transaction: keeps the number of readers of each shard within its limit."""

    def close(self) -> None:
        """Close the sessions in shards."""


class Apart(Ends):
    """The hooks of an operation. Unless its docstring says "every", a hook is called only for an index over shards."""

    # --- prepare

    def dry_run(
        self,
        database: Database,
        existing: Row[Any] | None,
        definition: IndexDefinition,
        options: BuildOptions,
        report: Report,
        also: Also,
    ) -> DryRun:
        """As `dry_run.run`, after the checks in this database. Changes nothing here or in the shards."""
        raise NotImplementedError

    def objections(self, database: Database, definition: IndexDefinition, options: BuildOptions) -> list[RoirError]:
        """All errors for which the shards refuse a build, each looked for independently of the others."""
        raise NotImplementedError

    def with_source(self, connection: Connection, dry: DryRun) -> DryRun:
        """Called in the transaction that creates an index: makes the table that stands for its source here."""
        raise NotImplementedError

    def write_down(self, connection: Connection, generation_id: int, dry: DryRun, entry: Entry) -> None:
        """Called in the transaction that creates a generation: records the objects to be made in the shards."""
        raise NotImplementedError

    def capture(self, database: Database, generation_id: int, options: BuildOptions, report: Report) -> None:
        """Called after that commit and when a build is adopted, for every index: begins to capture in each shard.

        If a shard is out of reach, a worker begins there, before it reads its first range of it. Safe to repeat.
        """

    # --- build

    def copier(self, database: Database, connection: Connection, job: Job) -> CopierApart | None:
        """Called in every build, for each worker: the copier for ranges in shards; None if no range is in a shard."""
        return None

    def check_copies(self, database: Database, run: Run, generation_id: int) -> None:
        """Called in every build, before the seal: raises SourceChanged if a shard has lost commits that were copied."""

    # --- fold and publish

    def catch_up(self, database: Database, run: Run, report: Report) -> None:
        """Called before the switch: applies the writes in the shards since their copies; writers here apply their own.

        Waits for shards that are out of reach. Raises OperationPaused, Fenced, SourceChanged.
        """

    def before_publish(self, database: Database, run: Run, generation_id: int, report: Report) -> None:
        """Called after the comparison and before the lock: catches up, and enforces a unique key over all shards.

        Raises as `catch_up`, and, if the replaced generation is enforced, DuplicatesFound, NotStrict, LockNotAcquired.
        """

    def unfit(self, connection: Connection, generation_id: int, max_lag_s: float) -> str | None:
        """Called for every generation, before readers see it: the reason why they must not; None if they may."""
        return None


def apart() -> Apart:
    """The implementation of the hooks."""
    found: Apart = implementation()
    return found
