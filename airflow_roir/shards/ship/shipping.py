"""Ships all feeds that no other shipper ships, each in a thread of its own."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Report
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.retry.trouble import is_transient, reason_of
from airflow_roir.engine.snapshot.shards import PRESENT
from airflow_roir.engine.snapshot.shards import SHIPPERS as SHIPPING
from airflow_roir.errors import HistoryChanged, InvalidInput, RoirError
from airflow_roir.shards.shard import find
from airflow_roir.shards.ship import feeds
from airflow_roir.shards.ship.feed import FeedShipper, InShard
from airflow_roir.shards.ship.feed_thread import FeedThread, note_failed, note_refused
from airflow_roir.shards.ship.feeds import Found
from airflow_roir.shards.ship.freshness import Alarm

# The time between two looks at the feeds and at the other shippers.
LOOK_S = 1.0
# A shipper that took a feed above its share, since no other shipper did, keeps its feeds for this long.
KEEP_S = 60.0
ENTER = f"SELECT pg_advisory_lock_shared({PRESENT}, 1)"
SHIPPERS = f"SELECT l.pid, l.pid = pg_backend_pid() AS own FROM {SHIPPING} ORDER BY l.pid"

T = TypeVar("T")


def own_name() -> str:
    """A name that no other shipper has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


@dataclass
class Shipper:
    """Ships feeds until `stop`. every_s: the age that `fresh_at` may get while nothing is written.

    shards, indexes, generation_id: only these, if they are given. alarm: reports feeds that are too far behind. shares:
    gives feeds to other shippers of the database, and takes a share of theirs.
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
        self._work: dict[int, FeedThread] = {}
        self._session: Connection | None = None
        self._spare: dict[int, int] = {}
        self._keep_until = 0.0
        self._said: str | None = None

    def stop(self) -> None:
        """Makes it end soon; called in a signal's handler or another thread."""
        self._stop.set()

    def run(self) -> None:
        """Ships until `stop`. Waits for servers that can't be reached, for any time."""
        try:
            while not self._stop.is_set():
                self._try_look()
                self._stop.wait(LOOK_S)
        finally:
            self.end()

    @contextmanager
    def running(self) -> Iterator[threading.Thread]:
        """Ships in the background while the block runs. Yields the thread, which ends before if an error won't pass."""
        thread = threading.Thread(target=self.run, name="roir-ship", daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            self.stop()
            thread.join(2.0)

    def end(self, within_s: float = 0.8) -> None:
        """Gives all feeds back. A thread that hangs in the network is left behind: another shipper takes over its
        feed."""
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
        """The feeds that it ships now."""
        return sorted(feed for feed, one in self._work.items() if one.lives)

    def look(self) -> None:
        """Begins free feeds up to its share, and gives feeds above its share to others."""
        connection = self._present()
        with connection.begin():
            found = feeds.to_ship(connection, _listed(self.shards), _listed(self.indexes), self.generation_id)
            share = self._share(connection, len(found)) if self.shares else len(found)
        for feed in [feed for feed, one in self._work.items() if not one.lives]:
            del self._work[feed]
        self._begin([one for one in found if not one.away], share)
        self._give_way([one.id for one in found], share)
        if self.alarm is not None:
            with connection.begin():
                for line in self.alarm.look(connection, self.owner):
                    self.report(line)

    def _begin(self, found: list[Found], share: int) -> None:
        free = [one.id for one in found if one.id not in self._work and one.owner in (None, self.owner)]
        # A feed that no shipper takes, since the others ship only some shards or indexes, is taken after three looks.
        self._spare = {feed: self._spare.get(feed, 0) + 1 for feed in free}
        for feed in free:
            if len(self._work) >= share:
                if self._spare[feed] <= 3:
                    continue
                self._keep_until = time.monotonic() + KEEP_S
            self._work[feed] = FeedThread(self.database, feed, self.owner, self.every_s, self.report)
            self._spare.pop(feed)

    def _give_way(self, found: list[int], share: int) -> None:
        gone = [feed for feed in self._work if feed not in found]
        for feed in gone:
            self._work[feed].stop()
        if time.monotonic() >= self._keep_until:
            for feed in sorted(set(self._work) - set(gone), reverse=True)[: max(0, len(self._work) - share)]:
                self._work[feed].stop()
                self._spare.pop(feed, None)

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


def index_ids(connection: Connection, names: Sequence[str]) -> list[int]:
    """The ids of indexes over shards. Raises NotFound, InvalidInput."""
    found = []
    for name in names:
        row = operations.find_index(connection, parse_name(name, "index"))
        if row.shard_table is None:
            raise InvalidInput(f"index {name} is over a table of this server; there is nothing to ship to it")
        found.append(int(row.id))
    return found


def check_shards(connection: Connection, names: Sequence[str]) -> list[str]:
    """The names, if all of these shards exist. Raises NotFound."""
    return [find(connection, name).name for name in names]


def ship_once(shipper: Shipper) -> int:
    """Ships each free feed to its end, one after the other; returns the number of entries.

    Raises RoirError if a shard couldn't be shipped: the others were.
    """
    rows, failed = 0, []
    with shipper.database.transaction() as connection:
        found = feeds.to_ship(connection, _listed(shipper.shards), _listed(shipper.indexes), shipper.generation_id)
    for one in found:
        feed = FeedShipper(shipper.database, one.id, shipper.owner)
        try:
            if feed.claim():
                rows += feed.ship_pass()
        except InShard as error:
            note_failed(feed, error)
            failed.append(str(error))
        except DBAPIError as error:
            if is_transient(error):
                raise
            if (refused := note_refused(shipper.database, one.id, error)) is not None:
                failed.append(refused)
        finally:
            feed.release()
    if failed:
        raise RoirError("; ".join(dict.fromkeys(failed)))
    return rows


def _listed(given: Sequence[T] | None) -> list[T] | None:
    return None if given is None else list(given)
