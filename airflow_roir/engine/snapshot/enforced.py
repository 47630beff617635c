"""Says why a unique index doesn't refuse duplicates now: by its capture, its last verification, and its marks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from sqlalchemy import Connection

from airflow_roir.engine.health import capture_faults
from airflow_roir.engine.health.in_passing import looks_of_many
from airflow_roir.engine.schema import tamper
from airflow_roir.engine.snapshot.verified import Verified
from airflow_roir.quantity import counted

LOCKED = "it can't be checked now, since a session holds a lock on its table"
# The kinds of `tamper.changes` by which rows may lack entries.
MISSES = (tamper.TRIGGER, tamper.FUNCTION, tamper.VIEW, tamper.ENTRIES)


def why_not(
    connection: Connection, generation_id: int, source_oid: int, source: str, verified: Verified | None
) -> str | None:
    """Why a published generation may let a duplicate in, or has, in a clause; None if it refuses all.

    source: the table's name, quoted for SQL. verified: the last verification of that generation.
    """
    if (missed := capture_faults.why_missed(connection, source_oid)) is not None:
        return missed
    if verified is not None and verified.wrong:
        if verified.duplicate:
            return f"the last verification found {counted(verified.duplicate, 'row')} whose key another row has"
        if verified.missing:
            return f"the last verification found {counted(verified.missing, 'row')} without an entry"
    changed = tamper.changes(connection, generation_id, source)
    return next((changed[kind] for kind in MISSES if kind in changed), None)


def why_not_of_many(
    connection: Connection, asked: Mapping[int, tuple[int, int, str]], verified: Mapping[int, Verified]
) -> dict[int, str | None]:
    """As `why_not`, by index id. asked: for each index id its generation, the oid of its table, and the table's name.

    Waits for no lock.
    """
    looks = {
        index_id: partial(
            why_not, generation_id=generation, source_oid=oid, source=source, verified=verified.get(index_id)
        )
        for index_id, (generation, oid, source) in asked.items()
    }
    return looks_of_many(connection, looks, LOCKED)
