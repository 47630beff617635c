"""Shipping: the fold that never ends. Ships all lanes that no one else ships, each in a thread of its own."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import parse_name, quote
from airflow_roir.engine import operations
from airflow_roir.engine.database import Database, execute, said
from airflow_roir.engine.history import one_history
from airflow_roir.engine.run import Run
from airflow_roir.engine.running import read_running
from airflow_roir.engine.shards import announce, freshness, lanes
from airflow_roir.engine.shards.freshness import Alarm
from airflow_roir.engine.shards.lane_shipper import InShard, LaneShipper
from airflow_roir.engine.shards.lanes import Found
from airflow_roir.engine.shards.shard import AWAY_S, find, set_away, set_problem
from airflow_roir.engine.trouble import is_transient, reason_of
from airflow_roir.errors import Fenced, HistoryChanged, InvalidInput, RoirError

# By the sessions that hold this lock, shared, the shippers of a database count each other.
PRESENT = 1919904115  # 'rois'
# How often a shipper looks which lanes there are, and who else ships.
LOOK_S = 1.0
# Well within the time after which others take a lane over.
RENEW_S = 3.0
# A shard that can't be reached is tried again this often before it is away: a restart takes a second or two.
ATTEMPTS = 5
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
# After it gave a lane to nobody it keeps what it has for so long.
KEEP_S = 60.0
# In `catch_up`: what is left to ship may take a second or so after the switch.
FEW = 10_000
LANE = """
SELECT l.shard_id, s.name AS shard, format('%%I.%%I', i.schema_name, i.name) AS index,
       l.removed_at IS NULL AND i.dropped_at IS NULL AND g.status <> 'dropped' AS live
  FROM roir.lane l JOIN roir.shard s ON s.id = l.shard_id
  JOIN roir.generation g ON g.id = l.generation_id JOIN roir.index i ON i.id = g.index_id
 WHERE l.id = %(lane)s
"""
ENTER = f"SELECT pg_advisory_lock_shared({PRESENT}, 1)"
SHIPPERS = f"""
SELECT l.pid, l.pid = pg_backend_pid() AS own FROM pg_locks l
 WHERE l.locktype = 'advisory' AND l.classid = {PRESENT} AND l.objid = 1 AND l.granted
   AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
 ORDER BY l.pid
"""

Report = Callable[[str], None]
T = TypeVar("T")


def own_name() -> str:
    """A name that no other shipper has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


@dataclass
class Shipper:
    """Ships lanes, until it is told to stop. every_s: how old `fresh_at` may get where nothing is written.

    shards, indexes, generation_id: only these, if they are given. alarm: what is too far behind. shares: gives
    lanes to other shippers of the database, and takes a share of theirs.
    """

    database: Database
    report: Report = lambda line: None
    every_s: float = 1.0
    shards: Sequence[str] | None = None
    indexes: Sequence[int] | None = None
    generation_id: int | None = None
    alarm: Alarm | None = None
    shares: bool = True
    owner: str = field(default_factory=own_name)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._work: dict[int, _Work] = {}
        self._session: Connection | None = None
        self._spare: dict[int, int] = {}
        self._keep_until = 0.0
        self._said: str | None = None

    def stop(self) -> None:
        """End soon; from a signal's handler, or another thread."""
        self._stop.set()

    def run(self) -> None:
        """Ship until `stop`. What can't be reached is waited for, however long."""
        try:
            while not self._stop.is_set():
                self._try_look()
                self._stop.wait(LOOK_S)
        finally:
            self.end()

    @contextmanager
    def running(self) -> Iterator[threading.Thread]:
        """Ship in the background while the block runs. Gives the thread, which ends before if an error won't pass."""
        thread = threading.Thread(target=self.run, name="roir-ship", daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            self.stop()
            thread.join(2.0)

    def end(self, within_s: float = 0.8) -> None:
        """Give all lanes back. Who hangs in a network is left behind: another shipper takes its lane over."""
        self._stop.set()
        until = time.monotonic() + within_s
        for one in self._work.values():
            one.stop()
        for one in self._work.values():
            if not one.join(max(0.0, until - within_s / 2 - time.monotonic())):
                one.shipper.cancel()
        for one in self._work.values():
            one.join(max(0.0, until - time.monotonic()))
        self._leave()

    @property
    def shipped(self) -> list[int]:
        """The lanes that it ships now."""
        return sorted(lane for lane, one in self._work.items() if one.lives)

    def look(self) -> None:
        """Begin with lanes that are free, as far as they are its share; give some to others."""
        connection = self._present()
        with connection.begin():
            found = lanes.to_ship(connection, _listed(self.shards), _listed(self.indexes), self.generation_id)
            share = self._share(connection, len(found)) if self.shares else len(found)
        for lane in [lane for lane, one in self._work.items() if not one.lives]:
            del self._work[lane]
        self._begin([one for one in found if not one.away], share)
        self._give_way([one.id for one in found], share)
        if self.alarm is not None:
            with connection.begin():
                for line in self.alarm.look(connection, self.owner):
                    self.report(line)

    def _begin(self, found: list[Found], share: int) -> None:
        free = [one.id for one in found if one.id not in self._work and one.owner in (None, self.owner)]
        # What nobody takes, since those who share it ship other lanes only, is taken in the end.
        self._spare = {lane: self._spare.get(lane, 0) + 1 for lane in free}
        for lane in free:
            if len(self._work) >= share:
                if self._spare[lane] <= 3:
                    continue
                self._keep_until = time.monotonic() + KEEP_S
            self._work[lane] = _Work(self, lane)
            self._spare.pop(lane)

    def _give_way(self, found: list[int], share: int) -> None:
        gone = [lane for lane in self._work if lane not in found]
        for lane in gone:
            self._work[lane].stop()
        if time.monotonic() >= self._keep_until:
            for lane in sorted(set(self._work) - set(gone), reverse=True)[: max(0, len(self._work) - share)]:
                self._work[lane].stop()
                self._spare.pop(lane, None)

    def _share(self, connection: Connection, count: int) -> int:
        pids = execute(connection, SHIPPERS).all()
        rank = next((n for n, row in enumerate(pids) if row.own), 0)
        each, rest = divmod(count, max(1, len(pids)))
        return each + (1 if rank < rest else 0)

    def _present(self) -> Connection:
        if self._session is None or self._session.invalidated:
            self._leave()
            self._session = self.database.engine.connect()
            if self.shares:
                with self._session.begin():
                    execute(self._session, ENTER)
        return self._session

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except DBAPIError:
                return

    def _try_look(self) -> None:
        try:
            self.look()
        except (DBAPIError, HistoryChanged) as error:
            self._leave()
            if isinstance(error, DBAPIError) and not is_transient(error):
                raise
            if (said := reason_of(error)) != self._said:
                self.report(f"the index server doesn't answer: {said}")
                self._said = said
        else:
            if self._said is not None:
                self.report("the index server answers again")
                self._said = None


class _Work:
    """The thread that ships one lane."""

    def __init__(self, whole: Shipper, lane: int) -> None:
        self._whole = whole
        self._stop = threading.Event()
        self._said: str | None = None
        # A session's history is its thread's affair: another lane may have claimed in the next one already.
        self.shipper = LaneShipper(whole.database.named(whole.database.application_name), lane, whole.owner)
        self._thread = threading.Thread(target=self._run, name=f"roir-lane-{lane}", daemon=True)
        self._thread.start()

    @property
    def lives(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self.lives

    def _run(self) -> None:
        try:
            self._work()
        finally:
            # A no-op if another shipper has the lane.
            self.shipper.release()

    def _work(self) -> None:
        wait = FIRST_WAIT_S
        while not self._stop.is_set():
            try:
                with one_history(self.shipper.database):
                    self._ship()
                return
            except Fenced as error:
                self._whole.report(str(error))
                return
            except (DBAPIError, HistoryChanged) as error:
                # The index server. The lane may be somebody else's by now.
                self.shipper.close()
                if isinstance(error, DBAPIError) and not is_transient(error):
                    if (refused := note_refused(self.shipper.database, self.shipper.lane_id, error)) is not None:
                        self._whole.report(refused)
                    self._stop.wait(LONGEST_WAIT_S)
                    return
                self._stop.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)

    def _ship(self) -> None:
        """Ship pass after pass until it shall stop. A shard that stays away ends it, too."""
        if not self.shipper.claim():
            return
        failed, pause = 0, 0.0
        while not self._rest(pause):
            try:
                rows = self.shipper.ship_pass(self._stop.is_set)
            except InShard as error:
                failed += 1
                if self._stop.is_set():
                    return
                if failed >= ATTEMPTS or not error.passes:
                    if note_failed(self.shipper, error):
                        self._whole.report(f"{error}; its changes wait")
                        return
                    self._say(f"{error}; its changes of index {self.shipper.route.index} wait")
                    failed, pause = 0, AWAY_S
                    continue
                self.shipper.renew()
                pause = FIRST_WAIT_S * 2 ** (failed - 1)
                continue
            failed = 0
            # Soon again while there is something to do.
            pause = self._whole.every_s / 10 if rows else min(max(2 * pause, 0.01), self._whole.every_s)

    def _rest(self, seconds: float) -> bool:
        """Wait, alive; True if it shall stop."""
        while seconds > RENEW_S:
            if self._stop.wait(RENEW_S):
                return True
            self.shipper.renew()
            seconds -= RENEW_S
        return self._stop.wait(seconds)

    def _say(self, line: str) -> None:
        if line != self._said:
            self._whole.report(line)
        self._said = line


def note_failed(shipper: LaneShipper, error: InShard) -> bool:
    """Write down that a shard is away; or False if it answers: then only this lane can't be shipped."""
    is_away = error.passes or shipper.is_shards_fault()
    with shipper.database.transaction() as connection:
        (set_away if is_away else set_problem)(connection, error.shard.id, reason_of(error.error))
    return is_away


def note_refused(database: Database, lane_id: int, error: DBAPIError) -> str | None:
    """Write down that the index server doesn't take what a shard has, and why; None if the index was dropped.

    Other indexes over the shard are shipped on.
    """
    with database.transaction() as connection:
        row = execute(connection, LANE, {"lane": lane_id}).one()
        if not row.live:
            return None
        problem = f"the index server doesn't take its changes of index {row.index}: {said(error)}"
        set_problem(connection, row.shard_id, problem)
    return f"shard {quote(row.shard)}: {problem}; they wait"


def index_ids(connection: Connection, names: Sequence[str]) -> list[int]:
    """The ids of indexes apart. Raises NotFound, InvalidInput."""
    found = []
    for name in names:
        row = operations.find_index(connection, parse_name(name, "index"))
        if row.shard_table is None:
            raise InvalidInput(f"index {name} is over a table of this server; there is nothing to ship to it")
        found.append(int(row.id))
    return found


def check_shards(connection: Connection, names: Sequence[str]) -> list[str]:
    """The names of shards that there are. Raises NotFound."""
    return [find(connection, name).name for name in names]


def ship_once(shipper: Shipper) -> int:
    """Ship each lane that is free to its end, one after the other; returns how many entries that were.

    Raises RoirError if a shard couldn't be shipped: the others were.
    """
    rows, failed = 0, []
    with shipper.database.transaction() as connection:
        found = lanes.to_ship(connection, _listed(shipper.shards), _listed(shipper.indexes), shipper.generation_id)
    for one in found:
        lane = LaneShipper(shipper.database, one.id, shipper.owner)
        try:
            if lane.claim():
                rows += lane.ship_pass()
        except InShard as error:
            note_failed(lane, error)
            failed.append(str(error))
        except DBAPIError as error:
            if is_transient(error):
                raise
            if (refused := note_refused(shipper.database, one.id, error)) is not None:
                failed.append(refused)
        finally:
            lane.release()
    if failed:
        raise RoirError("; ".join(dict.fromkeys(failed)))
    return rows


def catch_up(database: Database, run: Run, report: Report = lambda line: None) -> None:
    """Ship what was written since the generation's copies, until little is left: all that was committed before this
    began is in it then. A no-op for a generation whose source is in this database.

    It waits for shards that are out of reach, and says so. Raises OperationPaused, Fenced.
    """
    with database.transaction() as connection:
        row = read_running(connection, run)
    # Before the moment that all is shipped up to: strict reads are as good then as before the publish.
    announce.keep_on(database, row.generation_id, report)
    with database.transaction() as connection:
        waiting = freshness.Waiting(connection, row.generation_id)
    if not waiting.lanes:
        return
    shipper = Shipper(database, report, every_s=0.2, generation_id=row.generation_id, shares=False)
    said: str | None = None
    with shipper.running():
        while True:
            with database.transaction() as connection:
                read_running(connection, run)
                left = waiting.left(connection, FEW)
                if left != said:
                    operations.note_wait(connection, run.operation_id, run.epoch, left)
            if left != said and left is not None:
                report(left)
            said = left
            if left is None:
                return
            time.sleep(0.2)


def _listed(given: Sequence[T] | None) -> list[T] | None:
    return None if given is None else list(given)
