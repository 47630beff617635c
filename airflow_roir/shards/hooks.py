"""Implements the engine's interfaces for indexes over shards (`engine/apart.py`, `verify/apart.py`,
`generation/feeds.py`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine.apart import CopierApart
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.control.run import Report, Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.scan.findings import Also, DryRun
from airflow_roir.engine.verify.apart import ComparedApart, TablesApart
from airflow_roir.engine.verify.job import VerifyJob
from airflow_roir.engine.verify.units import Units
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.errors import RoirError
from airflow_roir.options import BuildOptions, VerifyOptions
from airflow_roir.shards import remove
from airflow_roir.shards.announce import end
from airflow_roir.shards.copy import batch_marks, dry_run, prepare, survey
from airflow_roir.shards.copy.copy_ranges import ShardCopier
from airflow_roir.shards.ship import freshness
from airflow_roir.shards.ship.catch_up import catch_up
from airflow_roir.shards.unique import enforce, holders
from airflow_roir.shards.verify import repair, units
from airflow_roir.shards.verify.compare import ApartWorker


class Shards(ComparedApart):
    """The implementations. Each method is described in its interface."""

    def dry_run(
        self,
        database: Database,
        existing: Row[Any] | None,
        definition: IndexDefinition,
        options: BuildOptions,
        report: Report,
        also: Also,
    ) -> DryRun:
        return dry_run.run(database, existing, definition, options, report, also)

    def objections(self, database: Database, definition: IndexDefinition, options: BuildOptions) -> list[RoirError]:
        return survey.objections(database, definition, options)

    def with_source(self, connection: Connection, dry: DryRun) -> DryRun:
        return prepare.with_source(connection, dry)

    def write_down(self, connection: Connection, generation_id: int, dry: DryRun, entry: Entry) -> None:
        prepare.write_down(connection, generation_id, dry, entry)

    def capture(self, database: Database, generation_id: int, options: BuildOptions, report: Report) -> None:
        prepare.capture_all(database, generation_id, options, report)

    def copier(self, database: Database, connection: Connection, job: Job) -> CopierApart | None:
        return ShardCopier.of(database, connection, job)

    def check_copies(self, database: Database, run: Run, generation_id: int) -> None:
        batch_marks.check_marks(database, run.index, generation_id, run.operation_id)

    def catch_up(self, database: Database, run: Run, report: Report) -> None:
        catch_up(database, run, report)

    def before_publish(self, database: Database, run: Run, generation_id: int, report: Report) -> None:
        # The verification before may have taken long, and perhaps no other shipper runs.
        catch_up(database, run, report)
        enforce.keep_on(database, generation_id, report)

    def unfit(self, connection: Connection, generation_id: int, max_lag_s: float) -> str | None:
        return freshness.unfit(connection, generation_id, max_lag_s)

    def tables(self, database: Database, generation_id: int, options: VerifyOptions) -> TablesApart | None:
        return units.read_tables(database, generation_id, options)

    def verify_worker(
        self, database: Database, connection: Connection, verify_job: VerifyJob, number: int
    ) -> VerifyWorker:
        return ApartWorker(connection, verify_job, number, database)

    def units(self, connection: Connection, index_id: int, verification: Row[Any]) -> Units:
        return units.UnitsApart(connection, index_id, verification)

    def trust(self, connection: Connection, verification: Row[Any]) -> None:
        repair.trust(connection, verification)

    def retire(self, connection: Connection, generation_id: int, actor: str) -> None:
        holders.end(connection, generation_id, None, actor)

    def release(
        self, database: Database, index_id: int | None, patience_s: float, report: Report = lambda line: None
    ) -> list[str]:
        waiting = remove.release(database, index_id, patience_s, report)
        if index_id is None:
            waiting += end.end_left(database, None, patience_s, report)
        return waiting


HOOKS = Shards()
