"""Operations that have been paused for long: a paused build still captures, and its delta grows.

roir warns of them. It aborts them only if they have `abort_after`, and never without a warning before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import argument
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source.relation_size import relation_sizes
from airflow_roir.one_line import one_line
from airflow_roir.operation import BUILDS, BY_WINDOW, Kind
from airflow_roir.quantity import counted, duration, size

# The action of a warning's event, and the least time between two warnings.
EVENT = "long pause"
AGAIN_S = 86_400
# The least time between the first warning and an abort, or a quarter of abort_after_s if that is less.
NOTICE_S = 3600

# The rows are from the statistics: no table is read.
PAUSED = """
SELECT o.id AS operation_id, i.schema_name, i.name, o.kind, o.paused_by, o.pause_reason, o.paused_at,
       o.warn_after_s, o.abort_after_s, clock_timestamp() AS now,
       extract(epoch FROM clock_timestamp() - o.paused_at)::float8 AS seconds,
       coalesce((SELECT sum(pg_stat_get_live_tuples(n)) FROM unnest(d.oids) n), 0)::bigint AS delta_rows,
       d.oids::bigint[] AS deltas,
       (SELECT max(e.at) FROM roir.event e
         WHERE e.operation_id = o.id AND e.action = %(event)s AND e.at >= o.paused_at) AS warned_at,
       (SELECT min(e.at) FROM roir.event e
         WHERE e.operation_id = o.id AND e.action = %(event)s AND e.at >= o.paused_at) AS first_warned_at
  FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 CROSS JOIN LATERAL (
       SELECT array_remove(
              CASE WHEN o.kind IN ('create', 'rebuild')
                   THEN ARRAY[to_regclass('roir_data.g' || o.generation_id || '_delta')::oid]
                   -- The lists of its units, with the touched identities.
                   ELSE ARRAY(SELECT to_regclass(format('roir_data.g%%s_u%%s_touched', u.generation_id, u.id))::oid
                                FROM roir.compaction_unit u
                               WHERE u.operation_id = o.id AND u.status IN ('copying', 'indexing', 'folding'))
              END, NULL) AS oids) d
 WHERE o.status = 'paused' AND (%(operation)s IS NULL OR o.id = %(operation)s) ORDER BY o.id
"""


@dataclass(frozen=True)
class LongPause:
    """A pause that needs a warning, or that has ended in an abort. seconds: since the operation was paused.

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

    @property
    def text(self) -> str:
        """The warning for the user: by whom, since when, how much, what to do."""
        name = argument(self.index)
        lasting = f"index {self.index}: operation {self.operation_id} has been paused for {duration(self.seconds)} by "
        lasting += f"{one_line(self.paused_by)} ({one_line(self.reason)})"
        if self.kind in BUILDS or self.kind == Kind.COMPACT:
            grows = "its lists of what was touched have" if self.kind == Kind.COMPACT else "its delta has"
            much = f"about {counted(self.delta_rows, 'row')} ({size(self.delta_bytes)})"
            lasting += f" and captures all the while: {grows} {much}"
        if self.aborted:
            return f"{lasting}; aborted, as its abort_after_s says"
        ending = f"; it is aborted in {duration(self.aborts_in)}" if self.aborts_in is not None else ""
        return f"{lasting}{ending}. Resume it: roir resume {name}, or abort it: roir abort {name}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, and for a notifier's templates."""
        return {**asdict(self), "text": self.text}


def long_pauses(connection: Connection, operation_id: int | None = None) -> list[LongPause]:
    """The pauses that need a warning now, of one operation or of all. Changes nothing, waits for nothing."""
    return [found for row in paused(connection, operation_id) if (found := warning(connection, row)) is not None]


def paused(connection: Connection, operation_id: int | None) -> list[Row[Any]]:
    """The paused operations, for long or not."""
    return list(execute(connection, PAUSED, {"operation": operation_id, "event": EVENT}).all())


def warning(connection: Connection, row: Row[Any]) -> LongPause | None:
    """The warning of a pause; None if the pause is short and its delta small, or no warning is wanted."""
    aborts_in = _aborts_in(row)
    captures = row.kind != Kind.VERIFY
    delta_bytes = sum(one.total for one in relation_sizes(connection, row.deltas).values())
    is_long = row.warn_after_s is not None and captures and row.seconds >= row.warn_after_s
    is_big = row.warn_after_s is not None and captures and delta_bytes >= limits_of(connection).paused_delta_bytes
    # The warning leaves half of the time to act.
    is_ending = aborts_in is not None and row.seconds >= row.abort_after_s / 2
    if not (is_long or is_big or is_ending):
        return None
    name = str(operations.index_name(row))
    return LongPause(
        name,
        row.operation_id,
        row.kind,
        row.paused_by or "",
        row.pause_reason or "",
        row.seconds,
        row.delta_rows,
        delta_bytes,
        aborts_in,
    )


def _aborts_in(row: Row[Any]) -> float | None:
    """The seconds until the abort; None if there will be none. A pause by the windows is planned, and never aborts."""
    if row.abort_after_s is None or row.paused_by == BY_WINDOW:
        return None
    notice = min(row.abort_after_s / 4, NOTICE_S)
    warned: datetime | None = row.first_warned_at
    since = 0.0 if warned is None else (row.now - warned).total_seconds()
    return float(max(row.abort_after_s - row.seconds, notice - since, 0.0))
