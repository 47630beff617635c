"""The protocol of all workers: claim a piece of work, commit it by compare-and-set, give it back, count the rest.

Ranges of a build, segments of a seal and units of a verification are claimed alike, by three columns of their tables:
`claim_epoch`, the run that holds the piece; `claim_worker`, its worker; `claim_token`, which counts the claims and so
distinguishes a worker's earlier try from a later one. A worker that was fenced, or only seemed dead, commits nothing
(I4, docs/architecture.md#invariants).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import execute, is_transient
from airflow_roir.errors import Fenced, RoirError
from airflow_roir.operation import Phase, Status

# A worker first claims the piece that an earlier try of this worker began, then a free one.
CLAIM = """
UPDATE {table} SET claim_epoch = %(epoch)s, claim_worker = %(worker)s, claim_token = claim_token + 1{also}
 WHERE id = (SELECT id FROM {table}
              WHERE {of} AND {due} AND NOT ({elsewhere})
                -- free, or left by a run that this one fenced, or by an earlier try of this very worker
                AND (claim_epoch IS NULL OR claim_epoch < %(epoch)s
                     OR claim_epoch = %(epoch)s AND claim_worker = %(worker)s)
              ORDER BY claim_epoch = %(epoch)s DESC NULLS LAST, ordinal
                FOR UPDATE SKIP LOCKED LIMIT 1)
RETURNING id, ordinal, claim_token, {columns}
"""
HELD = "p.claim_token = %(token)s AND p.claim_epoch = %(epoch)s AND o.id = %(operation)s AND o.epoch = %(epoch)s"
# Compare-and-set: the worker's claim must still hold the piece, and the piece must be as the worker saw it.
COMMIT = """
UPDATE {table} p
   SET {changes},
       claim_epoch = CASE WHEN {ends} THEN NULL ELSE p.claim_epoch END,
       claim_worker = CASE WHEN {ends} THEN NULL ELSE p.claim_worker END
  FROM roir.operation o
 WHERE p.id = %(piece)s AND {stands} AND {held}
RETURNING {returning}
"""
IS_HELD = "SELECT EXISTS (SELECT FROM {table} p, roir.operation o WHERE p.id = %(piece)s AND {held})"
RELEASE = """
UPDATE {table} SET claim_epoch = NULL, claim_worker = NULL
 WHERE id = %(piece)s AND claim_token = %(token)s AND claim_epoch = %(epoch)s
"""
# A piece that is done and still claimed has something left to repair (a unit of a verification). Epoch 0, which no run
# has, lets any worker claim it.
GIVE_BACK = """
UPDATE {table} SET claim_epoch = CASE WHEN NOT ({undone}) THEN 0 END, claim_worker = NULL
 WHERE {of} AND claim_epoch = %(epoch)s AND claim_worker <> ALL (%(busy)s)
"""
WORK_LEFT = """
SELECT count(*) FILTER (WHERE {due} AND NOT ({elsewhere}) AND (claim_epoch IS NULL OR claim_epoch < %(epoch)s)) AS free,
       count(*) FILTER (WHERE {due} OR claim_epoch = %(epoch)s) AS undone
  FROM {table} WHERE {of} AND ({undone} OR claim_epoch IS NOT NULL)
"""


class Hold(Protocol):
    """A worker's hold on a piece. token: proves that the worker still has it."""

    @property
    def id(self) -> int:
        """The id of the piece."""

    @property
    def ordinal(self) -> int:
        """The number of the piece, which messages name."""

    @property
    def token(self) -> int:
        """How often the piece was claimed."""


@dataclass(frozen=True)
class Stop:
    """Why a worker stops: `done` (nothing is free), `paused`, or `leave` (the parallelism was lowered,
    or the operation is in another phase)."""

    reason: str


@dataclass(frozen=True)
class WorkLeft:
    """The pieces that a phase has left. free: those that no worker holds; undone: all that aren't done yet."""

    free: int
    undone: int


def why_stop(row: Row[Any], worker: int, *phases: Phase) -> Stop | None:
    """Why a worker takes no more work, by the operation's row; None if the worker continues.

    phases: those that the worker works on; none: any. If the server lost its last commits, the phase is an earlier one.
    """
    if row.status != Status.RUNNING:
        return Stop("paused")
    if phases and row.phase not in phases:
        return Stop("leave")
    return Stop("leave") if worker >= granted_workers(row) else None


def granted_workers(row: Row[Any]) -> int:
    """How many workers an operation has now, by its row. Under a hold (a grant of 0) the workers stay and wait."""
    return int(row.parallelism) if not row.granted else min(row.parallelism, math.ceil(row.granted))


@dataclass(frozen=True)
class Pieces:
    """A table whose rows are pieces of work. Every method sends one statement, in the caller's transaction.

    noun: the word for a piece in messages. columns: those that a claim reads. The others are SQL:
    of: the operation's rows, by `%(operation)s` or the values given. undone: pieces that aren't done yet. due: pieces
    to be claimed, by default the undone ones. elsewhere: pieces that can't be claimed now, since another operation
    works on them for this one, or their shard is out of reach. also: columns that a claim sets besides.
    """

    noun: str
    table: str
    of: str
    undone: str
    columns: str
    due: str = ""
    elsewhere: str = "false"
    also: str = ""

    def claim(
        self, connection: Connection, run: Run, worker: int, values: Mapping[str, Any] | None = None
    ) -> Row[Any] | None:
        """Claim the next piece: `id`, `ordinal`, `claim_token` and the columns. None if none is free."""
        bound = {"operation": run.operation_id, "epoch": run.epoch, "worker": worker}
        return execute(connection, self._sql(CLAIM), {**bound, **(values or {})}).first()

    def commit(
        self,
        connection: Connection,
        run: Run,
        worker: int,
        hold: Hold,
        changes: str,
        values: Mapping[str, Any],
        stands: str = "true",
        ends: str = "true",
        returning: str = "p.id",
    ) -> Row[Any]:
        """Record what was done, if the worker still holds the piece. Raises Fenced, with nothing changed.

        All SQL: `changes`, for SET; `stands`, true if the piece is still as the worker saw it; `ends`, true if the
        claim ends.
        """
        sql = self._sql(COMMIT, changes=changes, stands=stands, ends=ends, returning=returning, held=HELD)
        found = execute(connection, sql, {**values, **self._hold(run, hold)}).first()
        if found is None:
            raise self.fenced(run, worker, hold)
        return found

    def is_held(self, connection: Connection, run: Run, hold: Hold) -> bool:
        """True if the worker still holds the piece."""
        return bool(execute(connection, self._sql(IS_HELD, held=HELD), self._hold(run, hold)).scalar_one())

    def release(self, connection: Connection, run: Run, hold: Hold) -> bool:
        """Give a piece back. False if another worker holds it."""
        return execute(connection, self._sql(RELEASE), self._hold(run, hold)).rowcount == 1

    def left(
        self, connection: Connection, run: Run, busy: Collection[int], values: Mapping[str, Any] | None = None
    ) -> WorkLeft:
        """How much is left. busy: the run's workers that are alive; pieces of its other workers become free again.

        This fences a worker that only seems dead: its next commit finds its claim gone.
        """
        bound = {"operation": run.operation_id, "epoch": run.epoch, "busy": list(busy), **(values or {})}
        execute(connection, self._sql(GIVE_BACK), bound)
        row = execute(connection, self._sql(WORK_LEFT), bound).one()
        return WorkLeft(row.free, row.undone)

    @contextmanager
    def telling_fenced(self, connection: Connection, run: Run, worker: int, hold: Hold) -> Iterator[None]:
        """Raises Fenced in place of an error in the block, if the worker has lost the piece.

        Such a worker was cut off for long, and met what another worker did with the piece meanwhile: an index that
        refuses its rows, a table that is gone. That is no failure of the operation. Transient errors are raised as
        they are. The block begins and ends its own transactions.
        """
        try:
            yield
        except Fenced:
            raise
        except (DBAPIError, RoirError) as error:
            if not (isinstance(error, DBAPIError) and is_transient(error)):
                with connection.begin():
                    held = self.is_held(connection, run, hold)
                if not held:
                    raise self.fenced(run, worker, hold) from error
            raise

    def fenced(self, run: Run, worker: int, hold: Hold) -> Fenced:
        """The error of a worker whose piece another one holds."""
        return Fenced(
            f"index {run.index}: {self.noun} {hold.ordinal} is held by another worker now; "
            f"worker {worker} of {run.owner} stops and changed nothing"
        )

    def _sql(self, template: str, **more: str) -> str:
        due = self.due or self.undone
        return template.format(
            table=self.table,
            of=self.of,
            undone=self.undone,
            due=due,
            columns=self.columns,
            elsewhere=self.elsewhere,
            also=self.also,
            **more,
        )

    def _hold(self, run: Run, hold: Hold) -> dict[str, Any]:
        return {"piece": hold.id, "token": hold.token, "epoch": run.epoch, "operation": run.operation_id}
