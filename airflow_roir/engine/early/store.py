"""Reads the hashes of keys from the segments of a generation under construction, and keeps them in the server.

A resumed build need not read them again. Each method is one transaction.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.control.job import Job
from airflow_roir.engine.control.run import read_control
from airflow_roir.engine.database import bound, execute
from airflow_roir.engine.early.key_sets import PLACE_BLOCKS, value_of_copy
from airflow_roir.engine.generation import physical
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.operation import Phase, Status

ENDS = """
SELECT s.ordinal, pg_relation_size(n.name::regclass) / current_setting('block_size')::int AS blocks
  FROM roir.segment s JOIN unnest(%(ordinals)s::int[], %(names)s::text[]) AS n (ordinal, name) USING (ordinal)
 WHERE s.generation_id = %(generation)s
"""
SEEN = """
SELECT pg_current_snapshot()::text AS snapshot,
       (SELECT sum(r.batches) FROM roir.scan_range r WHERE r.operation_id = %(operation)s) AS batches
"""
FILE = """
SELECT pg_relation_filenode(%(name)s::regclass)::bigint AS filenode,
       pg_relation_size(%(name)s::regclass) / current_setting('block_size')::int AS blocks,
       current_setting('block_size')::int AS block_bytes
"""
# The hashes of rows that are visible now and weren't when the segment was read before. A second reader of the segment
# fails by a duplicate `number`.
READ = """
INSERT INTO roir.early_hashes
       (generation_id, segment, number, filenode, end_block, settled_block, snapshot, rows, hashes)
SELECT %(generation)s, %(segment)s, %(number)s, %(filenode)s, %(end)s, %(settled)s, pg_current_snapshot()::text,
       coalesce(sum(length(x.hashes)) / 8, 0),
       coalesce(string_agg(int8send(p.place << 32 | length(x.hashes) / 8) || x.hashes, ''), '')
  FROM (SELECT place, ('(' || greatest(place * {blocks}, {settled}) || ',0)')::tid AS low,
               ('(' || least((place + 1) * {blocks}, {end}) || ',0)')::tid AS high
          FROM generate_series({settled}::bigint / {blocks}, ({end}::bigint - 1) / {blocks}) place OFFSET 0) p
 CROSS JOIN LATERAL (
       SELECT string_agg(int8send({hash}), '') AS hashes FROM ONLY {name} s
        WHERE s.ctid >= p.low AND s.ctid < p.high AND (s.ctid >= '({read},0)' OR {unseen})) x
RETURNING hashes
"""
TAKEN = """
SELECT snapshot FROM roir.early_hashes
 WHERE generation_id = %(generation)s AND segment = %(segment)s AND number = %(number)s
"""
KEPT = """
SELECT hashes FROM roir.early_hashes
 WHERE generation_id = %(generation)s AND segment = %(segment)s AND looked = ANY (%(looked)s) ORDER BY number
"""
FOUND = """
SELECT DISTINCT ON (segment) segment, number, filenode, end_block, settled_block, snapshot,
       NOT bool_and(looked) OVER (PARTITION BY segment) AS waits
  FROM roir.early_hashes WHERE generation_id = %(generation)s
 ORDER BY segment, number DESC
"""
LOOKED = """
UPDATE roir.early_hashes h SET looked = true FROM unnest(%(segments)s::int[], %(numbers)s::int[]) AS d (segment, number)
 WHERE h.generation_id = %(generation)s AND h.segment = d.segment AND h.number < d.number AND NOT h.looked
"""
FORGET = "DELETE FROM roir.early_hashes WHERE generation_id = %(generation)s AND segment = %(segment)s"


@dataclass(frozen=True)
class Look:
    """The state of the build. ends: blocks of each segment; batches: those committed; `stands`: it isn't running."""

    ends: Mapping[int, int]
    snapshot: Snapshot
    batches: int
    stands: bool


@dataclass(frozen=True)
class ReadSoFar:
    """How far a segment's file is read.

    All rows before block `settled` are read, and the rows before block `end` that `snapshot` sees. number: that of the
    next part.
    """

    number: int = 0
    filenode: int | None = None
    end: int = 0
    settled: int = 0
    snapshot: Snapshot | None = None


class Store:
    """The hashes of one job's generation. hash: SQL for the hash of the key of row `s`."""

    def __init__(self, connection: Connection, job: Job, hash: str) -> None:
        self._connection = connection
        self._job = job
        self._hash = hash
        with connection.begin():
            ordinals = execute(
                connection, "SELECT ordinal FROM roir.segment WHERE generation_id = %(generation)s", self._values()
            )
            self.segments = sorted(ordinals.scalars())

    def look(self) -> Look | None:
        """The state of the build; None once the phase is over. Raises Fenced."""
        connection, names = self._connection, [self._name(one) for one in self.segments]
        with connection.begin():
            self._set_up()
            row = read_control(connection, self._job.run)
            if row.phase != Phase.BUILD:
                return None
            rows = execute(connection, ENDS, {**self._values(), "ordinals": self.segments, "names": names})
            ends = {one.ordinal: int(one.blocks) for one in rows}
            # After the ends: transactions that this snapshot doesn't see yet begin to write behind them.
            seen = execute(connection, SEEN, {"operation": self._job.run.operation_id}).one()
        stands = row.status != Status.RUNNING
        return Look(ends, Snapshot.parse(seen.snapshot), int(seen.batches or 0), stands)

    def found(self) -> tuple[dict[int, ReadSoFar], list[int]]:
        """How far earlier runs have read each segment; and the segments whose duplicates may not be recorded yet."""
        states: dict[int, ReadSoFar] = {}
        waiting: list[int] = []
        with self._connection.begin():
            for row in execute(self._connection, FOUND, self._values()):
                snapshot = Snapshot.parse(row.snapshot)
                states[row.segment] = ReadSoFar(
                    row.number + 1, row.filenode, row.end_block, row.settled_block, snapshot
                )
                if row.waits:
                    waiting.append(row.segment)
        return states, waiting

    def read(self, segment: int, so_far: ReadSoFar, settled: int) -> tuple[ReadSoFar, bytes, bool]:
        """Read the new rows of a segment, at most `batch_bytes` of blocks, and keep their hashes.

        Returns how far the segment is read then, the hashes, and true if the segment is read to its end.
        settled: the block before which no more rows come. A segment that was emptied is read from its start: then the
        `number` that is returned isn't higher than before.
        """
        connection, name = self._connection, self._name(segment)
        with connection.begin():
            self._set_up()
            # Without these each place would cost a scan of the whole segment.
            execute(connection, "SET LOCAL enable_tidscan = on; SET LOCAL enable_nestloop = on")
            execute(connection, f"LOCK TABLE ONLY {name} IN ACCESS SHARE MODE")
            file = execute(connection, FILE, {"name": name}).one()
            if so_far.filenode not in (None, file.filenode):
                execute(connection, FORGET, self._values(segment))
                so_far = ReadSoFar()
                settled = 0
            most = max(1, limits_of(connection).batch_bytes // file.block_bytes)
            end = min(file.blocks, so_far.end + most)
            settled = max(so_far.settled, min(settled, end))
            values = {
                **self._values(segment),
                "number": so_far.number,
                "filenode": file.filenode,
                "end": end,
                "settled": settled,
            }
            unseen = "true" if so_far.snapshot is None else so_far.snapshot.unseen()
            hashes = self._copy(
                READ.format(
                    hash=self._hash,
                    name=name,
                    settled=so_far.settled,
                    end=end,
                    read=so_far.end,
                    unseen=unseen,
                    blocks=PLACE_BLOCKS,
                ),
                values,
            )
            # The snapshot of that statement: a later one may see rows that weren't read.
            seen = Snapshot.parse(execute(connection, TAKEN, values).scalar_one())
        read = replace(
            so_far, number=so_far.number + 1, filenode=file.filenode, end=end, settled=settled, snapshot=seen
        )
        return read, hashes, end == file.blocks

    def kept(self, segment: int, looked: Collection[bool] = (False, True)) -> bytes:
        """The kept hashes of a segment. looked: parts whose duplicates are recorded (true), or aren't yet (false)."""
        with self._connection.begin():
            return self._copy(KEPT, {**self._values(segment), "looked": list(looked)})

    def _copy(self, query: str, values: Mapping[str, Any]) -> bytes:
        """The values of a query's only column, read in binary form."""
        out = io.BytesIO()
        cursor: Any = self._connection.connection.cursor()
        try:
            cursor.copy_expert(f"COPY ({bound(self._connection, query, values)}) TO STDOUT (FORMAT binary)", out)
        finally:
            cursor.close()
        return value_of_copy(out.getvalue())

    def _set_up(self) -> None:
        limits = limits_of(self._connection)
        execute(self._connection, f"SET LOCAL lock_timeout = {limits.table_lock_ms}")

    def _name(self, segment: int) -> str:
        return physical.segment(self._job.generation_id, segment)

    def _values(self, segment: int | None = None) -> dict[str, Any]:
        values: dict[str, Any] = {"generation": self._job.generation_id}
        return values if segment is None else {**values, "segment": segment}


def mark_looked(connection: Connection, job: Job, read: Mapping[int, ReadSoFar]) -> None:
    """Marks the parts that were read of these segments: their duplicates are recorded, in the caller's transaction."""
    numbers = [one.number for one in read.values()]
    execute(connection, LOOKED, {"generation": job.generation_id, "segments": list(read), "numbers": numbers})


# Workers may still write to the last block that each wrote to, and to those by which a segment grew at once (64 at
# most). The seal finds duplicates of rows that come even before this margin.
MARGIN_BLOCKS = 128
# How many looks are remembered: those of 30 s, and a batch takes about a second.
REMEMBERED = 120


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: all transactions before `xmin` have ended; none from `xmax` on is seen, nor those in `running`."""

    xmin: int
    xmax: int
    running: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read a snapshot from the text of a pg_snapshot."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(one) for one in running.split(",") if one))

    def unseen(self) -> str:
        """SQL, true if a row `s` was written by a transaction that this snapshot doesn't see."""
        short = [one % (1 << 32) for one in (self.xmax, *self.running)]
        newer = f"age(s.xmin) <= age('{short[0]}'::xid)"
        if not self.running:
            return newer
        return f"({newer} OR s.xmin = ANY ('{{{','.join(map(str, short[1:]))}}}'::xid[]))"


class Growth:
    """The ends of segments at the last looks."""

    def __init__(self) -> None:
        self._looks: deque[tuple[Snapshot, Mapping[int, int]]] = deque(maxlen=REMEMBERED)

    def look(self, snapshot: Snapshot, ends: Mapping[int, int]) -> None:
        """ends: the blocks of each segment, read before the snapshot: transactions that it misses began behind them."""
        self._looks.append((snapshot, ends))

    def settled(self, segment: int, now: Snapshot) -> int:
        """The block before which no transaction that runs now, or later, writes; 0 if that isn't known."""
        for snapshot, ends in reversed(self._looks):
            if snapshot.xmax <= now.xmin:
                return max(0, ends.get(segment, 0) - MARGIN_BLOCKS)
        return 0
