"""Operations that have been paused, or abandoned, for long: such a build still captures, and its delta grows.

roir warns of them. It aborts them only if they have `abort_after`, and never without a warning before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import argument
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.remedies import way_on
from airflow_roir.engine.database import execute
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source.relation_size import RelationSize, relation_sizes
from airflow_roir.one_line import one_line
from airflow_roir.operation import BUILDS, BY_WINDOW, Kind
from airflow_roir.quantity import counted, duration, size

# The actions of a warning's event, and the least time between two warnings.
EVENT = "long pause"
OF_ABANDONED = "abandoned"
AGAIN_S = 86_400
# The least time between the first warning and an abort, or a quarter of abort_after_s if that is less.
NOTICE_S = 3600

# The rows are from the statistics: no table is read.
PAUSED = """
SELECT o.id AS operation_id, i.schema_name, i.name, o.kind, o.owner, o.paused_by, o.pause_reason, a.since,
       a.abandoned, o.warn_after_s, o.abort_after_s, clock_timestamp() AS now,
       extract(epoch FROM clock_timestamp() - a.since)::float8 AS seconds,
       coalesce((SELECT sum(pg_stat_get_live_tuples(n)) FROM unnest(d.oids) n), 0)::bigint AS delta_rows,
       d.oids::bigint[] AS deltas, w.last AS warned_at, w.first AS first_warned_at
  FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 CROSS JOIN LATERAL (
       SELECT o.status = 'running' AS abandoned,
              CASE o.status WHEN 'paused' THEN o.paused_at ELSE roir.abandoned_since(o) END AS since OFFSET 0) a
 CROSS JOIN LATERAL (
       SELECT max(e.at) AS last, min(e.at) AS first FROM roir.event e
        WHERE e.operation_id = o.id AND e.at >= a.since
          AND e.action = CASE WHEN a.abandoned THEN %(abandoned)s ELSE %(event)s END) w
 CROSS JOIN LATERAL (
       SELECT array_remove(
              CASE WHEN o.kind IN ('create', 'rebuild')
                   THEN ARRAY[to_regclass('roir_data.g' || o.generation_id || '_delta')::oid]
                   -- The lists of its units, with the touched identities.
                   ELSE ARRAY(SELECT to_regclass(format('roir_data.g%%s_u%%s_touched', u.generation_id, u.id))::oid
                                FROM roir.compaction_unit u
                               WHERE u.operation_id = o.id AND u.status IN ('copying', 'indexing', 'folding'))
              END, NULL) AS oids) d
 WHERE o.status IN ('running', 'paused') AND a.since IS NOT NULL
   AND (%(operation)s IS NULL OR o.id = %(operation)s) ORDER BY o.id
"""


@dataclass(frozen=True)
class LongPause:
    """A pause that needs a warning, or that has ended in an abort. seconds: since the operation was paused, or
    driven last.

    abandoned: it isn't paused, but no run drives it, and none will; paused_by and reason are '' then. owner: the run
    that drove it last.
    delta_rows, delta_bytes: about how much writers have put into the delta, or into a compaction's lists. aborts_in:
    seconds until the abort; None: there will be none.
    """

    index: str
    operation_id: int
    kind: str
    paused_by: str
    reason: str
    seconds: float
    delta_rows: int
    delta_bytes: int
    aborts_in: float | None = None
    aborted: bool = False
    abandoned: bool = False
    owner: str | None = None

    @property
    def text(self) -> str:
        """The warning for the user: by whom, since when, how much, what to do."""
        name, lasts = argument(self.index), duration(self.seconds)
        lasting = f"index {self.index}: operation {self.operation_id} "
        if self.abandoned:
            lasting += f"is abandoned: no run has driven it for {lasts}"
        else:
            lasting += f"has been paused for {lasts} by {one_line(self.paused_by)} ({one_line(self.reason)})"
        if self.kind in BUILDS or self.kind == Kind.COMPACT:
            grows = "its lists of written entries have" if self.kind == Kind.COMPACT else "its delta has"
            much = f"about {counted(self.delta_rows, 'row')} ({size(self.delta_bytes)})"
            lasting += f"{',' if self.abandoned else ''} and still captures writes: {grows} {much}"
        if self.aborted:
            return f"{lasting}; aborted, as its abort_after_s says"
        ending = f"; it is aborted in {duration(self.aborts_in)}" if self.aborts_in is not None else ""
        on = f"Continue it: roir resume {name}," if self.abandoned else one_line(self._way_on(), 1000)
        return f"{lasting}{ending}. {on} or abort it: roir abort {name}"

    def _way_on(self) -> str:
        way = way_on(self.index, self.paused_by, self.owner)
        return f"{way[0].upper()}{way[1:]};"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, and for a notifier's templates."""
        return {**asdict(self), "text": self.text}


def long_pauses(connection: Connection, operation_id: int | None = None) -> list[LongPause]:
    """The pauses that need a warning now, of one operation or of all; abandoned operations count. Changes nothing."""
    rows = paused(connection, operation_id)
    sizes = relation_sizes(connection, [oid for row in rows for oid in row.deltas])
    return [found for row in rows if (found := warning(connection, row, sizes)) is not None]


def paused(connection: Connection, operation_id: int | None) -> list[Row[Any]]:
    """The operations that are paused or abandoned, for long or not."""
    values = {"operation": operation_id, "event": EVENT, "abandoned": OF_ABANDONED}
    return list(execute(connection, PAUSED, values).all())


def abandoned(connection: Connection) -> list[LongPause]:
    """The abandoned operations, for long or not."""
    rows = [row for row in paused(connection, None) if row.abandoned]
    sizes = relation_sizes(connection, [oid for row in rows for oid in row.deltas])
    return [_lasting(row, _delta_bytes(row, sizes)) for row in rows]


def warning(connection: Connection, row: Row[Any], sizes: Mapping[int, RelationSize] | None = None) -> LongPause | None:
    """The warning of a pause; None if the pause is short and its delta small, or no warning is wanted.

    sizes: of the relations in its `deltas`, if they are known.
    """
    aborts_in = _aborts_in(row)
    # An abandoned verification captures nothing, but keeps builds out.
    counts = row.kind != Kind.VERIFY or row.abandoned
    known = relation_sizes(connection, row.deltas) if sizes is None else sizes
    delta_bytes = _delta_bytes(row, known)
    is_long = row.warn_after_s is not None and counts and row.seconds >= row.warn_after_s
    is_big = row.warn_after_s is not None and counts and delta_bytes >= limits_of(connection).paused_delta_bytes
    # The warning leaves half of the time to act.
    is_ending = aborts_in is not None and row.seconds >= row.abort_after_s / 2
    return _lasting(row, delta_bytes, aborts_in) if is_long or is_big or is_ending else None


def _delta_bytes(row: Row[Any], sizes: Mapping[int, RelationSize]) -> int:
    return sum(sizes[oid].total for oid in row.deltas if oid in sizes)


def _lasting(row: Row[Any], delta_bytes: int, aborts_in: float | None = None) -> LongPause:
    return LongPause(
        str(operations.index_name(row)),
        row.operation_id,
        row.kind,
        "" if row.abandoned else row.paused_by or "",
        "" if row.abandoned else row.pause_reason or "",
        max(0.0, row.seconds),
        row.delta_rows,
        delta_bytes,
        aborts_in,
        abandoned=row.abandoned,
        owner=row.owner,
    )


def _aborts_in(row: Row[Any]) -> float | None:
    """The seconds until the abort; None if there will be none. A pause by the windows is planned, and never aborts."""
    if row.abort_after_s is None or (row.paused_by == BY_WINDOW and not row.abandoned):
        return None
    notice = min(row.abort_after_s / 4, NOTICE_S)
    warned: datetime | None = row.first_warned_at
    since = 0.0 if warned is None else (row.now - warned).total_seconds()
    return float(max(row.abort_after_s - row.seconds, notice - since, 0.0))
