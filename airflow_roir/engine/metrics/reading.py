"""Reads all metrics of a database in one cheap look: every index, with its newest operation of each kind.

One short transaction that changes nothing. It waits for no lock: a part that another session locks, or that our role
may not read, is missing, and `roir_problem` says which. The file is long because all metrics are read in one look.
"""

from __future__ import annotations

import getpass
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import psycopg2
import psycopg2.extensions
from prometheus_client.metrics_core import Metric
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName
from airflow_roir.engine.control.sign_of_life import HEARTBEAT_FRESH_S
from airflow_roir.engine.database import Database, execute, said, sqlstate
from airflow_roir.engine.health import in_passing
from airflow_roir.engine.locks.lock_waits import FRESH_S
from airflow_roir.engine.metrics.families import FAMILIES, Samples
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.side_by_side import AT_ONCE
from airflow_roir.engine.snapshot import shards
from airflow_roir.engine.snapshot.enforced import LOCKED, why_not_of_many
from airflow_roir.engine.snapshot.index import GONE
from airflow_roir.engine.snapshot.operation import ABANDONED, OperationStatus, rows
from airflow_roir.engine.snapshot.verified import verifications
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT, relation_sizes
from airflow_roir.errors import InvalidInput, RoirError, SchemaMissing, SchemaVersionMismatch
from airflow_roir.operation import BUILDS, Phase, Status
from airflow_roir.signals import SIGNALS, Reading, Signal

# The time limits of a statement, and of all together: a scrape mostly has ten seconds.
LOOK_MS = 5_000
LOOK_S = 5.0
LOCK_MS = 20
CANCELLED = "57014"
# Signals with a reading for each replica, slot, shard or disk. The `of` of other readings has a new name each time.
OF_FEW = ("replica_lag", "replica_delay", "slot_wal", "slot_room", "free_space", "shard_lag", "outbox")
REFUSED = ("42501", "28000", "28P01")

INDEXES = """
SELECT clock_timestamp() AS now, i.id, i.schema_name, i.name AS bare_name,
       i.is_unique, g.published_at IS NOT NULL AS published, g.ghosts,
       extract(epoch FROM clock_timestamp() - g.published_at)::float8 AS age,
       CASE WHEN g.unique_mode IS NOT NULL THEN roir.unique_problem(g.id) IS NULL END AS enforced,
       CASE WHEN i.is_unique AND i.shard_table IS NULL THEN g.id END AS refuses, i.source_oid::bigint AS source_oid,
       (SELECT c.oid::regclass::text FROM pg_class c
         WHERE c.oid = i.source_oid::oid AND c.relkind IN ('r', 'p')) AS source,
       (SELECT count(*) FROM roir.generation x WHERE x.index_id = i.id AND x.status <> 'dropped') AS generations,
       (SELECT max(o.id) FROM roir.operation o WHERE o.index_id = i.id) AS newest
  FROM roir.index i LEFT JOIN roir.generation g ON g.index_id = i.id AND g.status = 'active'
 WHERE i.dropped_at IS NULL ORDER BY i.id
"""
COMPACTED = """
SELECT o.index_id,
       extract(epoch FROM clock_timestamp()
                          - max(o.finished_at) FILTER (WHERE o.status = 'completed'))::float8 AS age,
       count(u.id) AS units, coalesce(sum(u.bytes_before), 0) AS bytes,
       coalesce(sum(greatest(u.bytes_before - u.bytes_after, 0)), 0) AS saved
  FROM roir.operation o LEFT JOIN roir.compaction_unit u ON u.operation_id = o.id AND u.status = 'done'
 WHERE o.kind = 'compact' GROUP BY o.index_id
"""
# The newest build, verification and compaction of each index.
OPERATIONS = """
SELECT max(n.id) FROM roir.operation n JOIN roir.index x ON x.id = n.index_id
 WHERE x.dropped_at IS NULL GROUP BY x.id, CASE WHEN n.kind NOT IN ('create', 'rebuild') THEN n.kind END
"""
DELTAS = """
SELECT c.relname AS name, c.oid::bigint, pg_stat_get_live_tuples(c.oid) AS rows
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'roir_data' AND c.relname = ANY (%(names)s) AND c.relkind = 'r'
"""
THROTTLE_TIMES = """
SELECT t.operation_id, t.cause, t.seconds FROM roir.throttle_time t WHERE t.operation_id = ANY (%(operations)s)
"""
# Only fresh readings: one of an hour ago says nothing.
SIGNALS_READ = """
SELECT DISTINCT ON (s.operation_id) s.operation_id, s.readings FROM roir.signal_sample s
 WHERE s.operation_id = ANY (%(operations)s) AND s.at > clock_timestamp() - make_interval(secs => %(fresh)s)
 ORDER BY s.operation_id, s.at DESC
"""
RUNNING = """
SELECT (SELECT count(*) FROM roir.operation o WHERE o.status = 'running'
           AND abs(extract(epoch FROM clock_timestamp() - o.heartbeat_at)) < %(fresh)s) AS running,
       (SELECT s.max_running_operations FROM roir.setting s) AS most
"""
LOCK_WAITS = """
SELECT count(*) FROM roir.lock_wait w WHERE w.seen_at > clock_timestamp() - make_interval(secs => %(fresh)s)
"""


def metrics(database: Database, clock: Callable[[], float] = time.monotonic) -> tuple[list[Metric], str | None]:
    """The metrics of a database; and why it wasn't read, None if it was. Doesn't raise errors of the database.

    clock: seconds that never go back.
    """
    began = clock()
    name = _name_in(database.dsn)
    try:
        with database.transaction() as connection:
            execute(connection, f"SET LOCAL statement_timeout = {LOOK_MS}; SET LOCAL lock_timeout = {LOCK_MS}")
            execute(connection, "SET TRANSACTION READ ONLY")
            name = str(execute(connection, "SELECT current_database()").scalar_one())
            check_schema(connection)
            samples = Samples(name)
            _Look(connection, samples, lambda: clock() - began).all()
    except (RoirError, DBAPIError) as error:
        samples = Samples(name)
        samples.add("roir_up", 0)
        samples.add("roir_problem", 1, "", "database", _reason(error))
        return list(samples.families()), said(error) if isinstance(error, DBAPIError) else str(error)
    samples.add("roir_up", 1)
    samples.add("roir_look_seconds", clock() - began)
    return list(samples.families()), None


def _name_in(dsn: str) -> str:
    """The database's name from DSN and environment, as libpq would find it; '' if they don't say."""
    try:
        given = psycopg2.extensions.parse_dsn(dsn)
        found = given.get("dbname") or os.environ.get("PGDATABASE")
        return str(found or given.get("user") or os.environ.get("PGUSER") or getpass.getuser())
    except (psycopg2.ProgrammingError, KeyError, OSError):
        return ""


def _reason(error: Exception) -> str:
    """The reason of an error, one of a few words, for a label."""
    if isinstance(error, SchemaMissing):
        return "no schema"
    if isinstance(error, SchemaVersionMismatch):
        return "schema version"
    if isinstance(error, InvalidInput):
        return "refused"
    if not isinstance(error, DBAPIError):
        return "error"
    state = sqlstate(error)
    if state in REFUSED:
        return "refused"
    return {LOCK_TIMEOUT: "locked", CANCELLED: "too slow", "": "unreachable"}.get(
        state, "unreachable" if state[:2] in ("08", "53", "57") else "error"
    )


class _Look:
    """Makes one look. elapsed: seconds since it began."""

    def __init__(self, connection: Connection, samples: Samples, elapsed: Callable[[], float]) -> None:
        self._connection = connection
        self._samples = samples
        self._elapsed = elapsed

    def all(self) -> None:
        """Look at everything."""
        indexes = execute(self._connection, INDEXES).all()
        for row in indexes:
            self._index(row)
        self._part("operations", self._operations)
        self._part("queue", self._queue)
        self._part("verifications", lambda: self._verifications(indexes))
        self._part("compactions", lambda: self._compactions(indexes))
        self._part("lock waits", self._lock_waits)
        self._part("shards", self._shards)
        self._parts("capture", [row for row in indexes if row.newest is not None], self._capture)
        self._parts("unique", [row for row in indexes if row.refuses is not None], self._unique)

    def _part(self, part: str, look: Callable[[], None], index: str = "") -> None:
        """Look at a part. If that fails, the other parts are still read, and `roir_problem` names this one."""
        if self._elapsed() > LOOK_S:
            self._samples.add("roir_problem", 1, index, part, "too slow")
            return
        savepoint = self._connection.begin_nested()
        try:
            look()
        except (DBAPIError, RoirError) as error:
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                raise
            savepoint.rollback()
            self._samples.add("roir_problem", 1, index, part, _reason(error))
        else:
            savepoint.commit()

    def _parts(self, part: str, some: Sequence[Row[Any]], look: Callable[[Sequence[Row[Any]]], None]) -> None:
        """Look at a part of many indexes at once. If that fails, at each half of them, so that none hides the others.

        look: adds nothing if it fails. `roir_problem` names each index that isn't read.
        """
        if len(some) > AT_ONCE:
            self._halves(part, some, look)
        elif len(some) == 1 or self._elapsed() > LOOK_S:
            for row in some:
                self._part(part, partial(look, [row]), _index_name(row))
        elif some:
            savepoint = self._connection.begin_nested()
            try:
                look(some)
            except (DBAPIError, RoirError) as error:
                if isinstance(error, DBAPIError) and error.connection_invalidated:
                    raise
                savepoint.rollback()
                self._halves(part, some, look)
            else:
                savepoint.commit()

    def _halves(self, part: str, some: Sequence[Row[Any]], look: Callable[[Sequence[Row[Any]]], None]) -> None:
        half = len(some) // 2
        self._parts(part, some[:half], look)
        self._parts(part, some[half:], look)

    def _index(self, row: Row[Any]) -> None:
        index = _index_name(row)
        self._samples.add("roir_index_published", row.published, index)
        self._samples.add("roir_index_unique", row.is_unique, index)
        if row.enforced is not None:
            self._samples.add("roir_index_unique_enforced", row.enforced, index)
        self._samples.add("roir_index_generations", row.generations, index)
        if row.published:
            self._samples.add("roir_index_generation_age_seconds", max(0.0, row.age), index)
            self._samples.add("roir_index_ghosts", row.ghosts, index)

    def _verifications(self, indexes: Sequence[Row[Any]]) -> None:
        found = verifications(self._connection, [row.id for row in indexes])
        for row in indexes:
            if (one := found.get(row.id)) is not None:
                age = max(0.0, (row.now - one.at).total_seconds())
                self._samples.add("roir_index_verification_age_seconds", age, _index_name(row))
                self._samples.add("roir_index_discrepancies", one.differences_left, _index_name(row))

    def _compactions(self, indexes: Sequence[Row[Any]]) -> None:
        names = {row.id: _index_name(row) for row in indexes}
        for row in execute(self._connection, COMPACTED):
            if row.index_id in names:
                name = names[row.index_id]
                age = None if row.age is None else max(0.0, row.age)
                self._samples.add("roir_index_compaction_age_seconds", age, name)
                self._samples.add("roir_index_compacted_units_total", row.units, name)
                self._samples.add("roir_index_compacted_bytes_total", row.bytes, name)
                self._samples.add("roir_index_compaction_saved_bytes_total", row.saved, name)

    def _shards(self) -> None:
        lags = [one for one in shards.lags(self._connection) if one.generation != "retired"]
        seen = {(one.index, one.shard) for one in lags if one.generation == "active"}
        for one in lags:
            labels = (one.index, one.shard)
            is_seen = one.generation == "active"
            # The feed of a rebuild has the same labels as that of the active generation.
            if not is_seen and labels in seen:
                continue
            self._samples.add("roir_shard_lag_seconds", one.lag_s, *labels)
            self._samples.add("roir_shard_pending_rows", one.pending, *labels)
            self._samples.add("roir_shard_pending_bytes", one.pending_bytes, *labels)
            self._samples.add("roir_shard_shipped_total", one.shipped, *labels)
            # Until readers see the generation, its build ships, and nothing is shipped before the rows are copied.
            if is_seen:
                self._samples.add("roir_shard_shipper", one.shipper is not None, *labels)
            self._samples.add("roir_shard_away", one.problem is not None, *labels)
            self._samples.add("roir_shard_doubtful", one.doubt is not None, *labels)

    def _lock_waits(self) -> None:
        waits = execute(self._connection, LOCK_WAITS, {"fresh": FRESH_S}).scalar_one()
        self._samples.add("roir_lock_waits", waits)

    def _capture(self, some: Sequence[Row[Any]]) -> None:
        """Count the warnings of `roir status`. Leaves out an index whose table another session locks."""
        gone: dict[int, int] = defaultdict(int)
        for lost in execute(self._connection, GONE, {"indexes": [row.id for row in some]}):
            gone[lost.index_id] += 1
        found = in_passing.at_once(self._connection, {row.id: row.newest for row in some})
        for row in some:
            lines, index = found[row.id], _index_name(row)
            if lines is None:
                self._samples.add("roir_problem", 1, index, "capture", "locked")
            else:
                self._samples.add("roir_capture_faults", len(lines) + gone[row.id], index)

    def _unique(self, some: Sequence[Row[Any]]) -> None:
        """Whether unique indexes that aren't over shards refuse duplicates. Leaves out those that are locked."""
        problems = why_not_of_many(
            self._connection, {row.id: (row.refuses, row.source_oid, row.source) for row in some}
        )
        for row in some:
            if problems[row.id] != LOCKED:
                self._samples.add("roir_index_unique_enforced", problems[row.id] is None, _index_name(row))

    def _operations(self) -> None:
        shown = rows(self._connection, execute(self._connection, OPERATIONS).scalars().all())
        deltas: dict[int, tuple[int, int]] = {}
        self._part("deltas", lambda: deltas.update(self._deltas(shown)))
        for one in sorted(shown, key=lambda one: one.operation_id):
            self._operation(one, deltas.get(one.generation_id))
        self._part("throttle", lambda: self._throttle({one.operation_id: one for one in shown}))

    def _queue(self) -> None:
        row = execute(self._connection, RUNNING, {"fresh": HEARTBEAT_FRESH_S}).one()
        self._samples.add("roir_running_operations", row.running)
        self._samples.add("roir_running_operations_limit", row.most)

    def _throttle(self, shown: Mapping[int, OperationStatus]) -> None:
        """Add the time that operations lost to the throttle, and the signals of those that run."""
        add, ids = self._samples.add, list(shown)
        for lost in execute(self._connection, THROTTLE_TIMES, {"operations": ids}):
            labels = _labels(shown[lost.operation_id])
            add("roir_operation_throttled_seconds_total", lost.seconds, *labels, lost.cause)
        for one in shown.values():
            for name in SIGNALS.keys() & one.limits.keys():
                add("roir_signal_limit", one.limits[name], *_labels(one), name)
        for read in execute(self._connection, SIGNALS_READ, {"operations": ids, "fresh": HEARTBEAT_FRESH_S}):
            one = shown[read.operation_id]
            for name in SIGNALS.keys() & read.readings.keys():
                if one.status == Status.RUNNING:
                    self._signal(SIGNALS[name], read.readings[name], _labels(one))

    def _signal(self, signal: Signal, read: Mapping[str, Any], labels: tuple[Any, ...]) -> None:
        of = read.get("of") if signal.name in OF_FEW else None
        reading = Reading(signal, read["limit"], read.get("value"))
        self._samples.add("roir_signal_unreadable", reading.value is None, *labels, signal.name)
        if reading.value is not None:
            self._samples.add("roir_signal_value", reading.value, *labels, signal.name, of or "")
            self._samples.add("roir_signal_load_ratio", reading.load, *labels, signal.name, of or "")

    def _deltas(self, shown: Sequence[OperationStatus]) -> dict[int, tuple[int, int]]:
        """Rows and bytes of the deltas of operations that still have one."""
        names = {
            f"g{one.generation_id}_delta": one.generation_id
            for one in shown
            if one.kind in BUILDS and one.phase != Phase.DONE and one.status != Status.ABORTED
        }
        found = execute(self._connection, DELTAS, {"names": list(names)}).all()
        sizes = relation_sizes(self._connection, [one.oid for one in found])
        return {names[one.name]: (one.rows, sizes[one.oid].own) for one in found if one.oid in sizes}

    def _operation(self, one: OperationStatus, delta: tuple[int, int] | None) -> None:
        labels = _labels(one)
        for state in (*(status.value for status in Status), ABANDONED):
            self._samples.add("roir_operation_state", one.status == state, *labels, state)
        for phase in Phase:
            self._samples.add("roir_operation_phase", one.phase == phase, *labels, phase.value)
        for name, family in FAMILIES.items():
            if family.read is not None:
                self._samples.add(name, family.read(one), *labels)
        if delta is not None:
            self._samples.add("roir_operation_delta_rows", delta[0], *labels)
            self._samples.add("roir_operation_delta_bytes", delta[1], *labels)


def _labels(one: OperationStatus) -> tuple[str, str, int]:
    return (one.index, one.kind, one.operation_id)


def _index_name(row: Row[Any]) -> str:
    """The index's name, as every other command shows it."""
    return str(QualifiedName(row.schema_name, row.bare_name))
