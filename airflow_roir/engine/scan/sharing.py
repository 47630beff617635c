"""Several operations over one source with the same ranges share one scan (docs/architecture.md#one-scan).

A new operation takes the cut of a build that is under way. From then on a worker of either also copies a batch's rows
for the other (`carrying.py`), and no two workers read the same range at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import Scan
from airflow_roir.engine.control import operations, sign_of_life
from airflow_roir.engine.control.job import Job, check_fingerprint
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Piece
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source.files import files_of
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import LabelsRenamed, RightMissing, SourceChanged

# SQL: x is another operation with the cut of o, and rows that are copied for one may now be copied for the other. An
# operation with other limits could exceed those of this one, and an operation on hold gets no rows.
TOGETHER = f"""
(x.scan_of = coalesce(o.scan_of, o.id) OR x.id = coalesce(o.scan_of, o.id)) AND x.id <> o.id
AND x.status = 'running' AND x.phase = 'build'
AND abs(extract(epoch FROM clock_timestamp() - x.heartbeat_at)) < {sign_of_life.HEARTBEAT_FRESH_S}
AND roir.slowed_by(x) = roir.slowed_by(o)
AND x.throttle = o.throttle AND roir.granted(x) IS DISTINCT FROM 0
"""
# r, of another operation, is the same piece as p and has the same watermark.
SAME_PLACE = """
r.ordinal = p.ordinal AND NOT r.done
AND (r.relation, r.lower, r.upper, r.filenode, r.watermark)
    IS NOT DISTINCT FROM (p.relation, p.lower, p.upper, p.filenode, p.watermark)
"""
# A worker without progress for this many seconds doesn't hold up another operation.
STUCK_S = 60
# A worker of operation x holds range r and makes progress.
HELD = f"r.claim_epoch = x.epoch AND abs(extract(epoch FROM clock_timestamp() - r.moved_at)) < {STUCK_S}"
# Ranges that a worker of another operation also copies for this one. When its watermark is ahead, they are free again.
COPIED_BY_OTHERS = f"""
id = ANY (ARRAY(
    SELECT p.id FROM roir.operation o
      JOIN roir.operation x ON {TOGETHER}
      JOIN roir.scan_range r ON r.operation_id = x.id AND {HELD}
      JOIN roir.scan_range p ON p.operation_id = o.id AND {SAME_PLACE}
     WHERE o.id = %(operation)s))
"""
SHARES = f"""
SELECT o.id, array_agg(quote_ident(i.schema_name) || '.' || quote_ident(i.name) ORDER BY x.id) AS names
  FROM roir.operation o
  JOIN roir.operation x ON {TOGETHER}
  JOIN roir.index i ON i.id = x.index_id
 WHERE o.id = ANY (%(ids)s) AND o.status = 'running' AND o.phase = 'build' GROUP BY o.id
"""
BUILDS = """
SELECT o.*, g.entry, g.scan, i.schema_name, i.name
  FROM roir.operation o JOIN roir.generation g ON g.id = o.generation_id JOIN roir.index i ON i.id = o.index_id
 WHERE i.source_oid = %(source)s AND o.status IN ('running', 'paused') AND o.phase = 'build'
   AND g.scan IN ('key', 'block') ORDER BY o.id
"""
RANGES = "SELECT ordinal, relation, lower, upper, filenode FROM roir.scan_range WHERE operation_id = %(id)s ORDER BY 1"


@dataclass(frozen=True)
class Cut:
    """The cut of a build that is under way. of: the first operation with this cut; name: the index of that build.

    pieces: with their ordinals in that build.
    """

    of: int
    name: str
    pieces: tuple[tuple[int, Piece], ...]


def others(connection: Connection, operation_ids: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """The other indexes that the same scan builds now, by operation; without operations that scan alone."""
    found = execute(connection, SHARES, {"ids": list(operation_ids)})
    return {row.id: tuple(row.names) for row in found}


def told(names: Sequence[str]) -> str:
    """The phrase for messages: it shares the scan of these indexes."""
    return f"shares the scan of {', '.join(names)}"


def scan_under_way(connection: Connection, source: Source) -> tuple[Scan, str] | None:
    """The scan of the source's oldest build under way, and the index that it builds."""
    row = execute(connection, BUILDS, {"source": source.oid}).first()
    return None if row is None else (Scan(row.scan), str(operations.index_name(row)))


def cut_under_way(connection: Connection, source: Source, scan: Scan, leaves: Sequence[int], least: int) -> Cut | None:
    """The cut that a new operation can take over. The caller holds the drain lock, so that nothing changes meanwhile.

    The other operation has captured rows that came since its cut; the new one hasn't. So these rows become additional
    ranges. None if no build fits: its table was altered or rewritten since, or it has fewer than `least` ranges.
    """
    if scan is Scan.INDEX:
        return None
    for row in execute(connection, BUILDS, {"source": source.oid}).all():
        if row.scan == scan.value and _stands(connection, source, row):
            pieces = _pieces(connection, row.id, scan, leaves)
            if pieces is not None and len(pieces) >= least:
                return Cut(row.scan_of or row.id, str(operations.index_name(row)), tuple(pieces))
    return None


def _stands(connection: Connection, source: Source, row: Row[Any]) -> bool:
    """True if the source is as it was when the build was prepared: bounds of another primary key are of no use."""
    entry = physical.followed(connection, row.generation_id, Entry.from_json(row.entry))
    run = Run(row.id, row.epoch, str(operations.index_name(row)), row.owner or "")
    job = Job(run, row.index_id, row.generation_id, source, entry, dict(row.options), row.fingerprint, Scan(row.scan))
    try:
        check_fingerprint(connection, job)
    except (SourceChanged, LabelsRenamed, RightMissing):
        return False
    return not physical.resorted(connection, row.generation_id, entry)


def _pieces(
    connection: Connection, operation_id: int, scan: Scan, leaves: Sequence[int]
) -> list[tuple[int, Piece]] | None:
    rows = execute(connection, RANGES, {"id": operation_id}).all()
    pieces = [
        (row.ordinal, Piece(row.relation, _bound(row.lower), _bound(row.upper), row.filenode))
        for row in rows
        if row.relation in leaves
    ]
    after = max((row.ordinal for row in rows), default=-1) + 1
    ends: dict[int, int] = {}
    for _, piece in pieces:
        end = int(piece.upper[0]) if scan.by_blocks and piece.upper else 0
        ends[piece.relation] = max(ends.get(piece.relation, 0), end)
    if not scan.by_blocks:
        return pieces + [
            (n, Piece(leaf, None, None)) for n, leaf in enumerate((x for x in leaves if x not in ends), start=after)
        ]
    files = {file.relation: file for file in files_of(connection, leaves)}
    if any(files[piece.relation].filenode != piece.filenode for _, piece in pieces):
        return None
    grown = [
        Piece(file.relation, (str(ends.get(file.relation, 0)),), (str(file.blocks),), file.filenode)
        for file in files.values()
        if file.blocks > ends.get(file.relation, 0) or file.relation not in ends
    ]
    return pieces + list(enumerate(grown, start=after))


def _bound(value: list[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)
