"""Reads the ranges of shards: a worker's sessions there, and the batches that it copies into the base by COPY.

Rows and watermark are committed together on the index server; the shard is only read (docs/architecture-shards.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.capture.plpgsql import literal
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import Database, execute, has_vanished
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.table_lock import lock_table
from airflow_roir.engine.retry.trouble import is_permanent, reason_of, sqlstate, trouble_of
from airflow_roir.engine.scan.copier import Away, Claim, Copied, Limit
from airflow_roir.engine.scan.reader import KeyReader, Stretch
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import LockNotAcquired, NotFound, RoirError, SourceChanged, WorkerFailed
from airflow_roir.options import BuildOptions
from airflow_roir.scan_range import ScanRange
from airflow_roir.shards import home
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.copy import batch_marks, prepare
from airflow_roir.shards.copy.copies import ReadFailed, stream
from airflow_roir.shards.shard import Feed, Shard, by_id, feeds_of, set_away, set_reached

# The lock under which claims are counted, one after the other.
COUNTED = "SELECT pg_advisory_xact_lock(hashtext('roir claims'), %(operation)s::int)"
# The state of the relation that is read by name: whether it is still the same, and the capture's problem.
SOURCE_STATE = """
SELECT roir.capture_problem(%(outbox)s) AS problem, c.oid::regclass::text AS name,
       c.oid = %(source)s OR EXISTS (SELECT FROM roir.partition_tree(%(source)s::oid) t
                                      WHERE t.relation = c.oid AND t.leaf) AS is_leaf,
       (least(c.relpages / nullif(greatest(c.reltuples, 0), 0), 1)
        + coalesce(t.relpages / nullif(greatest(c.reltuples, 0), 0), 0)) * current_setting('block_size')::int
       AS row_bytes,
       (SELECT string_agg(concat_ws(' ', a.attrelid = %(source)s, a.attnum, a.attname, a.atttypid), ',' ORDER BY 1)
          FROM pg_attribute a WHERE a.attrelid IN (%(source)s, c.oid) AND a.attnum > 0 AND NOT a.attisdropped)
       || (SELECT string_agg(concat(i.indrelid, ' ', i.indkey), ',' ORDER BY 1)
             FROM pg_index i WHERE i.indrelid IN (%(source)s, c.oid) AND i.indisprimary) AS shape
  FROM pg_class c LEFT JOIN pg_class t ON t.oid = c.reltoastrelid WHERE c.oid = %(relation)s
"""


# The losses that an administrator can undo, by the error's SQLSTATE.
LOST = {"42703": "a column", "42P01": "a table"}


class ShardAway(Away):
    """A shard can't be read now. problem: why, for people."""

    def __init__(self, shard: Shard, problem: str) -> None:
        super().__init__(f"shard {quote(shard.name)}: {problem}")
        self.shard = shard
        self.problem = problem

    def write_down(self, connection: Connection) -> None:
        """Records the error with its shard."""
        set_away(connection, self.shard.id, self.problem)


@dataclass(frozen=True)
class _Cut:
    """A batch: the query of its rows, and the mark that it will leave."""

    stretch: Stretch
    query: str
    mark: int


@dataclass(frozen=True)
class _Shape:
    """The present form of a shard's table. columns: SQL for an entry's columns, in its order."""

    text: str
    reader: KeyReader
    columns: tuple[str, ...]


@dataclass
class _Side:
    """A worker's session in a shard. shapes: by relation."""

    feed: Feed
    connection: Connection
    shapes: dict[int, _Shape]


class ShardCopier:
    """One worker's sessions in the shards of its operation; one is open at a time."""

    def __init__(
        self, database: Database, connection: Connection, job: Job, feeds: list[Feed], shard_column: str
    ) -> None:
        self.database = database
        self.connection = connection
        self.job = job
        self.feeds = {feed.shard.id: feed for feed in feeds}
        self.shard_column = shard_column
        self._side: _Side | None = None

    @classmethod
    def of(cls, database: Database, connection: Connection, job: Job) -> ShardCopier | None:
        """None for an index whose source is in this database."""
        with connection.begin():
            feeds = feeds_of(connection, job.generation_id)
            column = operations.read_index(connection, job.index_id).shard_column
        return None if column is None else cls(database, connection, job, feeds, column)

    def count_claims(self, connection: Connection) -> None:
        """Takes a lock before a claim, if a shard's readers are limited: otherwise two workers at once could both take
        the last place."""
        execute(connection, COUNTED, {"operation": self.job.run.operation_id})

    # No other operation shares the scan.
    share = 1

    def begin(self, claim: Claim) -> None:
        """Begins a session in the range's shard. Raises ShardAway."""
        assert claim.shard_id is not None
        self.open(claim.shard_id)

    def moved(self, row: Row[Any], committed: Row[Any], values: Mapping[str, Any]) -> None:
        """Does nothing: the lock in the shard keeps the relation that is read by name."""

    def done(self, claim: Claim, copied: Copied) -> None:
        """Does nothing."""

    def refusal(self, _row: Row[Any], _error: DBAPIError) -> RoirError | None:
        """None: an index over shards has no expressions."""
        return None

    def is_to_try_alone(self, error: BaseException) -> bool:
        """False: a worker's copy in a shard is alone already."""
        return False

    def open(self, shard_id: int) -> None:
        """Begins a session in a shard, and the capture there, if that wasn't possible before. Raises ShardAway."""
        if self._side is not None and self._side.feed.shard.id == shard_id:
            return
        self.close()
        # With its present DSN.
        with self.database.transaction() as here:
            feed = replace(self.feeds[shard_id], shard=by_id(here, shard_id))
        try:
            if any(one.id == feed.id for one in prepare.missing(self.database, self.job.generation_id)):
                timeout = self.job.options.get("lock_timeout_ms", BuildOptions.lock_timeout_ms)
                prepare.capture(self.database, feed, timeout, self.database.limits.clean_up_s)
            there = feed.shard.database(self.database.application_name, self.database.limits)
            connection = there.engine.connect()
            try:
                with connection.begin():
                    home.check(connection, feed.shard)
            except BaseException:
                connection.close()
                raise
        except (DBAPIError, RoirError) as error:
            raise self._failed(feed, error) from error
        self._side = _Side(feed, connection, {})
        with self.database.transaction() as here:
            set_reached(here, shard_id)

    def close(self) -> None:
        """Ends the open session."""
        if self._side is not None:
            self._side.connection.close()
            self._side = None

    def copy(self, row: Row[Any], piece: Claim, limit: Limit) -> Copied:
        """Copies a range's next rows into the base, in the caller's transaction on the index server.

        Raises ShardAway, SourceChanged, WorkerFailed, and DBAPIError of the index server.
        """
        assert self._side is not None
        here, relation = self.connection, int(row.relation)
        side = self._side
        try:
            # Ends before the caller's commit: its mark is on disk then, and with it all that was read.
            with side.connection.begin():
                try:
                    found = self._cut(side, relation, piece, limit)
                except (DBAPIError, RoirError) as error:
                    raise self._failed(side.feed, error) from error
                if isinstance(found, Stretch):
                    return Copied(found, 0, piece.mark)
                base = f"{physical.base(self.job.generation_id)} ({', '.join(self.job.entry.physical())})"
                values = {**found.stretch.values, "shard_name": side.feed.shard.name}
                rows = stream(side.connection, found.query, values, here, base, self._own(side.feed))
                try:
                    batch_marks.leave(side.connection, side.feed.outbox, piece.id, found.mark)
                except DBAPIError as error:
                    raise self._failed(side.feed, error) from error
                return Copied(found.stretch, rows, found.mark)
        except ReadFailed as failed:
            raise self._failed(side.feed, failed.error) from failed
        except BaseException:
            # The session may be in the middle of a COPY.
            self.close()
            raise

    def _cut(self, side: _Side, relation: int, piece: Claim, limit: Limit) -> _Cut | Stretch:
        """The next batch, under a lock that keeps the relation; or that the range has ended."""
        name = self._begin(side, relation)
        if name is None:
            return self._gone(side, relation, piece.scan)
        lock_table(side.connection, name, relation, "ACCESS SHARE", only=True)
        values = {"outbox": side.feed.outbox, "source": side.feed.source_oid, "relation": relation}
        row = execute(side.connection, SOURCE_STATE, values).one()
        if row.name != name:
            raise LockNotAcquired(f"table {name} was renamed meanwhile. Try again")
        if row.problem is not None:
            raise SourceChanged(
                f"index {self.job.run.index}: {row.problem} in shard {quote(side.feed.shard.name)}, so writes may be "
                "missing. Abort the operation and start again"
            )
        if not row.is_leaf:
            return self._gone(side, relation, piece.scan)
        mark = batch_marks.of(side.connection, side.feed.outbox, piece.id)
        if mark < (piece.mark or 0):
            raise batch_marks.lost(self.job.run.index, side.feed.shard)
        shape = self._shape(side, relation, str(row.shape))
        stretch = shape.reader.next(name, piece.scan, limit(row.row_bytes))
        if stretch.settings:
            execute(side.connection, stretch.settings)
        query = f"SELECT {', '.join(shape.columns)} FROM ONLY {name} WHERE {stretch.where}"
        return _Cut(stretch, query, mark + 1)

    def _begin(self, side: _Side, relation: int) -> str | None:
        """Makes the settings for a batch; returns the relation's present name."""
        path = ", ".join(["pg_catalog", *map(quote, self.job.source.operator_schemas), "pg_temp"])
        found = execute(
            side.connection,
            f"SET LOCAL lock_timeout = {limits_of(side.connection).table_lock_ms}; SET LOCAL search_path = {path}; "
            # As in build.py: a scan must come out of the key's index.
            "SET LOCAL enable_sort = off; SET LOCAL enable_seqscan = off; "
            "SELECT c.oid::regclass::text FROM pg_class c WHERE c.oid = %(relation)s",
            {"relation": relation},
        )
        name: str | None = found.scalar()
        return name

    def _gone(self, side: _Side, relation: int, scan: ScanRange) -> Stretch:
        """Ends the range of a leaf that is gone: shipping deletes its entries, or touches them."""
        if relation == side.feed.source_oid:
            raise SourceChanged(
                f"index {self.job.run.index}: its table was dropped in shard {quote(side.feed.shard.name)}. Abort the "
                "operation"
            )
        return Stretch(scan.watermark, True, "false", {})

    def _shape(self, side: _Side, relation: int, text: str) -> _Shape:
        """The names and types by which the source is read; read again if a name, a type or the primary key changed."""
        known = side.shapes.get(relation)
        if known is not None and known.text == text:
            return known
        feed = side.feed
        source = catalog.read_source_by_oid(side.connection, feed.source_oid)
        entry = outbox.read_entry(side.connection, feed.outbox)
        if entry is None:
            raise SourceChanged(f"index {self.job.run.index}: its outbox in shard {quote(feed.shard.name)} is gone")
        numbers = {column.source: column.attnum for column in entry.columns}
        expected = [numbers.get(name) for name in self.job.source.primary_key if name != self.shard_column]
        if [source.columns[name].attnum for name in source.primary_key] != expected:
            raise SourceChanged(
                f"index {self.job.run.index}: the primary key of its table in shard {quote(feed.shard.name)} was "
                "altered since the operation was prepared. Abort the operation and start again"
            )
        shape = _Shape(text, KeyReader(side.connection, replace(self.job, source=source)), self._read(source, entry))
        side.shapes[relation] = shape
        return shape

    def _read(self, source: Source, entry: Entry) -> tuple[str, ...]:
        names = {column.attnum: name for name, column in source.columns.items()}
        columns = [f"{quote(names[column.attnum])}{column.to_base_type}" for column in entry.columns]
        place = self._place
        return (*columns[:place], "%(shard_name)s::text", *columns[place:])

    @property
    def _place(self) -> int:
        return next(i for i, one in enumerate(self.job.entry.columns) if one.source == self.shard_column)

    def _own(self, feed: Feed) -> str:
        """A condition in SQL of the index server, true if a row is this shard's: a shard may send anything."""
        return f"c{self._place + 1} OPERATOR(pg_catalog.=) {literal(feed.shard.name)}"

    def _failed(self, feed: Feed, error: DBAPIError | RoirError) -> Exception:
        """The error to raise for an error in a shard: ShardAway if it may pass, or if an administrator can settle it
        there; otherwise one that ends the work."""
        self.close()
        shard = feed.shard
        if isinstance(error, SourceChanged):
            return error
        if isinstance(error, NotFound):
            return SourceChanged(f"index {self.job.run.index}: shard {quote(shard.name)}: {error}")
        if isinstance(error, DBAPIError) and trouble_of(error) is None and not has_vanished(error):
            return WorkerFailed(f"shard {quote(shard.name)}: {reason_of(error)}", is_permanent(error))
        if isinstance(error, DBAPIError) and sqlstate(error) in LOST:
            return ShardAway(shard, f"it answers, but has lost {LOST[sqlstate(error)]}: {reason_of(error)}")
        return ShardAway(shard, reason_of(error))
