"""The seam to indexes over shards, as `engine/apart.py`: what a verification asks."""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import Connection, Row

from airflow_roir.engine.apart import Apart
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation.lanes import implementation
from airflow_roir.engine.verify.job import VerifyJob
from airflow_roir.engine.verify.units import Units
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.options import VerifyOptions


class TablesApart(Protocol):
    """What a verification will read in the shards, asked before anything is locked here."""

    @property
    def generation_id(self) -> int:
        """The generation that it is compared with."""

    def plan(
        self, connection: Connection, index_id: int, operation_id: int, options: VerifyOptions, mode: str
    ) -> tuple[int, int]:
        """As `verify.units.plan`: write a verification and its units down; returns its id and the estimated rows."""


class ComparedApart(Apart):
    """What a verification asks. Where nothing else is said it asks of an index over shards alone."""

    def tables(self, database: Database, generation_id: int, options: VerifyOptions) -> TablesApart | None:
        """Of every generation that is to be compared: what there is to read in the shards; None if nothing is."""
        return None

    def verify_worker(
        self, database: Database, connection: Connection, verify_job: VerifyJob, number: int
    ) -> VerifyWorker:
        """A worker that compares on both sides, and repairs."""
        raise NotImplementedError

    def units(self, connection: Connection, index_id: int, verification: Row[Any]) -> Units:
        """The units of a verification, when a stage ends."""
        raise NotImplementedError

    def trust(self, connection: Connection, verification: Row[Any]) -> None:
        """Of every verification that found all right, or has repaired it: what was in doubt before isn't any more."""


def apart() -> ComparedApart:
    """What answers."""
    found: ComparedApart = implementation()
    return found
