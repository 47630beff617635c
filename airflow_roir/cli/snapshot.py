"""One look at the database: what `roir status` shows once, and with --watch again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import sqlstate
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.snapshot.operation import OperationStatus, Overview, overview
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT
from airflow_roir.errors import NotFound
from airflow_roir.operation import Status
from airflow_roir.quantity import duration

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database
    from airflow_roir.engine.locks.lock_waits import LockWait
    from airflow_roir.engine.snapshot.details import Progress

ENDED = (Status.COMPLETED, Status.ABORTED)
PAUSING = "pausing"
CANCELLED = "57014"
# What moves by itself: whoever watches wants to see its end.
MOVING = (Status.RUNNING.value, PAUSING, Status.ABORTING.value)


@dataclass(frozen=True)
class Silence:
    """The server gives no answer: since when (a clock's seconds), and what was said last, if anything."""

    since: float
    said: str

    def __str__(self) -> str:
        what = f": {self.said}" if self.said else ""
        return f"no answer since {duration(round(time.monotonic() - self.since))}{what}"


@dataclass(frozen=True)
class Look:
    """What was seen. progress: of the operations that haven't ended, by id."""

    overview: Overview
    progress: dict[int, Progress]

    def state(self, operation: OperationStatus) -> str:
        """The operation's status; `pausing` while workers of a paused one haven't left yet."""
        found = self.progress.get(operation.operation_id)
        return operation.status if found is None or found.status != PAUSING else PAUSING

    @property
    def moves(self) -> bool:
        """True if something runs, pauses, is being aborted, or waits for a lock."""
        return bool(self.overview.waits) or any(self.state(one) in MOVING for one in self.overview.operations)

    def waits_of(self, index: str | None) -> list[LockWait]:
        """Who of us waits for a lock, for that index."""
        return [wait for wait in self.overview.waits if wait.index == index]

    def not_begun(self) -> list[LockWait]:
        """Waits of indexes that have no operation yet, and of commands for no single index."""
        known = {one.index for one in self.overview.operations}
        return [wait for wait in self.overview.waits if wait.index not in known]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: two parts."""
        operations = [self._as_dict(one) for one in self.overview.operations]
        begun: set[str] = set()
        for wait in self.not_begun():
            if wait.index is not None and wait.index not in begun:
                begun.add(wait.index)
                waits = [one.as_dict() for one in self.waits_of(wait.index)]
                operations.append(
                    {
                        "index": wait.index,
                        "operation_id": None,
                        "status": "waiting",
                        "phase": wait.command,
                        "held_up": {"by": "lock", "text": str(wait)},
                        "waits": waits,
                    }
                )
        return {"indexes": [one.as_dict() for one in self.overview.indexes], "operations": operations}

    def _as_dict(self, operation: OperationStatus) -> dict[str, Any]:
        facts = operation.as_dict()
        # Warnings and lost partitions are the index's.
        del facts["warnings"]
        found = self.progress.get(operation.operation_id)
        held = None if found is None else {"by": found.held_up.by, "text": found.held_up.text}
        waits = [one.as_dict() for one in self.waits_of(operation.index)]
        alive = None if found is None else found.workers.alive
        return facts | {"status": self.state(operation), "workers_alive": alive, "held_up": held, "waits": waits}


def look(database: Database, index: str | None = None, exact: bool = False) -> Look:
    """Look once. exact: measure the bloat, which reads all entries. Raises NotFound, SchemaVersionMismatch."""
    seen = overview(database, index, exact)
    details = {}
    for one in seen.operations:
        if one.status in ENDED:
            continue
        try:
            details[one.operation_id] = progress(database, operation_id=one.operation_id)
        except NotFound:
            # Its control schema was made again between the two looks.
            continue
        except DBAPIError as error:
            # A server that is too busy for the details: the rest is shown without them.
            if sqlstate(error) not in (CANCELLED, LOCK_TIMEOUT):
                raise
    return Look(seen, details)
