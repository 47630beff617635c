"""Repairs all discrepancies of a unit, in short transactions; those that a writer holds are tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import execute
from airflow_roir.engine.retry.trouble import Trouble, trouble_of
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.verify.repairer import Repairer

# With more discrepancies in a unit one transaction repairs a chunk of them: a transaction takes some ten milliseconds.
MANY = 100
CHUNK = 1_000
# How often a discrepancy whose row or entry a writer holds is tried.
TRIES = 20

UNREPAIRED = """
SELECT id, kind FROM roir.discrepancy
 WHERE verification_id = %(verification)s AND unit_id = %(unit)s AND outcome IS NULL
   AND kind NOT IN ('corrupt', 'damaged') AND (kind <> 'duplicate' OR %(first)s)
 ORDER BY id
"""


def mend_unit(connection: Connection, job: Job, verification_id: int, unit_id: int) -> Iterator[None]:
    """Repairs all discrepancies of a unit, in steps of one or two short transactions.

    A discrepancy that a writer holds is tried again for some seconds, then stays as it is.
    """
    repairer = Repairer(connection, job)
    values = {"verification": verification_id, "unit": unit_id}
    with connection.begin():
        repairer.look_again([row.id for row in execute(connection, UNREPAIRED, {**values, "first": True})])
    for attempt in range(TRIES):
        with connection.begin():
            # Duplicates are tried once: only a user can resolve them.
            rows = execute(connection, UNREPAIRED, {**values, "first": attempt == 0}).all()
        if not rows:
            return
        if attempt:
            time.sleep(limits_of(connection).repair_rest_s)
        # Many are repaired in chunks, but one by one in every second attempt, in case a table's lock was in the way.
        size = CHUNK if len(rows) > MANY and attempt % 2 == 0 else 1
        absent = [row.id for row in rows if row.kind != "extra"]
        for ids in _chunks(absent, size):
            # If the row is gone, a different entry is an extra one, and a missing entry isn't missing any more.
            if left := tried(repairer.put, ids):
                tried(repairer.take_out, left)
            yield
        for ids in _chunks([row.id for row in rows if row.kind == "extra"], size):
            tried(repairer.take_out, ids)
            yield


def _chunks(ids: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(ids), size):
        yield ids[first : first + size]


def tried(work: Callable[[list[int]], list[int]], ids: list[int]) -> list[int]:
    """The discrepancies that `work` left for the next step; none if a writer held something that it needed."""
    try:
        return work(ids)
    except DBAPIError as error:
        if trouble_of(error) is not Trouble.LOST or error.connection_invalidated:
            raise
        return []
