"""Begins to enforce a unique index over shards: which generations of it, and what it means if one can't be.

Who announces an index or publishes a rebuild calls this; the steps for one generation are in `enforcing.py`
(docs/architecture.md#unique-over-shards).
"""

from __future__ import annotations

from airflow_roir.definition import parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import DuplicatesFound, LockNotAcquired, NotStrict
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.shards.announce.functions import SERVER
from airflow_roir.shards.unique.enforcing import Enforcing, Report

# For what a replaced generation lacks.
RETIRED_PATIENCE_S = 10.0
LIVE = """
SELECT g.id, g.status FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.id = %(index)s AND g.status IN ('active', 'retired') AND g.unique_mode IS NOT NULL
   AND i.announced_by = %(server)s
 ORDER BY g.status, g.id DESC
"""
TO_KEEP = """
SELECT roir.unique_problem(x.id) IS NULL AS enforced
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
  LEFT JOIN roir.generation x ON x.index_id = i.id AND x.status = 'active'
 WHERE g.id = %(generation)s AND g.unique_mode IS NOT NULL AND i.announced_by = %(server)s
"""


def enforce_index(database: Database, index: str, report: Report = lambda line: None) -> bool:
    """Enforce a unique index over shards whose writes are announced; False if it isn't one.

    It is safe to call again, and begins from the start. Raises DuplicatesFound (roir duplicates lists them), NotStrict
    (not yet, and why), LockNotAcquired; whatever it raises, nothing is refused. What keeps a replaced generation
    from it is only reported.
    """
    with database.transaction() as connection:
        row = operations.find_index(connection, parse_name(index, "index"))
        live = execute(connection, LIVE, {"index": row.id, "server": SERVER}).all()
    for one in live:
        if one.status == GenerationStatus.ACTIVE.value:
            Enforcing(database, one.id, report).run()
            continue
        try:
            Enforcing(database, one.id, report, RETIRED_PATIENCE_S, lists=False).run()
        except (DuplicatesFound, NotStrict, LockNotAcquired) as error:
            # A shard that only this generation is over may be gone for good.
            report(f"generation {one.id}, which a revert would show, isn't enforced: {error}")
    return bool(live)


def keep_on(database: Database, generation_id: int, report: Report = lambda line: None) -> None:
    """Before a rebuild is published: enforce it as the generation that it replaces. Raises as `enforce_index`.

    If that one isn't enforced, what can't be is only told.
    """
    with database.transaction() as connection:
        row = execute(connection, TO_KEEP, {"generation": generation_id, "server": SERVER}).first()
    if row is None:
        return
    try:
        Enforcing(database, generation_id, report).run()
    except (DuplicatesFound, NotStrict, LockNotAcquired) as error:
        if row.enforced:
            raise
        report(f"not enforced: {error}")
