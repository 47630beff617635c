"""SQL that finds live entries that share a key of a unique index: by known keys, in a segment, by hashes."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_roir.engine.control.job import Job
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry, is_null
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState

REGULAR = f"state = '{EntryState.REGULAR.value}'"


def members_of(job: Job, candidates: str, pattern: str, shown: str | None) -> str:
    """SQL for the live entries that share one of the keys of `candidates`, with the columns of `sharing`.

    pattern: the NULLs that all these keys have. shown: from `visibility.shown`.
    """
    entry = job.entry
    base, delta = physical.base(job.generation_id), physical.delta(job.generation_id)
    nulls = {i: pattern[i] == "1" for i in entry.key_positions}

    def has_key(prefix: str) -> str:
        return " AND ".join(
            entry.same_column(i, f"{prefix}c{i + 1}", f"k.c{i + 1}", nulls[i]) for i in entry.key_positions
        )

    of = ", ".join(entry.physical(entry.identity_positions, prefix="x."))
    seen = f" AND {shown}" if shown else ""
    live = (
        f"SELECT {of} FROM candidate k JOIN {base} x ON {has_key('x.')} "
        f"WHERE NOT EXISTS (SELECT FROM {delta} t WHERE {entry.equal('x.', 't.', nulls)}){seen} "
        f"UNION ALL SELECT {of} FROM candidate k JOIN {delta} x ON {has_key('x.')} WHERE x.{REGULAR}{seen}"
    )
    these = sharing(job.source, entry, "live")
    return f"WITH candidate AS MATERIALIZED ({candidates}), live AS MATERIALIZED ({live}) {these}"


def in_segment(job: Job, ordinal: int, shown: str | None) -> str:
    """As `members_of`, for all entries of a segment that the delta doesn't touch."""
    entry = job.entry
    name, delta = physical.segment(job.generation_id, ordinal), physical.delta(job.generation_id)
    apart = "".join(f" AND NOT ({is_null(f'x.c{i + 1}')})" for i in entry.apart_positions)
    apart += f" AND {shown}" if shown else ""
    these = sharing(job.source, entry, "live")
    return (
        f"WITH live AS (SELECT x.* FROM {name} x "
        f"WHERE NOT EXISTS (SELECT FROM {delta} t WHERE {entry.equal('x.', 't.')}){apart}) {these}"
    )


def sharing(source: Source, entry: Entry, live: str) -> str:
    """SQL for `shared_key`, `key` and `primary_key` of live entries that share a key: equal, maybe not identical."""
    key = texts(entry, entry.key_positions, "l.")
    return (
        f"SELECT min({key}::text) OVER (PARTITION BY {key_of(entry, 'l.')})::jsonb AS shared_key, {key} AS key, "
        f"{primary_key(source, entry, 'l.')} AS primary_key "
        f"FROM (SELECT *, count(*) OVER (PARTITION BY {key_of(entry, '')}) AS sharing FROM {live} x) l "
        "WHERE l.sharing > 1"
    )


def by_hash(job: Job, ordinal: int, key_hash: str, shown: str | None) -> str:
    """As `members_of`, for the entries of a segment whose keys have some hashes, at most 10,000 rows."""
    entry = job.entry
    of = ", ".join(entry.physical(entry.identity_positions, prefix="x."))
    nullable = [i for i in entry.nullable_positions if i < entry.key]
    whole = " AND ".join(["true", *(f"NOT {is_null(f'x.c{i + 1}')}" for i in nullable)])
    # Keys without a NULL use the delta's index. A key with a NULL has no hash, unless NULLs are the same.
    seen = f" AND {shown}" if shown else ""
    no_null = dict.fromkeys(entry.key_positions, False)
    live = [_live_of(job, f"SELECT {of} FROM here x WHERE {whole}", no_null, seen)]
    if nullable and not entry.apart_positions:
        live.append(_live_of(job, f"SELECT {of} FROM here x WHERE NOT ({whole}) LIMIT 1000", {}, seen))
    name = physical.segment(job.generation_id, ordinal)
    return (
        "WITH place AS MATERIALIZED (SELECT ('(' || b || ',0)')::tid AS low, "
        "('(' || b + %(span)s || ',0)')::tid AS high FROM unnest(%(blocks)s::bigint[]) b), "
        f"here AS MATERIALIZED (SELECT x.* FROM place p CROSS JOIN LATERAL (SELECT {of} FROM ONLY {name} x "
        f"WHERE x.ctid >= p.low AND x.ctid < p.high AND ({key_hash}) = ANY (%(hashes)s::int8[]){seen} OFFSET 0) x "
        f"LIMIT %(most)s), live AS MATERIALIZED ({' UNION ALL '.join(live)}) {sharing(job.source, entry, 'live')}"
    )


def _live_of(job: Job, here: str, nulls: dict[int, bool], seen: str) -> str:
    """SQL for the entries of the base that the delta doesn't touch, and for the delta's regular entries of their keys.

    seen: SQL, ' AND …', true if a row `x` isn't hidden.
    """
    entry, delta = job.entry, physical.delta(job.generation_id)
    of = ", ".join(entry.physical(entry.identity_positions, prefix="x."))
    same_key = " AND ".join(
        entry.same_column(i, f"x.c{i + 1}", f"k.c{i + 1}", nulls.get(i)) for i in entry.key_positions
    )
    return (
        f"(SELECT {of} FROM ({here}) x WHERE NOT EXISTS "
        f"(SELECT FROM {delta} t WHERE {entry.equal('t.', 'x.', nulls)})) "
        f"UNION ALL (SELECT {of} FROM (SELECT DISTINCT {key_of(entry, '')} FROM ({here}) y) k JOIN {delta} x "
        f"ON {same_key} WHERE x.{REGULAR}{seen})"
    )


def key_of(entry: Entry, prefix: str) -> str:
    """SQL for the columns of an entry's key."""
    return ", ".join(entry.physical(entry.key_positions, prefix=prefix))


def pattern_of(entry: Entry) -> str:
    """SQL for which columns of a delta row's key are NULL, as a string of 0s and 1s."""
    return entry.null_pattern(entry.key_positions, "d.")


def primary_key(source: Source, entry: Entry, prefix: str) -> str:
    """SQL for the texts of an entry's primary key, as a JSON array."""
    names = [column.source for column in entry.columns]
    return texts(entry, [names.index(name) for name in source.primary_key], prefix)


def texts(entry: Entry, positions: Sequence[int], prefix: str) -> str:
    """SQL for the lossless texts of columns, as a JSON array."""
    return f"jsonb_build_array({', '.join(_text(entry, i, prefix) for i in positions)})"


def _text(entry: Entry, i: int, prefix: str) -> str:
    column, name = entry.columns[i], f"{prefix}c{i + 1}"
    if column.oid_alias:
        return f"{name}::oid::text"
    # As `Column.text`, but a NULL stays a NULL.
    return f"CASE WHEN {is_null(name)} THEN NULL ELSE concat({name}) END" if "." in column.cast else f"{name}::text"
