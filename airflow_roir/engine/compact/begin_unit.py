"""Begins a unit: captures its segments, and creates the new ones beside the base, in one short transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.compact import capture, copying, obstacles, undo
from airflow_roir.engine.compact.cost_model import LEAST_WASTE
from airflow_roir.engine.compact.unit import FEW_KEYS, UNITS, UnitClaim
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.control.run import read_running
from airflow_roir.engine.database import Database, execute, sqlstate, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Bound, cut
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.schema import rights
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source.files import files_of
from airflow_roir.engine.verify.hashes import text

# A unit lists its segments in the order of their keys; they are neighbours.
SEGMENTS = """
SELECT s.ordinal, s.lower, s.upper FROM roir.segment s
  JOIN unnest(%(ordinals)s::int[]) WITH ORDINALITY AS o (ordinal, place) USING (ordinal)
 WHERE s.generation_id = %(generation)s AND s.status = 'sealed' ORDER BY o.place
"""
# The tablespace and the settings that a DBA gave a segment. Until a segment has its index, roir decides on autovacuum.
KEPT = """
SELECT t.spcname AS tablespace,
       (SELECT string_agg(format('%%I = %%L', o.option_name, o.option_value), ', ')
          FROM pg_options_to_table(c.reloptions) o WHERE o.option_name <> 'autovacuum_enabled') AS settings
  FROM pg_class c LEFT JOIN pg_tablespace t ON t.oid = c.reltablespace WHERE c.oid = %(oid)s
"""
# The server refuses bounds without room between them, or outside of the segment.
NOT_BETWEEN = ("42P17", "42P16")
BEGUN = """status = 'copying', files = %(files)s::jsonb, cuts = %(cuts)s::jsonb, parts = %(parts)s,
       watermark = '[0, 0]', blocks = %(blocks)s, blocks_done = 0, rows = 0"""
LEFT_OUT = "status = 'left', note = %(note)s"
GONE = "segments of it are gone, or aren't sealed"
WASTE = """
SELECT bytes_before - bytes_expected >= %(share)s * bytes_before FROM roir.compaction_unit WHERE id = %(unit)s
"""


@dataclass(frozen=True)
class Edges:
    """The bounds of a unit's segments together; None is unbounded. default: it is the segment of NULLs."""

    lower: Bound | None
    upper: Bound | None
    default: bool


def begin(database: Database, job: Job, worker: int, claim: UnitClaim, report: Callable[[str], None]) -> bool:
    """Captures a unit's segments and creates the new ones. False if it leaves the unit out.

    A unit is left out if its segments are gone, couldn't be swapped, or can't be split. Writers of these segments wait
    for the milliseconds of one transaction, readers don't. Raises LockNotAcquired, OperationPaused, Fenced.
    """
    with database.transaction() as connection:
        execute(connection, f"SET LOCAL lock_timeout = {database.limits.table_lock_ms}")
        cuts = _cuts(connection, job, claim)
    names = [physical.segment(claim.generation_id, ordinal) for ordinal in claim.segments]

    def leave_out(connection: Connection, note: str) -> bool:
        UNITS.commit(connection, job.run, worker, claim, LEFT_OUT, {"note": note}, "p.status = 'waiting'")
        return False

    def body(connection: Connection) -> bool:
        read_running(connection, job.run)
        if not UNITS.is_held(connection, job.run, claim):
            raise UNITS.fenced(job.run, worker, claim)
        edges = _edges(connection, claim)
        if edges is None:
            return leave_out(connection, GONE)
        oids = oids_of(connection, names)
        if found := obstacles.obstacle(connection, claim, job.entry, oids):
            return leave_out(connection, found)
        kept = execute(connection, KEPT, {"oid": oids[0]}).one()
        execute(connection, copying.IN_TABLESPACE, {"name": kept.tablespace})
        made = _create(connection, claim, job.entry, edges, cuts, kept.settings)
        if len(claim.parts) > 1 and not made and not _wastes(connection, claim):
            # Otherwise each compaction would copy a segment of one key, which is always too big, for nothing.
            undo.drop(connection, claim.generation_id, claim.id)
            return leave_out(connection, FEW_KEYS)
        attempts.lock(connection, by_oid(connection, names), "SHARE ROW EXCLUSIVE")
        capture.install(connection, claim, job.entry, names)
        oids = oids_of(connection, names)
        by_relation = {file.relation: file for file in files_of(connection, oids)}
        files = [by_relation[oid] for oid in oids]
        values = {
            "files": to_json([[one.relation, one.filenode, one.blocks] for one in files]),
            "cuts": to_json([list(one) for one in made]),
            "parts": list(claim.parts[: len(made) + 1]),
            "blocks": sum(one.blocks for one in files),
        }
        UNITS.commit(connection, job.run, worker, claim, BEGUN, values, "p.status = 'waiting'", "false")
        return True

    with database.transaction() as connection:
        relations = oids_of(connection, names)
    what = f"segments {', '.join(names)}"
    attempts = Attempts(
        database, what, relations, int(job.options["lock_timeout_ms"]), float(job.options["lock_patience_s"])
    )
    return attempts.run(body, report)


def by_oid(connection: Connection, names: Sequence[str]) -> list[str]:
    """The names of relations in the order of their oids, in which a TRUNCATE of the source locks the segments."""
    query = "SELECT n FROM unnest(%(names)s::text[]) n ORDER BY to_regclass(n)::oid"
    return list(execute(connection, query, {"names": list(names)}).scalars())


def oids_of(connection: Connection, names: Sequence[str]) -> list[int]:
    """The oids of those relations that exist, in the order of the names."""
    query = "SELECT to_regclass(n)::oid::bigint FROM unnest(%(names)s::text[]) WITH ORDINALITY x (n, i) ORDER BY i"
    return [oid for oid in execute(connection, query, {"names": list(names)}).scalars() if oid is not None]


def _wastes(connection: Connection, claim: UnitClaim) -> bool:
    """True if the unit's segment wastes enough to be rewritten as one, by the figures of its choice."""
    return bool(execute(connection, WASTE, {"share": LEAST_WASTE, "unit": claim.id}).scalar_one())


def _edges(connection: Connection, claim: UnitClaim) -> Edges | None:
    rows = execute(connection, SEGMENTS, {"ordinals": list(claim.segments), "generation": claim.generation_id}).all()
    names = [physical.segment(claim.generation_id, ordinal) for ordinal in claim.segments]
    if len(rows) != len(claim.segments) or len(oids_of(connection, names)) != len(names):
        return None
    if any(a.upper != b.lower or a.upper is None for a, b in pairwise(rows)):
        return None
    lower, upper = (None if value is None else tuple(value) for value in (rows[0].lower, rows[-1].upper))
    return Edges(lower, upper, claim.segments[0] == physical.DEFAULT_SEGMENT)


def _create(
    connection: Connection,
    claim: UnitClaim,
    entry: Entry,
    edges: Edges,
    cuts: Sequence[Sequence[Bound]],
    settings: str | None,
) -> tuple[Bound, ...]:
    """Creates the new segments, as partitions of a table of their own; returns the bounds between them.

    cuts: candidates, the best first; the first that the server accepts counts, else none. settings: storage parameters,
    as SQL.
    """
    partition_by = ", ".join(entry.physical(range(entry.partition)))
    execute(connection, f"CREATE TABLE {claim.beside} ({entry.definitions()}) PARTITION BY RANGE ({partition_by})")
    made: tuple[Bound, ...] = ()
    if edges.default:
        physical.create_default_segment(connection, claim.part(0), claim.beside, entry)
    else:
        for wanted in (*cuts, ()):
            try:
                with connection.begin_nested():
                    between = [edges.lower, *wanted, edges.upper]
                    for place, (lower, upper) in enumerate(pairwise(between)):
                        physical.create_segment(connection, claim.part(place), claim.beside, entry, lower, upper)
            except DBAPIError as error:
                if sqlstate(error) not in NOT_BETWEEN or not wanted:
                    raise
                continue
            made = tuple(tuple(bound) for bound in wanted)
            break
    parts = [claim.part(place) for place in range(len(made) + 1)]
    stores = [claim.beside, *parts]
    execute(connection, "SELECT roir.leave_statistics_out(%(stores)s::text[]::regclass[]::oid[])", {"stores": stores})
    for name in parts:
        execute(connection, f"ALTER TABLE {name} REPLICA IDENTITY FULL")
        if settings:
            execute(connection, f"ALTER TABLE {name} SET ({settings})")
        # An attach needs this CHECK, or it reads the whole table under its lock.
        bounds = execute(connection, "SELECT pg_get_partition_constraintdef(to_regclass(%(name)s))", {"name": name})
        if not edges.default and (constraint := bounds.scalar_one()):
            execute(connection, f"ALTER TABLE {name} ADD CONSTRAINT roir_bounds CHECK ({constraint})")
    rights.take_back(connection, stores)
    return made


def _cuts(connection: Connection, job: Job, claim: UnitClaim) -> list[list[Bound]]:
    """The bounds that cut a segment into about equal parts, by one column, by two, …; from a sample of its blocks."""
    entry = job.entry
    if len(claim.parts) == 1:
        return []
    if obstacles.others_domain(connection, claim.generation_id, entry):
        # Our role would read the bounds from text, and run that domain's checks.
        return []
    name = physical.segment(claim.generation_id, claim.segments[0])
    if not (oids := oids_of(connection, [name])):
        return []
    [file] = files_of(connection, oids)
    share = min(1.0, limits_of(connection).sample_blocks * len(claim.parts) / max(file.blocks, 1))
    sample = "" if share >= 0.5 else f"TABLESAMPLE SYSTEM ({share * 100:.6f})"
    found = []
    for width in range(1, entry.partition + 1):
        columns = ", ".join(entry.physical(range(width), prefix="s."))
        texts = ", ".join(text(entry.columns[i], f"s.c{i + 1}") for i in range(width))
        query = f"SELECT {texts}, count(*) FROM ONLY {name} s {sample} GROUP BY {columns} ORDER BY {columns}"
        values = [(tuple(row)[:width], int(row[width])) for row in execute(connection, query)]
        bounds, largest = cut(values, len(claim.parts))
        found.append((largest, bounds))
        if largest <= 1.5 * sum(count for _, count in values) / len(claim.parts):
            break
    # The most even first.
    return [bounds for _, bounds in sorted(found, key=lambda one: one[0]) if bounds]
