"""Ships one feed, step by step: claim, poll, apply, acknowledge. Each is one transaction of one server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.retry.trouble import reason_of, trouble_of
from airflow_roir.engine.scan.batch_size import BatchSize
from airflow_roir.errors import Fenced, RoirError, SourceChanged
from airflow_roir.shards import home
from airflow_roir.shards.announce import intents
from airflow_roir.shards.announce.intents import Look
from airflow_roir.shards.capture import leaves, outbox
from airflow_roir.shards.capture.evidence import is_readable
from airflow_roir.shards.shard import SHARD_SCHEMA, Shard, set_reached
from airflow_roir.shards.ship import feeds
from airflow_roir.shards.ship import poll as polls
from airflow_roir.shards.ship.apply import Applied, advance, apply, distrust, has_columns_of
from airflow_roir.shards.ship.feeds import Claim, Route
from airflow_roir.shards.ship.poll import Acknowledged, Poll

# The time that a poll and its apply should take: a TRUNCATE of the table waits as long.
TARGET_S = 0.3
MOST_ROWS = 20_000
# The most old intents that a poll answers beside its own rows.
NAMED = 1_000
NOW = "SELECT clock_timestamp()"
PROBLEM = f"SELECT {SHARD_SCHEMA}.capture_problem(%(name)s)"


class InShard(RoirError):
    """An error in a shard. error: the original one."""

    def __init__(self, shard: Shard, error: Exception) -> None:
        super().__init__(f"shard {quote(shard.name)}: {reason_of(error)}")
        self.shard = shard
        self.error = error

    @property
    def passes(self) -> bool:
        """True if another attempt at once may succeed."""
        return trouble_of(self.error) is not None


class FeedShipper:
    """The shipper of one feed. It has two sessions: on the index server, and in the shard, outside of transactions.

    A lost session is opened again by the next step. shard: the shard's database.
    """

    def __init__(
        self, database: Database, feed_id: int, owner: str, shard: Database | None = None, most: int = MOST_ROWS
    ) -> None:
        self.database = database
        self.feed_id = feed_id
        self.owner = owner
        self.most = most
        self.claimed: Claim | None = None
        # When the pass began, by the index server's clock; None: the next poll begins one.
        self.began: datetime | None = None
        self._shard = shard
        self._size = BatchSize(TARGET_S)
        self._sessions = ExitStack()
        self._index: Connection | None = None
        self._there: Connection | None = None
        self._route: Route | None = None
        self._here: Entry | None = None
        self._after = 0
        self._done: Acknowledged | None = None
        self._looked = Look()
        self._reached = False
        self._took = 0.0

    @property
    def route(self) -> Route:
        """The facts of the feed; known after `claim`."""
        assert self._route is not None
        return self._route

    def claim(self, take_over: bool = False, above: int = 0) -> bool:
        """Takes the feed, and forgets an earlier claim; False if another shipper has it."""
        self.began, self._after, self._done = None, 0, None
        connection = self._on_index()
        with connection.begin():
            self.claimed = feeds.claim(connection, self.feed_id, self.owner, take_over, above)
            if self.claimed is None:
                return False
            self._route = feeds.route(connection, self.feed_id)
        return True

    def look(self) -> None:
        """Reads the index server before a poll: old intents, and, if the poll begins a pass, the clock."""
        if self.began is not None and not self.route.announced:
            return
        connection = self._on_index()
        with connection.begin():
            if self.began is None:
                self.began, self._after = execute(connection, NOW).scalar_one(), 0
            if self.route.announced:
                self._looked = intents.look(connection, self.route.feed, NAMED)

    def poll(self) -> Poll:
        """Looks at the next rows, and acknowledges those that were applied before. Raises InShard."""
        assert self.claimed is not None
        self.look()
        limit = self._size.rows(self.most)
        with self._shard_side():
            there = self._in_shard()
            assert self._here is not None
            begun = time.monotonic()
            found = polls.read(
                there,
                self.route,
                self._here,
                self.claimed,
                self._after,
                limit,
                [one.identity for one in self._looked.named],
                self._looked.horizon > 0,
                self._done,
            )
            if found is None:
                raise SourceChanged("its outbox is gone")
        self._note_reached()
        self._done = None
        self._took = time.monotonic() - begun
        return found

    def apply(self, found: Poll) -> Applied:
        """Applies a poll's findings. Raises Fenced."""
        assert self.claimed is not None
        connection = self._on_index()
        begun = time.monotonic()
        # Not fresh: the capture has a problem, or covers other partitions than there are now.
        whole = found.ended and found.problem is None and not found.moved
        with connection.begin():
            applied = apply(connection, self.route, self.claimed, found, self.began if whole else None, self._settle)
        if applied.overtaken is not None:
            if not self.claim(above=applied.overtaken):
                raise Fenced(f"{self.route.name}: another shipper has taken it")
            return applied
        if is_readable(found.evidence) and "first" not in (found.evidence or ()):
            # The loss of the emptied outbox is recorded, so it gets its first row again.
            with self._shard_side():
                outbox.renew(self._in_shard(), self.route.feed.outbox)
        if applied.again:
            self.began, self._after = None, 0
            return applied
        if found.moved:
            with self._shard_side():
                there = self._in_shard()
                assert self._here is not None
                leaves.follow(connection, there, self.route, self.claimed, self._here)
        advance(self.claimed, found)
        self._done = applied.done
        self._after = found.last
        if found.rows:
            self._size.took(found.rows, self._took + time.monotonic() - begun)
        if found.moved:
            # A leaf without a trigger of TRUNCATE may have been emptied meanwhile: the pass looks at its rows again.
            self._done, self.began, self._after = None, None, 0
        elif found.ended:
            self.began, self._after = applied.now, 0
        elif not found.ticked:
            # Another shipper polled at the same moment.
            self.began, self._after = None, 0
        return applied

    def _settle(self, connection: Connection, found: Poll) -> None:
        intents.settle(connection, self.route.feed, found.identities, self._looked, found.snapshot, found.xid)

    def is_shards_fault(self) -> bool:
        """Decides after a failed poll: False if the shard answers, so that this feed's capture is the cause. Raises
        Fenced.

        If the capture may miss writes, puts the feed in doubt, since no poll can find that out.
        """
        try:
            with self._shard_side():
                there = self._in_shard()
                problem = execute(there, PROBLEM, {"name": self.route.feed.outbox}).scalar()
        except InShard as error:
            if not isinstance(error.error, SourceChanged):
                return True
            problem = str(error.error)
        if problem is not None and self.claimed is not None:
            connection = self._on_index()
            with connection.begin():
                distrust(connection, self.route, self.claimed, problem)
        return False

    def renew(self) -> None:
        """A sign of life while there is nothing to apply. Raises Fenced."""
        assert self.claimed is not None
        connection = self._on_index()
        with connection.begin():
            feeds.renew(connection, self.feed_id, self.claimed)

    def acknowledge(self) -> None:
        """Deletes the applied rows from the outbox; without this call the next poll does it."""
        if self._done is not None:
            with self._shard_side():
                polls.acknowledge(self._in_shard(), self.route, self._done)
            self._done = None

    def ship_pass(self, stop: Callable[[], bool] = lambda: False) -> int:
        """Polls and applies until the end of the outbox; returns the number of entries written or removed."""
        rows = 0
        self.began = None
        while not stop():
            found = self.poll()
            applied = self.apply(found)
            rows += applied.rows
            if found.ended and not applied.again and not found.moved:
                break
        self.acknowledge()
        return rows

    def release(self) -> None:
        """Gives the feed back, if it is still ours, and ends the sessions."""
        with suppress(DBAPIError, RoirError):
            if self.claimed is not None:
                connection = self._on_index()
                with connection.begin():
                    feeds.release(connection, self.feed_id, self.claimed)
        self.claimed = None
        self.close()

    def close(self) -> None:
        """Ends the sessions. Another shipper takes over the feed later."""
        sessions, self._sessions = self._sessions, ExitStack()
        self._index = self._there = self._here = None
        with suppress(DBAPIError):
            sessions.close()

    def cancel(self) -> None:
        """Cancels the statement that a session runs or waits in; called from another thread."""
        for connection in (self._there, self._index):
            with suppress(Exception):
                if connection is not None:
                    session: Any = connection.connection.dbapi_connection
                    session.cancel()

    def _on_index(self) -> Connection:
        if self._index is None or self._index.invalidated:
            self._index = self._sessions.enter_context(self.database.connect())
        return self._index

    def _in_shard(self) -> Connection:
        if self._there is None or self._there.invalidated or self._here is None:
            shard = self.route.feed.shard
            database = self._shard or shard.database(self.database.application_name, self.database.limits)
            self._there = self._sessions.enter_context(database.autocommit())
            home.check(self._there, shard)
            polls.begin(self._there)
            here = outbox.read_entry(self._there, self.route.feed.outbox)
            if here is None:
                raise SourceChanged("its outbox is gone")
            if not has_columns_of(self.route.entry, here, self.route.column):
                raise SourceChanged("its outbox has other columns than the index")
            self._here, self._reached = here, False
        return self._there

    def _note_reached(self) -> None:
        if not self._reached:
            connection = self._on_index()
            with connection.begin():
                set_reached(connection, self.route.feed.shard.id)
            self._reached = True

    @contextmanager
    def _shard_side(self) -> Iterator[None]:
        """Raises errors of the block as InShard, unless they are the index server's; ends the session in the shard."""
        try:
            yield
        except Fenced:
            raise
        except (DBAPIError, RoirError) as error:
            if self._index is not None and self._index.invalidated:
                raise
            self._there = None
            raise InShard(self.route.feed.shard, error) from error
