"""Ships one feed in a thread, pass after pass, and records why a shard can't be shipped."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute, said
from airflow_roir.engine.generation.feeds import AWAY_S
from airflow_roir.engine.retry.trouble import is_transient, reason_of
from airflow_roir.engine.sessions.server_timeline import one_history
from airflow_roir.errors import Fenced, HistoryChanged
from airflow_roir.shards.shard import set_away, set_problem
from airflow_roir.shards.ship.feed import FeedShipper, InShard

# Much less than the time after which other shippers take a feed over.
RENEW_S = 3.0
# A shard that can't be reached is tried again this often before it is away: a restart takes a second or two.
ATTEMPTS = 5
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
FEED = """
SELECT l.shard_id, s.name AS shard, format('%%I.%%I', i.schema_name, i.name) AS index,
       l.removed_at IS NULL AND i.dropped_at IS NULL AND g.status <> 'dropped' AS live
  FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
  JOIN roir.generation g ON g.id = l.generation_id JOIN roir.index i ON i.id = g.index_id
 WHERE l.id = %(feed)s
"""


class FeedThread:
    """Ships one feed until `stop`, or until it has lost it. every_s: as the `Shipper`'s."""

    def __init__(
        self, database: Database, feed: int, owner: str, every_s: float, report: Callable[[str], None]
    ) -> None:
        self._every_s = every_s
        self._report = report
        self._stop = threading.Event()
        self._said: str | None = None
        # A Database of its own: all sessions of one are in one history of the server. After a failover another feed may
        # already have claimed in the next history.
        self.shipper = FeedShipper(database.named(database.application_name), feed, owner)
        self._thread = threading.Thread(target=self._run, name=f"roir-feed-{feed}", daemon=True)
        self._thread.start()

    @property
    def lives(self) -> bool:
        """True if it still ships."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Makes it end soon."""
        self._stop.set()

    def join(self, seconds: float) -> bool:
        """Waits for its end; returns whether that came."""
        self._thread.join(seconds)
        return not self.lives

    def _run(self) -> None:
        try:
            self._work()
        finally:
            # A no-op if another shipper has the feed.
            self.shipper.release()

    def _work(self) -> None:
        wait = FIRST_WAIT_S
        while not self._stop.is_set():
            try:
                with one_history(self.shipper.database):
                    self._ship()
                return
            except Fenced as error:
                self._report(str(error))
                return
            except (DBAPIError, HistoryChanged) as error:
                # An error of the index server: another shipper may have the feed by now.
                self.shipper.close()
                if isinstance(error, DBAPIError) and not is_transient(error):
                    if (refused := note_refused(self.shipper.database, self.shipper.feed_id, error)) is not None:
                        self._report(refused)
                    self._stop.wait(LONGEST_WAIT_S)
                    return
                self._stop.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)

    def _ship(self) -> None:
        """Ships pass after pass until `stop`, or until the shard stays away."""
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
                        self._report(f"{error}; its changes wait")
                        return
                    self._say(f"{error}; its changes of index {self.shipper.route.index} wait")
                    failed, pause = 0, AWAY_S
                    continue
                self.shipper.renew()
                pause = FIRST_WAIT_S * 2 ** (failed - 1)
                continue
            failed = 0
            # A short pause while there are rows to ship.
            pause = self._every_s / 10 if rows else min(max(2 * pause, 0.01), self._every_s)

    def _rest(self, seconds: float) -> bool:
        """Waits, with signs of life; True if it is to stop."""
        while seconds > RENEW_S:
            if self._stop.wait(RENEW_S):
                return True
            self.shipper.renew()
            seconds -= RENEW_S
        return self._stop.wait(seconds)

    def _say(self, line: str) -> None:
        if line != self._said:
            self._report(line)
        self._said = line


def note_failed(shipper: FeedShipper, error: InShard) -> bool:
    """Records that a shard is away; False if it answers: then only this feed can't be shipped."""
    is_away = error.passes or shipper.is_shards_fault()
    with shipper.database.transaction() as connection:
        (set_away if is_away else set_problem)(connection, error.shard.id, reason_of(error.error))
    return is_away


def note_refused(database: Database, feed_id: int, error: DBAPIError) -> str | None:
    """Records why the index server refuses a shard's entries; None if the index was dropped.

    Shipping goes on for other indexes over the shard.
    """
    with database.transaction() as connection:
        row = execute(connection, FEED, {"feed": feed_id}).one()
        if not row.live:
            return None
        problem = f"the index server doesn't take its changes of index {row.index}: {said(error)}"
        set_problem(connection, row.shard_id, problem)
    return f"shard {quote(row.shard)}: {problem}; they wait"
