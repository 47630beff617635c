"""Begins to enforce a unique index over shards, step by step, or says why it isn't possible yet.

`roir announce` calls `enforce_index`, the publish of a rebuild `keep_on`. The steps wait and decide; if one fails,
nothing is enforced. Their transactions on holders are in `fill_holders.py`
(docs/architecture-shards.md#unique-over-shards).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.definition import argument, parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Report
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.physical import segments_of
from airflow_roir.engine.locks.in_batches import in_batches
from airflow_roir.engine.source.files import File, cut, files_of
from airflow_roir.engine.unique.duplicate_report import NEWEST
from airflow_roir.errors import DuplicatesFound, LockNotAcquired, NotStrict, RoirError
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.quantity import shared
from airflow_roir.shards.announce.announce import PATIENCE_S, strict_problem
from airflow_roir.shards.announce.functions import SERVER
from airflow_roir.shards.ship.shipping import Shipper
from airflow_roir.shards.unique import fill_holders, holders, uniqueness

# The patience with a replaced generation.
RETIRED_PATIENCE_S = 10.0
LIVE = """
SELECT g.id, g.status FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.id = %(index)s AND g.status IN ('active', 'retired') AND g.unique_mode IS NOT NULL
   AND i.announced_by = %(server)s
 ORDER BY g.status, g.id DESC
"""
TO_KEEP = """
SELECT roir.unique_problem(x.id) IS NULL AS enforced
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
  LEFT JOIN roir.generation x ON x.index_id = i.id AND x.status = 'active'
 WHERE g.id = %(generation)s AND g.unique_mode IS NOT NULL AND i.announced_by = %(server)s
"""


def enforce_index(database: Database, index: str, report: Report = lambda line: None) -> bool:
    """Enforces a unique index over shards whose servers announce the writes; False if the index isn't one.

    It is safe to call again, and begins from the start. Raises DuplicatesFound (roir duplicates lists them), NotStrict
    (not yet, and why), LockNotAcquired; after any error no write is refused. A failure for a replaced generation is
    only reported.
    """
    with database.transaction() as connection:
        row = operations.find_index(connection, parse_name(index, "index"))
        live = execute(connection, LIVE, {"index": row.id, "server": SERVER}).all()
    for one in live:
        if one.status == GenerationStatus.ACTIVE.value:
            Enforcing(database, one.id, report).run()
            continue
        try:
            Enforcing(database, one.id, report, RETIRED_PATIENCE_S, lists=False).run()
        except (DuplicatesFound, NotStrict, LockNotAcquired) as error:
            # A shard that only this generation is over may be gone for good.
            report(f"generation {one.id}, which a revert would show, isn't enforced: {error}")
    return bool(live)


def keep_on(database: Database, generation_id: int, report: Report = lambda line: None) -> None:
    """Begins to enforce a rebuild before it is published. Raises as `enforce_index`.

    If the generation that it replaces isn't enforced, a failure is only reported.
    """
    with database.transaction() as connection:
        row = execute(connection, TO_KEEP, {"generation": generation_id, "server": SERVER}).first()
    if row is None:
        return
    try:
        Enforcing(database, generation_id, report).run()
    except (DuplicatesFound, NotStrict, LockNotAcquired) as error:
        if row.enforced:
            raise
        report(f"not enforced: {error}")


# Blocks of entries that are looked over while no shard is shipped: some tenths of a second.
BLOCKS = 256
EVERY_S = 0.2
# Taken by one process at a time: each one begins without holders.
HOLD = "SELECT pg_try_advisory_lock(hashtext('roir unique'), %(generation)s::int)"
LET_GO = "SELECT pg_advisory_unlock(hashtext('roir unique'), %(generation)s::int)"
NAME = """
SELECT format('%%I.%%I', i.schema_name, i.name) AS name, i.id, i.source_oid, g.status
  FROM roir.index i JOIN roir.generation g ON g.index_id = i.id WHERE g.id = %(generation)s
"""
# The problems that shipping can't end: the number of feeds in doubt, and of feeds that aren't announced now.
UNFIT = """
SELECT count(*) FILTER (WHERE doubtful_at IS NOT NULL) AS doubtful,
       count(*) FILTER (WHERE strict_from IS NULL OR strict_history IS DISTINCT FROM roir.server_history()) AS silent
  FROM roir.feed WHERE generation_id = %(generation)s AND removed_at IS NULL
"""


@dataclass
class Enforcing:
    """Begins it for one generation, step by step. lists: write the duplicates down for a user to heal. why: the reason
    why it isn't possible."""

    database: Database
    generation_id: int
    report: Report = lambda line: None
    patience_s: float = PATIENCE_S
    lists: bool = True
    why: str | None = None

    def run(self) -> None:
        """Runs all steps. Raises as `enforce_index`."""
        with self._alone():
            with self.database.transaction() as connection:
                if holders.mode(connection, self.generation_id) == holders.REFUSE:
                    if uniqueness.problem(connection, self.generation_id) is None:
                        return
                    holders.end(connection, self.generation_id, None, operations.default_actor())
            shipper = Shipper(
                self.database, self.report, every_s=EVERY_S, generation_id=self.generation_id, shares=False
            )
            try:
                with shipper.running():
                    self.await_announced()
                    self.begin()
                    self.fill()
                    self.await_switch()
            except BaseException as error:
                self._give_up(error)
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self.database.autocommit() as connection:
            if not execute(connection, HOLD, {"generation": self.generation_id}).scalar_one():
                raise LockNotAcquired(f"index {self._name()}: another process checks its keys now. Try again")
            try:
                yield
            finally:
                if not connection.invalidated:
                    execute(connection, LET_GO, {"generation": self.generation_id})

    def await_announced(self) -> None:
        """Waits until all writes are shipped that were committed before writers announced. Raises NotStrict."""
        until = time.monotonic() + self.patience_s
        while True:
            with self.database.transaction() as connection:
                problem = strict_problem(connection, self.generation_id)
                unfit = execute(connection, UNFIT, {"generation": self.generation_id}).one()
            if problem is None:
                return
            if unfit.doubtful:
                problem += f". roir verify {argument(self._name())} --repair ends that"
            if unfit.doubtful or unfit.silent or time.monotonic() > until:
                raise NotStrict(f"index {self._name()} isn't enforced yet: {problem}. Then run again: {self._again()}")
            time.sleep(EVERY_S)

    def begin(self) -> None:
        """Turns holders on, and puts those of the present intents."""

        def body(connection: Connection, lock: Callable[[], None]) -> None:
            fill_holders.hold_polls(connection, self.generation_id)
            lock()
            if not holders.begin(connection, self.generation_id):
                raise NotStrict(self._ended())
            fill_holders.of_intents(connection, self.generation_id)

        fill_holders.drain(self.database, self.generation_id, self.patience_s).run(body, self.report)

    def fill(self) -> None:
        """Puts the holders of all entries. Entries that come meanwhile have one, or their key is marked."""
        with self.database.transaction() as connection:
            before = files_of(connection, segments_of(connection, self.generation_id))

        def body(connection: Connection, stretch: tuple[File, int, int]) -> None:
            file, first, last = stretch
            fill_holders.hold_polls(connection, self.generation_id)
            self._check(connection)
            fill_holders.of_entries(connection, self.generation_id, file.relation, first, last)

        name = f"the intents of index {self._name()}"
        attempts = fill_holders.attempts(self.database, self.generation_id, name, self.patience_s)
        # If the session of `_alone` is lost, so is its lock: then this ends.
        for _ in in_batches(attempts, cut(before, BLOCKS), body, self.report):
            pass
        with self.database.transaction() as connection:
            after = files_of(connection, segments_of(connection, self.generation_id))
            if [(file.relation, file.filenode) for file in before] != [(one.relation, one.filenode) for one in after]:
                again = f"Run again: {self._again()}"
                raise NotStrict(f"index {self._name()}: its tables were rewritten meanwhile. {again}")

    def await_switch(self) -> None:
        """Waits until no key is contested, then lets holders refuse. Raises DuplicatesFound, NotStrict."""
        until = time.monotonic() + self.patience_s
        while True:
            self.list_duplicates()
            left = self.switch()
            if not left:
                return
            if time.monotonic() > until:
                raise NotStrict(
                    f"index {self._name()} isn't enforced yet: open transactions may change keys of two shards. When "
                    f"they have ended, run again: {self._again()}"
                )
            time.sleep(EVERY_S)

    def list_duplicates(self) -> None:
        """Writes down the keys that are in two shards. Raises DuplicatesFound if there are some."""
        with self.database.transaction() as connection:
            fill_holders.hold_polls(connection, self.generation_id)
            self._check(connection)
            row = execute(connection, NAME, {"generation": self.generation_id}).one()
            operation = execute(connection, NEWEST, {"index": row.id}).scalar()
            if operation is None:
                return
            if self.lists:
                keys, rows = fill_holders.list_shared(connection, self.generation_id, row.source_oid, operation)
            elif fill_holders.are_shared(connection, self.generation_id):
                raise DuplicatesFound(f"index {row.name}: its shards share keys")
            else:
                return
        if keys:
            self.why = f"in several shards {shared(keys, rows)} (roir duplicates {argument(row.name)})"
            raise DuplicatesFound(
                f"index {row.name}: in several shards {shared(keys, rows)} of the unique index, so it isn't enforced. "
                f"roir duplicates {argument(row.name)} lists them; change or delete rows until no two share a key, "
                f"then: {self._again()}"
            )

    def switch(self) -> int:
        """Lets holders refuse, unless a key is contested; returns the number of contested keys."""

        def body(connection: Connection, lock: Callable[[], None]) -> int:
            fill_holders.hold_polls(connection, self.generation_id)
            lock()
            self._check(connection)
            left = fill_holders.sort(connection, self.generation_id)
            if not left:
                if not holders.refuse(connection, self.generation_id):
                    raise NotStrict(self._ended())
                index = execute(connection, NAME, {"generation": self.generation_id}).one().id
                operations.record_event(connection, index, None, operations.default_actor(), "unique", "enforced")
            return left

        return fill_holders.drain(self.database, self.generation_id, self.patience_s).run(body, self.report)

    def _give_up(self, error: BaseException) -> None:
        why = self.why or (type(error).__name__ if not isinstance(error, RoirError) else str(error))
        with self.database.transaction() as connection:
            holders.end(connection, self.generation_id, why, operations.default_actor())

    def _check(self, connection: Connection) -> None:
        """Raises NotStrict if a poll has found meanwhile that keys can't be enforced."""
        if holders.mode(connection, self.generation_id) != holders.COUNT:
            lost = "SELECT unique_lost FROM roir.generation WHERE id = %(generation)s"
            why = execute(connection, lost, {"generation": self.generation_id}).scalar_one()
            raise NotStrict(self._ended() if why is None else f"index {self._name()} isn't enforced: {why}")
        problem = strict_problem(connection, self.generation_id)
        if problem is not None:
            raise NotStrict(f"index {self._name()} isn't enforced: {problem}. Then run again: {self._again()}")

    def _ended(self) -> str:
        return (
            f"index {self._name()}: generation {self.generation_id} isn't enforced. That was ended meanwhile, or its "
            "operation is over, so that its keys aren't shipped any more"
        )

    def _name(self) -> str:
        with self.database.transaction() as connection:
            return str(execute(connection, NAME, {"generation": self.generation_id}).one().name)

    def _again(self) -> str:
        with self.database.transaction() as connection:
            row = execute(connection, NAME, {"generation": self.generation_id}).one()
        name = argument(row.name)
        # A rebuild pauses, and continues from here.
        return f"roir resume {name}" if row.status == "building" else f"roir announce {name} --by server"
