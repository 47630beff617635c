"""The seam to indexes over shards, as `engine/apart.py`: the questions of a verification."""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import Connection, Row

from airflow_roir.engine.apart import Apart
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation.feeds import implementation
from airflow_roir.engine.verify.job import VerifyJob
from airflow_roir.engine.verify.units import Units
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.options import VerifyOptions


class TablesApart(Protocol):
    """The tables in shards that a verification will read, looked up before it locks anything in this database."""

    @property
    def generation_id(self) -> int:
        """The generation that the tables are compared with."""

    def plan(
        self, connection: Connection, index_id: int, operation_id: int, options: VerifyOptions, mode: str
    ) -> tuple[int, int]:
        """Writes a verification and its units down, as `verify.units.plan`; returns its id and the estimated rows."""


class ComparedApart(Apart):
    """The questions of a verification. Unless a method says otherwise it is called only for an index over shards."""

    def tables(self, database: Database, generation_id: int, options: VerifyOptions) -> TablesApart | None:
        """The tables to read in shards; None if there are none. Called for every generation that is compared."""
        return None

    def verify_worker(
        self, database: Database, connection: Connection, verify_job: VerifyJob, number: int
    ) -> VerifyWorker:
        """Makes a worker that compares both sides, and repairs."""
        raise NotImplementedError

    def units(self, connection: Connection, index_id: int, verification: Row[Any]) -> Units:
        """The units of a verification, at the end of a stage."""
        raise NotImplementedError

    def trust(self, connection: Connection, verification: Row[Any]) -> None:
        """Ends older doubts about a generation. Called for every complete verification without unrepaired errors."""


def apart() -> ComparedApart:
    """The implementation that answers."""
    found: ComparedApart = implementation()
    return found
