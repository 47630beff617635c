"""Applies the writes since a unit was captured to its new segments, and compares these with the old ones.

For each identity in the list the new segments get what the old ones have, in one snapshot: the entry, or none. A later
write lists its identity again, and a later step has a later snapshot, since one worker at a time holds the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from sqlalchemy import Connection

from airflow_roir.engine.compact import copying
from airflow_roir.engine.compact.copying import NAME, check_files
from airflow_roir.engine.compact.unit import UNITS, UnitClaim
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.giving_way import giving_way
from airflow_roir.engine.verify import damage, hashes

# Blocks of the list in one step: some thousand identities, a fraction of a second.
BLOCKS_PER_STEP = 32
SIZE = "SELECT pg_relation_size(to_regclass(%(name)s)) / current_setting('block_size')::int"
# Lookups use the indexes of both sides, even if a planner without statistics would choose otherwise.
BY_INDEX = (
    "SET LOCAL enable_indexscan = on; SET LOCAL enable_nestloop = on; SET LOCAL enable_seqscan = off; "
    "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"
)
ONE_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"

# The identities in the list, each once, as relation `d`: one relation for each pattern of NULLs, since only a condition
# for a known pattern can use an index. {listed} of the statements below.
PATTERNS = "SELECT DISTINCT {pattern} FROM {touched} d WHERE {within}"
LISTED = "(SELECT DISTINCT {identity} FROM {touched} d WHERE {within} AND {pattern} = '{nulls}') d"
# {beside}: the new segments, `n`; {old}: the old ones, `e`. {n_same}, {e_same}: of each and `d`.
REMOVE = "DELETE FROM {beside} n USING {listed} WHERE {n_same}"
# In a unique index, in this snapshot, the key is this row's. A row that had it before is in the list, too, further on.
REMOVE_KEYS = """
DELETE FROM {beside} n USING (SELECT {e_columns} FROM {listed} JOIN {old} e ON {e_same}) t WHERE {same_key}
"""
PUT = "INSERT INTO {beside} ({columns}) SELECT {e_columns} FROM {listed} JOIN {old} e ON {e_same}"
APPLIED = "DELETE FROM {touched} d WHERE {within}"
# {relation}: one side, `e`.
SUM = "SELECT count(*), coalesce(sum({hashed}), 0) FROM {relation} e"
SUM_OF_LISTED = "SELECT count(*), coalesce(sum({hashed}), 0) FROM {listed} JOIN {relation} e ON {same}"


def blocks(connection: Connection, claim: UnitClaim) -> int:
    """The length of the list in blocks, the room of applied rows included."""
    return int(execute(connection, SIZE, {"name": claim.touched}).scalar_one())


def left(connection: Connection, claim: UnitClaim) -> int:
    """The number of identities in the list; an entry that was written twice counts twice."""
    return int(execute(connection, f"SELECT count(*) FROM {claim.touched}").scalar_one())


def step(database: Database, connection: Connection, job: Job, worker: int, claim: UnitClaim, first: int) -> int:
    """Applies `BLOCKS_PER_STEP` blocks of the list from `first` on, in a transaction; returns how many rows they had.

    Raises Rewritten, Fenced.
    """
    with connection.begin():
        names = copying.names_of(connection, claim)
    with connection.begin():
        execute(connection, ONE_SNAPSHOT)
        copying.hold(connection, names, database.limits.table_lock_ms)
        # Before the snapshot, so that the worker that held the unit before us has ended.
        UNITS.commit(connection, job.run, worker, claim, "status = 'folding'", {}, "p.status = 'folding'", "false")
        check_files(connection, claim)
        return apply(connection, job.entry, claim, first, first + BLOCKS_PER_STEP)


def apply(connection: Connection, entry: Entry, claim: UnitClaim, first: int, end: int) -> int:
    """Does `step`'s work in the caller's transaction, which has one snapshot, or locks the segments' writers out."""
    within = f"d.ctid >= '({first},0)'::tid AND d.ctid < '({end},0)'::tid"
    execute(connection, BY_INDEX)
    old = _old(connection, claim)
    columns, e_columns = ", ".join(entry.physical()), ", ".join(entry.physical(prefix="e."))
    for listed, known in _listed(connection, entry, claim, within):
        parts = {
            "beside": claim.beside,
            "old": old,
            "listed": listed,
            "columns": columns,
            "e_columns": e_columns,
            "n_same": entry.equal("n.", "d.", known),
            "e_same": entry.equal("e.", "d.", known),
        }
        execute(connection, REMOVE.format(**parts))
        if entry.enforced and not any(known[i] for i in entry.apart_positions):
            same_key = " AND ".join(
                entry.same_column(i, f"n.c{i + 1}", f"t.c{i + 1}", known[i]) for i in entry.key_positions
            )
            execute(connection, REMOVE_KEYS.format(**parts, same_key=same_key))
        execute(connection, PUT.format(**parts))
    return execute(connection, APPLIED.format(touched=claim.touched, within=within)).rowcount


def clear(database: Database, claim: UnitClaim) -> None:
    """Frees the room of the list's applied rows for new ones, between two passes."""
    with database.autocommit() as connection:
        execute(connection, f"SET lock_timeout = {database.limits.table_lock_ms}")
        execute(connection, f"VACUUM {claim.touched}")


def differs(
    database: Database, connection: Connection, job: Job, worker: int, claim: UnitClaim, insists: bool
) -> str | None:
    """Compares old and new segments in one snapshot, without the entries in the list; the difference in words, or None.

    Reads both sides once, from their heaps. insists: don't give way to a session that waits for a segment's lock, such
    as a TRUNCATE. Raises GaveWay, Rewritten, Fenced.
    """
    with connection.begin():
        names = copying.names_of(connection, claim)
    # This is a long read: a TRUNCATE of the source would wait for its end, and all writers behind the TRUNCATE.
    with nullcontext() if insists else giving_way(database, connection, names), connection.begin():
        execute(connection, ONE_SNAPSHOT)
        copying.hold(connection, names, database.limits.table_lock_ms)
        UNITS.commit(connection, job.run, worker, claim, "status = 'folding'", {}, "p.status = 'folding'", "false")
        check_files(connection, claim)
        (rows, total), (copies, of_copies) = (
            _untouched(connection, job.entry, claim, relation) for relation in (_old(connection, claim), claim.beside)
        )
    if (rows, total) == (copies, of_copies):
        return None
    return (
        f"{rows} entries and {copies} copies"
        if rows != copies
        else f"{rows} entries, of which copies have other values"
    )


def _untouched(connection: Connection, entry: Entry, claim: UnitClaim, relation: str) -> tuple[int, int]:
    """The number of one side's entries and the sum of their hashes, without the entries in the list."""
    newer = (connection.dialect.server_version_info or (0,)) >= (18,)
    hashed = hashes.row_hash(entry, entry.physical(prefix="e."), newer)
    execute(connection, damage.WITHOUT_INDEX)
    rows, total = map(int, execute(connection, SUM.format(hashed=hashed, relation=relation)).one())
    execute(connection, BY_INDEX)
    for listed, known in _listed(connection, entry, claim):
        same = entry.equal("e.", "d.", known)
        of_listed = SUM_OF_LISTED.format(hashed=hashed, listed=listed, relation=relation, same=same)
        touched, of_touched = map(int, execute(connection, of_listed).one())
        rows, total = rows - touched, total - of_touched
    return rows, total


def _listed(
    connection: Connection, entry: Entry, claim: UnitClaim, within: str = "true"
) -> list[tuple[str, dict[int, bool]]]:
    """The identities in the list as relations, by `LISTED`, each with its pattern of NULLs."""
    parts = {
        "pattern": entry.null_pattern(entry.identity_positions, "d."),
        "identity": ", ".join(entry.physical(entry.identity_positions, prefix="d.")),
        "touched": claim.touched,
        "within": within,
    }
    return [
        (LISTED.format(**parts, nulls=nulls), {i: nulls[i] == "1" for i in entry.identity_positions})
        for nulls in execute(connection, PATTERNS.format(**parts)).scalars()
    ]


def _old(connection: Connection, claim: UnitClaim) -> str:
    """The unit's segments as one relation, without an alias."""
    names: Sequence[str] = [execute(connection, NAME, {"oid": oid}).scalar_one() for oid, _, _ in claim.files]
    return f"({' UNION ALL '.join(f'SELECT * FROM ONLY {name}' for name in names)})"
