"""Swaps a unit's new segments in for the old ones: one transaction, under the drain lock and one lock of the base.

No writer is in flight, no reader reads the base. The swap applies the entries that were touched since the last step,
drops the old segments, attaches the new ones and names them in the capture's text. The view then refuses snapshots for
which the new segments are empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from sqlalchemy import Connection

from airflow_roir.definition import argument
from airflow_roir.engine import switch
from airflow_roir.engine.capture import installation
from airflow_roir.engine.compact import applying, obstacles, undo
from airflow_roir.engine.compact.copying import Rewritten, check_files, names_of
from airflow_roir.engine.compact.unit import UNITS, UnitClaim
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.control.run import read_running
from airflow_roir.engine.database import Database, execute, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Bound
from airflow_roir.engine.readers import view
from airflow_roir.engine.source.relation_size import relation_sizes
from airflow_roir.errors import InvariantViolated, LockNotAcquired, OperationFailed
from airflow_roir.generation_state import GenerationStatus

# The most listed identities that are applied while readers and writers wait.
MOST_UNDER_LOCK = 2_000
HIDDEN = """
SELECT name FROM roir.source_partition
 WHERE generation_id = %(generation)s AND status <> 'present' AND removed_xid IS NULL ORDER BY id LIMIT 1
"""
EDGES = """
SELECT (SELECT s.lower FROM roir.segment s WHERE s.generation_id = %(generation)s AND s.ordinal = %(first)s) AS lower,
       (SELECT s.upper FROM roir.segment s WHERE s.generation_id = %(generation)s AND s.ordinal = %(last)s) AS upper
"""
FORGET = "DELETE FROM roir.segment WHERE generation_id = %(generation)s AND ordinal = ANY (%(ordinals)s)"
ADD = """
INSERT INTO roir.segment (generation_id, ordinal, lower, upper, status, sealed_at)
SELECT %(generation)s, %(ordinal)s, b.lower, b.upper, 'sealed', clock_timestamp()
  FROM jsonb_to_record(%(bounds)s) AS b (lower jsonb, upper jsonb)
"""
YOUNGER = """
UPDATE roir.segment SET sealed_at = clock_timestamp() WHERE generation_id = %(generation)s AND ordinal = %(default)s
"""
# From now on a reader's snapshot must see this transaction.
LAID_OUT = """
UPDATE roir.generation SET layout = layout + 1, laid_out_at = clock_timestamp(), mode_xid = pg_current_xact_id()::text
 WHERE id = %(generation)s AND status = 'active'
"""
ENTRIES_CHANGED = "SELECT EXISTS (SELECT FROM roir.mark_changes(%(generation)s) m WHERE m.name = 'entries')"
KEEP_ENTRIES = "SELECT roir.keep_marks(%(generation)s, ARRAY['entries'])"
DONE = "status = 'done', bytes_after = %(bytes)s, note = NULL"


def swap(database: Database, job: Job, worker: int, claim: UnitClaim, report: Callable[[str], None]) -> bool:
    """Swaps a unit in. False if the list is too long to be applied under the locks.

    Raises LockNotAcquired, OperationPaused, OperationFailed (readers see another generation now), Rewritten, Fenced.
    """
    with database.transaction() as connection:
        index = operations.read_index(connection, job.index_id)
        names = names_of(connection, claim)
    shown = operations.index_name(index)
    # The unit's own tables, too: a dump may read them, an autovacuum may work on them.
    exclusive = [shown.sql, physical.base(claim.generation_id), claim.beside, claim.touched]
    return switch.drain(
        database, job, lambda connection, lock: _swap(connection, lock, job, worker, claim, names), report, exclusive
    )


def check_active(connection: Connection, job: Job) -> None:
    """Raises OperationFailed if readers see another generation now."""
    query = "SELECT status FROM roir.generation WHERE id = %(generation)s"
    if execute(connection, query, {"generation": job.generation_id}).scalar_one() != GenerationStatus.ACTIVE:
        raise OperationFailed(
            f"index {job.run.index}: readers see another generation now, so its compaction "
            f"can't continue. Abort it: roir abort {argument(job.run.index)}. Then begin a new one"
        )


def _swap(
    connection: Connection, lock: Callable[[], None], job: Job, worker: int, claim: UnitClaim, names: list[str]
) -> bool:
    generation = {"generation": claim.generation_id}
    base = physical.base(claim.generation_id)
    read_running(connection, job.run)
    check_active(connection, job)
    index = operations.read_index(connection, job.index_id)
    name = operations.index_name(index)
    if not view.is_ours(connection, name, job.index_id):
        raise InvariantViolated(view.lost(connection, name, claim.generation_id))
    _check_hidden(connection, job)
    if found := obstacles.obstacle(connection, claim, job.entry, [oid for oid, _, _ in claim.files]):
        raise Rewritten(found)
    execute(connection, "SET LOCAL roir.own_ddl = 'on'")
    lock()
    begun = time.monotonic()
    if applying.left(connection, claim) > MOST_UNDER_LOCK:
        return False
    check_active(connection, job)
    if not UNITS.is_held(connection, job.run, claim):
        raise UNITS.fenced(job.run, worker, claim)
    view.hold(connection, job.index_id)
    execute(connection, LAID_OUT, generation)
    # Locks the view before the base, as its readers do.
    view.show(connection, name, job.index_id, claim.generation_id)
    # Checked again: a session that hides or removes entries takes the lock of `view.hold`, too.
    _check_hidden(connection, job)
    for locked in (f"ONLY {base}", *names):
        # All locks within the time of one attempt: writers queue behind the first one.
        left = max(1, int(job.options["lock_timeout_ms"]) - int((time.monotonic() - begun) * 1000))
        execute(connection, f"SET LOCAL lock_timeout = {left}; LOCK TABLE {locked} IN ACCESS EXCLUSIVE MODE")
    check_files(connection, claim)
    found = (
        obstacles.altered(connection, claim, job.entry, [oid for oid, _, _ in claim.files])
        or obstacles.unread(connection, claim, job.entry)
        or obstacles.missed(connection, claim)
    )
    if found is not None:
        raise Rewritten(found)
    altered = execute(connection, ENTRIES_CHANGED, generation).scalar_one()
    applying.apply(connection, job.entry, claim, 0, applying.blocks(connection, claim) + 1)
    parts = _exchange(connection, job, claim, names)
    _write_down(connection, claim)
    installation.refresh(connection, job.source)
    if not altered:
        # If others had altered the entries' tables before, the status continues to warn of it.
        execute(connection, KEEP_ENTRIES, generation)
    sizes = relation_sizes(connection, parts)
    values = {"bytes": sum(one.total for one in sizes.values())}
    UNITS.commit(connection, job.run, worker, claim, DONE, values, "p.status = 'folding'")
    return True


def _check_hidden(connection: Connection, job: Job) -> None:
    """Raises LockNotAcquired while a partition's entries are being brought or removed, segment by segment."""
    if (hidden := execute(connection, HIDDEN, {"generation": job.generation_id}).scalar()) is not None:
        raise LockNotAcquired(
            f"index {job.run.index}: entries of partition {hidden} are being added or removed. Finish its attach, or "
            f"let roir clean-up remove its entries. Then: roir resume {argument(job.run.index)}"
        )


def _exchange(connection: Connection, job: Job, claim: UnitClaim, names: list[str]) -> list[int]:
    """Drops the old segments with their triggers, and attaches the new ones to the base; returns the new ones' oids."""
    base = physical.base(claim.generation_id)
    is_default = claim.segments[0] == physical.DEFAULT_SEGMENT
    for old in names:
        execute(connection, f"ALTER TABLE {base} DETACH PARTITION {old}")
    execute(connection, f"DROP TABLE {', '.join(names)}")
    edges = execute(connection, EDGES, _edges(claim)).one()
    between: list[Bound | None] = [edges.lower, *claim.cuts, edges.upper]
    oids = []
    for place in range(len(claim.cuts) + 1):
        part = claim.part(place)
        execute(connection, f"ALTER TABLE {claim.beside} DETACH PARTITION {part}")
        if is_default:
            final = physical.segment(claim.generation_id, physical.DEFAULT_SEGMENT)
            _rename(connection, job, part, final)
            execute(connection, f"ALTER TABLE {base} ATTACH PARTITION {final} DEFAULT")
            part = final
        else:
            physical.attach_segment(connection, part, base, job.entry, between[place], between[place + 1])
            execute(connection, f"ALTER TABLE {part} DROP CONSTRAINT IF EXISTS roir_bounds")
        oids.append(int(execute(connection, "SELECT to_regclass(%(n)s)::oid::bigint", {"n": part}).scalar_one()))
    undo.drop(connection, claim.generation_id, claim.id)
    return oids


def _rename(connection: Connection, job: Job, name: str, final: str) -> None:
    """Gives the new default segment and its indexes the names of the old ones: the capture's statements use them."""
    suffixes = ["_key", *(["_pair"] if job.entry.enforced else [])]
    for suffix in suffixes:
        execute(connection, f"ALTER INDEX {name}{suffix} RENAME TO {final.split('.', 1)[1]}{suffix}")
    execute(connection, f"ALTER TABLE {name} RENAME TO {final.split('.', 1)[1]}")


def _edges(claim: UnitClaim) -> dict[str, int]:
    return {"generation": claim.generation_id, "first": claim.segments[0], "last": claim.segments[-1]}


def _write_down(connection: Connection, claim: UnitClaim) -> None:
    if claim.segments[0] == physical.DEFAULT_SEGMENT:
        # The default segment keeps its ordinal.
        execute(connection, YOUNGER, {"generation": claim.generation_id, "default": physical.DEFAULT_SEGMENT})
        return
    edges = execute(connection, EDGES, _edges(claim)).one()
    execute(connection, FORGET, {"generation": claim.generation_id, "ordinals": list(claim.segments)})
    between = [edges.lower, *map(list, claim.cuts), edges.upper]
    for place, (lower, upper) in enumerate(pairwise(between)):
        values = {"generation": claim.generation_id, "ordinal": claim.parts[place]}
        execute(connection, ADD, {**values, "bounds": to_json({"lower": lower, "upper": upper})})
