"""The room that an operation takes: entries and their B-tree, the delta, WAL, memory and files of the seal's sorts.

The figures come from a trial (`trial.py`). They ignore that the table may grow until the build ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.engine.forecast.trial import Trial
from airflow_roir.engine.forecast.writes import WriteRate
from airflow_roir.engine.generation.cut import Plan
from airflow_roir.engine.generation.physical import segments_of
from airflow_roir.engine.seal import SORT_MEMORY_KB
from airflow_roir.engine.source.relation_size import relation_sizes
from airflow_roir.options import BuildOptions
from airflow_roir.quantity import counted, rate, size

HOUR_S = 3_600
# Besides whole pages of entries: a B-tree's first page; the free-space map and the visibility map of a vacuumed heap.
PAGES_OF_TREE = 1
PAGES_OF_HEAP = 4
# WAL of catalogs and roir's own tables, with whole pages after a checkpoint: of a build, and of each segment.
FIXED_WAL = 1 << 20
SEGMENT_WAL = 40 << 10
# Memory of an entry while it is sorted, besides its own bytes.
SORTED_BYTES = 40
# An entry in a sort's file has its length before and after it.
TAPE_BYTES = 8

SERVER = """
SELECT current_setting('block_size')::bigint AS block, current_setting('wal_level') AS wal_level,
       current_setting('data_checksums') = 'on' OR current_setting('wal_log_hints') = 'on' AS hints,
       (SELECT setting::bigint FROM pg_settings WHERE name = 'maintenance_work_mem') AS memory_kb
"""
KEPT = "SELECT id FROM roir.generation WHERE index_id = %(index)s AND status IN ('active', 'retired')"


@dataclass(frozen=True)
class Space:
    """Bytes. base: the entries; index: their B-tree; present: the active generation, and those that it can revert to.

    wal_high: the WAL if the server writes whole pages for hints (checksums, wal_log_hints), and between checkpoints.
    sort_memory: of each worker of the seal; sort_files: temporary ones of all workers at once. delta_hour,
    captured_wal_hour: for each hour; None if the rate of writes to the source isn't known. captured_wal_row: for each
    write; None if few rows were tried.
    """

    base: int
    index: int
    present: int
    delta_hour: int | None
    captured_wal_hour: int | None
    wal_low: int
    wal_high: int
    workers: int
    sort_memory: int
    sort_files: int
    writes: WriteRate | None
    captured_wal_row: int | None

    @property
    def new(self) -> int:
        """The bytes of the new generation when it is published, without the delta."""
        return self.base + self.index

    def lines(self) -> dict[str, str]:
        """Texts for the user, by topic."""
        beside = ""
        if self.present:
            beside = f", beside {size(self.present)} of the present index until its revert window has ended"
        files = f", and {size(self.sort_files)} of temporary files" if self.sort_files else "; no temporary files"
        wal = size(self.wal_low) if self.wal_high < 1.1 * self.wal_low else f"{size(self.wal_low)} to "
        wal += "" if self.wal_high < 1.1 * self.wal_low else size(self.wal_high)
        found = {
            "space": f"{size(self.new)}: {size(self.base)} of entries, {size(self.index)} of B-tree{beside}",
            "delta": "unknown, as the table's rate of writes is; --measure 10 counts it for 10 seconds",
            "wal": wal,
            "seal": f"{counted(self.workers, 'worker')} with {size(self.sort_memory)} of memory each{files}",
        }
        each = "" if self.captured_wal_row is None else f", about {size(self.captured_wal_row)} of WAL each"
        now = "" if self.writes is None else f"; {rate(self.writes.rows)} are written, by {self.writes.by}"
        found["writers"] = (
            f"inserts, deletes and updates of the index's columns also write the index, in their transaction{each}{now}"
        )
        if self.writes is not None and self.delta_hour is not None and self.captured_wal_hour is not None:
            if not self.writes.rows:
                return found | {"delta": f"nothing was written, by {self.writes.by}"}
            found["delta"] = (
                f"up to {size(self.delta_hour)} an hour of build and pause ({rate(self.writes.rows)} are written, by "
                f"{self.writes.by})"
            )
            found["wal"] += f", and up to {size(self.captured_wal_hour)} an hour for captured writes"
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        writes = self.writes
        return {
            "base_bytes": self.base,
            "index_bytes": self.index,
            "present_bytes": self.present,
            "delta_bytes_per_hour": self.delta_hour,
            "wal_bytes_low": self.wal_low,
            "wal_bytes_high": self.wal_high,
            "captured_wal_bytes_per_hour": self.captured_wal_hour,
            "seal_workers": self.workers,
            "sort_memory_bytes": self.sort_memory,
            "sort_file_bytes": self.sort_files,
            "captured_wal_bytes_per_write": self.captured_wal_row,
            "writes_per_second": None if writes is None else round(writes.rows, 3),
            "writes_by": None if writes is None else writes.by,
        }


def foresee(
    connection: Connection,
    plan: Plan,
    options: BuildOptions,
    trial: Trial,
    writes: WriteRate | None,
    index_id: int | None,
) -> Space:
    """The room for a plan. index_id: of the index that is rebuilt, else None."""
    server = execute(connection, SERVER).one()
    rows, share = plan.rows, plan.rows / trial.rows
    filled = min(plan.segments, max(1, rows))
    heap = _in_pages(trial.heap * share / filled, server.block) + PAGES_OF_HEAP * server.block
    base = filled * heap + round(trial.toast * share)
    # Without the B-tree's first page, which is added for each segment.
    entries = max(0, trial.index - server.block) * share
    tree = _in_pages(entries / filled, server.block) + PAGES_OF_TREE * server.block
    index = filled * tree + (plan.segments + 1 - filled) * PAGES_OF_TREE * server.block
    # The WAL of the copy, and the whole B-tree. The first change of a page after a checkpoint logs the whole page.
    beside = FIXED_WAL + plan.segments * SEGMENT_WAL
    wal = beside + round(trial.wal * share) + (round(entries) if server.wal_level != "minimal" else 0)
    workers = min(options.parallelism, plan.segments)
    memory, files = sorting(rows / plan.segments, entries / max(1, rows), server.memory_kb)
    delta = captured = None
    if writes is not None and trial.captured is not None:
        each = writes.most_entries * HOUR_S / trial.captured.rows
        delta, captured = round(trial.captured.bytes * each), round(trial.captured.wal * each)
    return Space(
        base=base,
        index=index,
        present=_present(connection, index_id),
        delta_hour=delta,
        captured_wal_hour=captured,
        wal_low=wal,
        wal_high=wal + (base if server.hints else 0),
        workers=workers,
        sort_memory=memory,
        sort_files=files * workers,
        writes=writes,
        captured_wal_row=None if trial.captured is None else round(trial.captured.wal / trial.captured.rows),
    )


def sorting(rows: float, entry_bytes: float, setting_kb: int = 0) -> tuple[int, int]:
    """The bytes of memory and of temporary files to sort a segment of this size. setting_kb: maintenance_work_mem."""
    memory = max(SORT_MEMORY_KB, setting_kb) * 1024
    needed = round(rows * (entry_bytes + SORTED_BYTES))
    return min(memory, needed), 0 if needed <= memory else round(rows * (entry_bytes + TAPE_BYTES))


def _in_pages(count: float, block: int) -> int:
    return math.ceil(count / block) * block


def _present(connection: Connection, index_id: int | None) -> int:
    if index_id is None:
        return 0
    segments = [
        oid for row in execute(connection, KEPT, {"index": index_id}).all() for oid in segments_of(connection, row.id)
    ]
    return sum(one.total for one in relation_sizes(connection, segments).values())
