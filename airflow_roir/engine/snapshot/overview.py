"""One look at a database: all indexes, the newest operation of each, and our sessions that wait for a lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from airflow_roir.definition import parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.locks.lock_waits import LockWait, lock_waits
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.snapshot.details import look_in_passing
from airflow_roir.engine.snapshot.index import IndexFacts, read_indexes
from airflow_roir.engine.snapshot.operation import PAUSING, OperationStatus, newest
from airflow_roir.engine.snapshot.words import way_on
from airflow_roir.errors import NotFound
from airflow_roir.operation import Status

ENDED = (Status.COMPLETED, Status.ABORTED)
# Statuses that change without the user: a live view waits for their end.
MOVING = (Status.RUNNING.value, PAUSING, Status.ABORTING.value)


@dataclass(frozen=True)
class Overview:
    """All indexes, or one, and the newest operation of each; by name. Unfinished operations have their details.

    waits: our sessions that wait for a lock.
    """

    indexes: tuple[IndexFacts, ...]
    operations: tuple[OperationStatus, ...]
    waits: tuple[LockWait, ...]

    @property
    def moves(self) -> bool:
        """True if something runs, pauses, is being aborted, or waits for a lock."""
        return bool(self.waits) or any(one.status in MOVING for one in self.operations)

    def waits_of(self, index: str | None) -> list[LockWait]:
        """The waits for a lock of the work on this index."""
        return [wait for wait in self.waits if wait.index == index]

    def not_begun(self) -> list[LockWait]:
        """The waits of indexes that have no operation yet, and of commands that aren't for one index."""
        known = {one.index for one in self.operations}
        return [wait for wait in self.waits if wait.index not in known]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `indexes` and `operations`. Fields of an operation besides those of its status:

        resume_with: how to resume it, by the way by which it was paused; null unless it is paused.
        workers_alive, held_up: the number of workers at work, and `by` and `text` of the cause that holds the operation
            up; null once it has ended.
        waits: locks that roir's own sessions wait for: `command`, `index`, `wanted` (the table or view), `blocked_by`
            (process, application, user, age and state of each transaction), `waiter`, `since`.
        """
        first = {wait.index: wait for wait in reversed(self.not_begun()) if wait.index is not None}
        return {
            "indexes": [one.as_dict() for one in self.indexes],
            "operations": [
                *(self._as_dict(one) for one in self.operations),
                *(self._not_begun(first[index]) for index in reversed(first)),
            ],
        }

    def _as_dict(self, one: OperationStatus) -> dict[str, Any]:
        facts = one.as_dict()
        # The warnings are in the index's facts.
        del facts["warnings"]
        return facts | {
            "resume_with": way_on(one) if one.status == Status.PAUSED else None,
            "workers_alive": None if one.workers is None else one.workers.alive,
            "held_up": None if one.held_up is None else {"by": one.held_up.by, "text": one.held_up.text},
            "waits": [wait.as_dict() for wait in self.waits_of(one.index)],
        }

    def _not_begun(self, wait: LockWait) -> dict[str, Any]:
        return {
            "index": wait.index,
            "operation_id": None,
            "status": "waiting",
            "phase": wait.command,
            "held_up": {"by": "lock", "text": str(wait)},
            "waits": [one.as_dict() for one in self.waits_of(wait.index)],
        }


def overview_of(database: Database, names: Sequence[str], exact: bool = False, deltas: bool = False) -> Overview:
    """As `overview`, of these indexes in their order, each once; of all without a name."""
    if not names:
        return overview(database, None, exact, deltas)
    seen = [overview(database, name, exact, deltas) for name in dict.fromkeys(names)]
    return Overview(
        tuple({fact.index: fact for one in seen for fact in one.indexes}.values()),
        tuple({found.operation_id: found for one in seen for found in one.operations}.values()),
        tuple({str(wait): wait for one in seen for wait in one.waits}.values()),
    )


def overview(database: Database, index: str | None = None, exact: bool = False, deltas: bool = False) -> Overview:
    """All that `roir status` shows, in one transaction that changes nothing and waits for no lock.

    The first prepare of an index writes the index's row only once it has its locks: until then there are only waits.
    exact: as in `indexes`. deltas: count the rows of deltas as well. Raises NotFound, SchemaVersionMismatch.
    """
    name = None if index is None else parse_name(index, "index")
    with database.transaction() as connection:
        check_schema(connection)
        waits = tuple(one for one in lock_waits(connection) if name is None or one.is_for(name))
        try:
            found = None if name is None else operations.find_index(connection, name).id
        except NotFound:
            if not waits:
                raise
            return Overview((), (), waits)
        facts = tuple(read_indexes(connection, found, exact))
        # In the order of the indexes, which the server sorts by its own collation.
        order = {one.index: place for place, one in enumerate(facts)}
        read = sorted(newest(connection, found), key=lambda one: (order.get(one.index, -1), one.index))
        # Last, since a look sets short timeouts for the rest of the transaction.
        live = look_in_passing(connection, [one for one in read if one.status not in ENDED], deltas)
        seen = {one.index: one for one in live}
        return Overview(facts, tuple(seen.get(one.index, one) for one in read), waits)
