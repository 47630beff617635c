"""Keeps a worker's sessions in the shards of an index that is verified, and reads pieces of their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.retry.trouble import reason_of, trouble_of
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.errors import NotFound, SourceChanged
from airflow_roir.scan_range import ScanRange
from airflow_roir.shards import home, sources
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import SHARD_SCHEMA, Feed, set_away, set_reached
from airflow_roir.shards.verify import sums

# Run under the lock: to read another role's table can run that role's code.
OWNERS = f"SELECT {SHARD_SCHEMA}.check_owners(%(outbox)s)"


class ShardAway(Exception):
    """A shard can't be reached now."""


@dataclass
class InShard:
    """A session in a shard, with the feed's entry and source there. entry, source: None if the table was dropped."""

    connection: Connection
    feed: Feed
    source: Source | None
    entry: Entry | None
    utf8: bool


class Sessions:
    """The sessions, one in each shard in use. connection: the worker's, on the index server."""

    def __init__(self, connection: Connection, database: Database, job: Job) -> None:
        self.connection = connection
        self.database = database
        self.job = job
        self._shards: dict[int, InShard] = {}

    def of(self, feed: Feed) -> InShard:
        """A session in a feed's shard, which is kept. Raises SourceChanged, and ShardAway, which it records."""
        if feed.id in self._shards:
            return self._shards[feed.id]
        with self.reaching(feed):
            database = feed.shard.database(self.database.application_name, self.database.limits)
            connection = database.engine.connect()
            try:
                with connection.begin():
                    home.check(connection, feed.shard)
                    entry = outbox.read_entry(connection, feed.outbox)
                    try:
                        source = sources.read_by_oid(connection, feed)
                    except NotFound:
                        source = None
                if source is None:
                    entry = None
                elif entry is None:
                    raise SourceChanged(
                        f"index {self.job.run.index}: the capture of shard {quote(feed.shard.name)} is gone; rebuild "
                        "the index"
                    )
                else:
                    entry = sums.followed(entry, source)
            except BaseException:
                connection.close()
                raise
            found = InShard(connection, feed, source, entry, sums.is_utf8(connection))
        with self.connection.begin():
            set_reached(self.connection, feed.shard.id)
        self._shards[feed.id] = found
        return found

    @contextmanager
    def reaching(self, feed: Feed) -> Iterator[None]:
        """Guards a block that reads a shard: if the shard can't be reached, records that. Raises ShardAway."""
        try:
            yield
        except DBAPIError as error:
            held = self._shards.get(feed.id)
            # Not an error of the index server, nor a lock that another session holds.
            if trouble_of(error) is None or not (held is None or held.connection.invalidated):
                raise
            self._forget(feed)
            with self.connection.begin():
                set_away(self.connection, feed.shard.id, reason_of(error))
            raise ShardAway(feed.shard.name) from error

    def _forget(self, feed: Feed) -> None:
        found = self._shards.pop(feed.id, None)
        if found is not None:
            found.connection.invalidate()
            found.connection.close()

    def close(self) -> None:
        """Ends all sessions."""
        for found in self._shards.values():
            found.connection.close()
        self._shards.clear()

    def read(
        self, feed: Feed, claim: UnitClaim, read: Callable[[InShard, str, str, dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Reads a unit's piece of a feed's table; None if it is gone. Raises ShardAway."""
        one = self.of(feed)
        with self.reaching(feed), one.connection.begin():
            name = self._hold(one, claim)
            if name is None or one.source is None:
                return None
            values: dict[str, Any] = {}
            where = ScanRange(claim.lower, claim.upper).condition(
                one.source.primary_key, one.source.comparands, None, values
            )
            if values:
                execute(one.connection, "SET LOCAL enable_seqscan = off")
            return read(one, name, where, values)

    def _hold(self, one: InShard, claim: UnitClaim) -> str | None:
        if one.source is None:
            return None
        path = ", ".join(["pg_catalog", *map(quote, one.source.operator_schemas), "pg_temp"])
        execute(
            one.connection,
            f"SET LOCAL lock_timeout = {limits_of(one.connection).table_lock_ms}; SET LOCAL search_path = {path}; "
            "SET LOCAL max_parallel_workers_per_gather = 0",
        )
        there = "SELECT c.oid::regclass::text FROM pg_class c WHERE c.oid = %(relation)s"
        name: str | None = execute(one.connection, there, {"relation": claim.relation}).scalar()
        if name is None or not self._locked(one.connection, name):
            return None
        execute(one.connection, OWNERS, {"outbox": one.feed.outbox})
        after = execute(one.connection, there, {"relation": claim.relation}).scalar()
        return name if name == after else None

    @staticmethod
    def _locked(connection: Connection, name: str) -> bool:
        """Locks a leaf by its name; False if it doesn't have that name any more."""
        try:
            with connection.begin_nested():
                execute(connection, f"LOCK TABLE {name} IN ACCESS SHARE MODE")
            return True
        except DBAPIError as error:
            if trouble_of(error) is not None:
                raise
            return False
