"""Says why a unique index doesn't refuse duplicates now: by its capture, its verifications, and its marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.engine.health import capture_faults
from airflow_roir.engine.health.in_passing import looks_of_many
from airflow_roir.engine.schema import tamper
from airflow_roir.quantity import counted

LOCKED = "it can't be checked now, since a session holds a lock on its table"
GONE = "the table is gone"
# The kinds of `tamper.changes` by which rows may lack entries.
MISSES = (tamper.TRIGGER, tamper.FUNCTION, tamper.VIEW, tamper.ENTRIES)
# The rows that lack their entry by the last complete verification of each generation, and by those since, unless a
# later one has repaired them: a sample, a slice or an aborted verification looks at a part only. `complete`: null while
# a verification is unfinished.
UNREPAIRED = """
SELECT f.generation_id, count(*) FILTER (WHERE f.kind = 'missing') AS missing,
       count(*) FILTER (WHERE f.kind = 'duplicate') AS duplicate
  FROM (SELECT DISTINCT ON (v.generation_id, d.primary_key) v.generation_id, d.kind, d.outcome
          FROM roir.verification v JOIN roir.discrepancy d ON d.verification_id = v.id
         WHERE v.generation_id = ANY (%(generations)s) AND d.kind IN ('missing', 'duplicate')
           AND (v.complete IS NULL OR v.missing + v.duplicate > 0)
           AND v.id >= coalesce((SELECT max(x.id) FROM roir.verification x
                                  WHERE x.generation_id = v.generation_id AND x.complete), 0)
         ORDER BY v.generation_id, d.primary_key, d.id DESC) f
 WHERE f.outcome IS NULL GROUP BY f.generation_id
"""


def why_not(
    connection: Connection, generation_id: int, source_oid: int, source: str, missing: int, duplicate: int
) -> str | None:
    """Why a published generation may let a duplicate in, or has, in a clause; None if it refuses all.

    source: the table's name, quoted for SQL. missing, duplicate: the rows that lack an entry by its verifications, and
    those of them whose key another row has.
    """
    if (missed := capture_faults.why_missed(connection, source_oid)) is not None:
        return missed
    if duplicate:
        return f"a verification found {counted(duplicate, 'row')} whose key another row has"
    if missing:
        return f"a verification found {counted(missing, 'row')} without an entry"
    changed = tamper.changes(connection, generation_id, source)
    return next((changed[kind] for kind in MISSES if kind in changed), None)


def why_not_of_many(connection: Connection, asked: Mapping[int, tuple[int, int, str | None]]) -> dict[int, str | None]:
    """As `why_not`, by index id.

    asked: for each index id its generation, the oid of its table, and the table's name, None if it was dropped. Waits
    for no lock.
    """
    generations = [generation for generation, _, source in asked.values() if source is not None]
    found = {row.generation_id: row for row in execute(connection, UNREPAIRED, {"generations": generations})}
    looks: dict[int, Callable[[Connection], str | None]] = {
        index_id: partial(
            why_not,
            generation_id=generation,
            source_oid=oid,
            source=source,
            missing=found[generation].missing if generation in found else 0,
            duplicate=found[generation].duplicate if generation in found else 0,
        )
        for index_id, (generation, oid, source) in asked.items()
        if source is not None
    }
    locked: str | None = LOCKED
    gone: dict[int, str | None] = dict.fromkeys(asked.keys() - looks.keys(), GONE)
    return gone | looks_of_many(connection, looks, locked)
