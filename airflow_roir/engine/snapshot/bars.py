"""The pieces of an operation as bars: how far each is, and which worker holds it; neighbours share a bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.database import execute

# The most bars that a user can tell apart on a page.
MOST_BARS = 400

# One pass, grouped by a number: at ten thousand pieces sorts and windows would cost more than all the rest. held: the
# worker and the number of each held piece, in one number.
HELD = 1 << 32
BARS = """
SELECT min(p.n)::int AS first, max(p.n)::int AS last, bool_and(p.done) AS done, bool_or(p.done) AS some,
       count(*) FILTER (WHERE p.done) AS done_count, avg(p.share)::float8 AS share, sum(p.rows)::bigint AS rows,
       array_agg(p.claim_worker * %(held)s + p.n) FILTER (WHERE p.claim_epoch = %(epoch)s) AS held
  FROM ({pieces}) p
 GROUP BY p.n / (%(count)s / %(most)s + 1)
 ORDER BY 1
"""
# Counts the rows of ranges as `roir.operation_work` does. Ordinals of ranges and segments begin with 0, those of units
# don't.
PIECES = {
    "ranges": """
SELECT ordinal AS n, done, rows, claim_worker, claim_epoch,
       CASE WHEN done THEN 1 ELSE least(rows / greatest(%(estimate)s::float8 / %(count)s, 1), 0.99) END AS share
  FROM roir.scan_range WHERE operation_id = %(operation)s
""",
    "segments": """
SELECT ordinal AS n, status = 'sealed' AS done, NULL::bigint AS rows, claim_worker, claim_epoch,
       CASE status WHEN 'sealed' THEN 1 WHEN 'indexed' THEN 0.7 ELSE 0 END AS share
  FROM roir.segment WHERE generation_id = %(generation)s
""",
    "units": """
SELECT row_number() OVER (ORDER BY id) - 1 AS n, done, rows, claim_worker, claim_epoch, done::int AS share
  FROM roir.verification_unit WHERE verification_id = %(verification)s
""",
    "compactions": """
SELECT ordinal AS n, status IN ('done', 'left') AS done, rows, claim_worker, claim_epoch, roir.unit_share(u) AS share
  FROM roir.compaction_unit u WHERE operation_id = %(operation)s
""",
}


@dataclass(frozen=True)
class Bar:
    """Neighbouring pieces, numbered from 0. state: waiting, working, done, or mixed (some done). done: a share."""

    first: int
    last: int
    state: str
    done: float
    workers: tuple[int, ...]
    rows: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "from": self.first,
            "to": self.last,
            "state": self.state,
            "done": round(self.done, 3),
            "workers": list(self.workers),
            "rows": self.rows,
        }


@dataclass(frozen=True)
class Bars:
    """of: ranges, segments, units or compactions. held: the number of the piece that each worker holds."""

    of: str
    count: int
    done: int
    items: tuple[Bar, ...]
    held: dict[int, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"of": self.of, "count": self.count, "done": self.done, "items": [one.as_dict() for one in self.items]}


def bars(connection: Connection, of: str, count: int, values: dict[str, Any]) -> Bars:
    """The bars of `count` pieces of one kind. values: to find the pieces, and the epoch whose claims count."""
    query = BARS.format(pieces=PIECES[of])
    values = {**values, "count": max(count, 1), "most": MOST_BARS, "held": HELD}
    rows = execute(connection, query, values).all()
    held = {pair // HELD: pair % HELD for row in rows for pair in row.held or ()}
    return Bars(of, count, sum(row.done_count for row in rows), tuple(map(_bar, rows)), held)


def _bar(row: Row[Any]) -> Bar:
    workers = tuple(sorted({pair // HELD for pair in row.held or ()}))
    state = "done" if row.done else "working" if workers else "mixed" if row.some else "waiting"
    return Bar(row.first, row.last, state, row.share, workers, row.rows)
