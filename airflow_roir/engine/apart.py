"""The seam to indexes over shards: all that the core asks of them while one is built and published.

The package `airflow_roir.shards` answers (`shards/hooks.py`); the core imports nothing of it, which a contract checks.
What it asks when a generation ends is in `generation/lanes.py`, beside what it knows of shards by itself; what a
verification asks is in `verify/apart.py`. Here is what
an operation asks, in the order of its phases. A method says what a core without the package answers: what is right for
an index whose table is in this database.
"""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import Connection, Row

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.control.run import Report, Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.lanes import Ends, implementation
from airflow_roir.engine.scan.copier import Copier
from airflow_roir.engine.scan.findings import Also, DryRun
from airflow_roir.errors import RoirError
from airflow_roir.options import BuildOptions


class CopierApart(Copier, Protocol):
    """Copies the ranges of shards."""

    def count_claims(self, connection: Connection) -> None:
        """Before a claim, in its transaction: a shard has no more readers than it is to have."""

    def close(self) -> None:
        """Close the sessions in shards."""


class Apart(Ends):
    """What an operation asks. Where nothing else is said it asks of an index over shards alone."""

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
        """As `dry_run.run`, once what is in this database is looked at. Changes nothing in any of them."""
        raise NotImplementedError

    def objections(self, database: Database, definition: IndexDefinition, options: BuildOptions) -> list[RoirError]:
        """What a build is refused for in the shards, each by itself."""
        raise NotImplementedError

    def with_source(self, connection: Connection, dry: DryRun) -> DryRun:
        """In the transaction that makes an index: make the table that stands for its source in this database."""
        raise NotImplementedError

    def write_down(self, connection: Connection, generation_id: int, dry: DryRun, entry: Entry) -> None:
        """In the transaction that makes a generation: write down what will be made in the shards, and make nothing."""
        raise NotImplementedError

    def capture(self, database: Database, generation_id: int, options: BuildOptions, report: Report) -> None:
        """After that commit, and where a build is adopted, of every index: begin to capture in each shard.

        A shard that is away is captured by a worker, before its first range there is read. Safe to repeat.
        """

    # --- build

    def copier(self, database: Database, connection: Connection, job: Job) -> CopierApart | None:
        """Of every build, for each of its workers: what copies ranges that are in shards; None if none is."""
        return None

    def check_copies(self, database: Database, run: Run, generation_id: int) -> None:
        """Of every build, before it is sealed: raise SourceChanged if a shard has lost commits that were copied."""

    # --- fold and publish

    def catch_up(self, database: Database, run: Run, report: Report) -> None:
        """Before the switch: apply what was written in the shards since their copies, as writers here do themselves.

        Waits for shards that are away. Raises OperationPaused, Fenced, SourceChanged.
        """

    def before_publish(self, database: Database, run: Run, generation_id: int, report: Report) -> None:
        """Once the comparison has ended, and before the lock: catch up, and let no key be in two shards if none was.

        Raises as `catch_up`, and DuplicatesFound, NotStrict, LockNotAcquired.
        """

    def unfit(self, connection: Connection, generation_id: int, max_lag_s: float) -> str | None:
        """Of every generation, before readers see it: why they must not; None if they may."""
        return None


def apart() -> Apart:
    """What answers."""
    found: Apart = implementation()
    return found
