"""SQL that finds live entries that share a key of a unique index: by known keys, in a segment, by hashes."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_roir.engine.control.job import Job
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry, is_null
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState

REGULAR = f"state = '{EntryState.REGULAR.value}'"


# {live}: a relation of live entries `x`. {key}, {primary_key}: texts of `l`; {l_columns}, {columns}: the key's columns.
SHARING = """
SELECT min({key}::text) OVER (PARTITION BY {l_columns})::jsonb AS shared_key, {key} AS key,
       {primary_key} AS primary_key
  FROM (SELECT *, count(*) OVER (PARTITION BY {columns}) AS sharing FROM {live} x) l
 WHERE l.sharing > 1
"""

# In the next four, {identity} is the identity of `x`; {same} is true if entries `x` and `t` are the same, {has_key} if
# `x` has the key of `k`; {seen} is empty or ' AND …', true if `x` isn't hidden. Live entries are those of the base that
# the delta doesn't touch, and those of the delta that are regular.
MEMBERS = """
WITH candidate AS MATERIALIZED ({candidates}),
     live AS MATERIALIZED (
       SELECT {identity} FROM candidate k JOIN {base} x ON {has_key}
        WHERE NOT EXISTS (SELECT FROM {delta} t WHERE {same}){seen}
       UNION ALL
       SELECT {identity} FROM candidate k JOIN {delta} x ON {has_key} WHERE x.{regular}{seen})
{sharing}
"""
# {apart}: as {seen}, true if no column of the key is NULL that would make the entry differ from all others.
IN_SEGMENT = """
WITH live AS (
       SELECT x.* FROM {segment} x WHERE NOT EXISTS (SELECT FROM {delta} t WHERE {same}){apart}{seen})
{sharing}
"""
# The entries of some stretches of blocks whose keys have the hashes; {live}: by `LIVE_OF`, from `here`.
BY_HASH = """
WITH place AS MATERIALIZED (
       SELECT ('(' || b || ',0)')::tid AS low, ('(' || b + %(span)s || ',0)')::tid AS high
         FROM unnest(%(blocks)s::bigint[]) b),
     here AS MATERIALIZED (
       SELECT x.* FROM place p
        CROSS JOIN LATERAL (SELECT {identity} FROM ONLY {segment} x
                             WHERE x.ctid >= p.low AND x.ctid < p.high
                                   AND ({key_hash}) = ANY (%(hashes)s::int8[]){seen} OFFSET 0) x
        LIMIT %(most)s),
     live AS MATERIALIZED ({live})
{sharing}
"""
# {here}: entries of the base; the delta's regular ones of their keys ({columns}) come to them.
LIVE_OF = """
(SELECT {identity} FROM ({here}) x WHERE NOT EXISTS (SELECT FROM {delta} t WHERE {same}))
UNION ALL
(SELECT {identity} FROM (SELECT DISTINCT {columns} FROM ({here}) y) k JOIN {delta} x ON {has_key}
  WHERE x.{regular}{seen})
"""


def members_of(job: Job, candidates: str, pattern: str, shown: str | None) -> str:
    """SQL for the live entries that share one of the keys of `candidates`, with the columns of `sharing`.

    pattern: the NULLs that all these keys have. shown: from `visibility.shown`.
    """
    entry = job.entry
    nulls = {i: pattern[i] == "1" for i in entry.key_positions}
    return MEMBERS.format(
        **_parts(job, shown),
        candidates=candidates,
        base=physical.base(job.generation_id),
        has_key=_has_key(entry, nulls),
        same=entry.equal("x.", "t.", nulls),
        sharing=sharing(job.source, entry, "live"),
    )


def in_segment(job: Job, ordinal: int, shown: str | None) -> str:
    """As `members_of`, for all entries of a segment that the delta doesn't touch."""
    entry = job.entry
    return IN_SEGMENT.format(
        **_parts(job, shown),
        segment=physical.segment(job.generation_id, ordinal),
        same=entry.equal("x.", "t."),
        apart="".join(f" AND NOT ({is_null(f'x.c{i + 1}')})" for i in entry.apart_positions),
        sharing=sharing(job.source, entry, "live"),
    )


def sharing(source: Source, entry: Entry, live: str) -> str:
    """SQL for `shared_key`, `key` and `primary_key` of live entries that share a key: equal, maybe not identical."""
    return SHARING.strip().format(
        live=live,
        key=texts(entry, entry.key_positions, "l."),
        primary_key=primary_key(source, entry, "l."),
        l_columns=key_of(entry, "l."),
        columns=key_of(entry, ""),
    )


def by_hash(job: Job, ordinal: int, key_hash: str, shown: str | None) -> str:
    """As `members_of`, for the entries of a segment whose keys have some hashes, at most 10,000 rows."""
    entry, parts = job.entry, _parts(job, shown)
    nullable = [i for i in entry.nullable_positions if i < entry.key]
    whole = " AND ".join(["true", *(f"NOT {is_null(f'x.c{i + 1}')}" for i in nullable)])

    def live(here: str, nulls: dict[int, bool]) -> str:
        of_keys = {"columns": key_of(entry, ""), "has_key": _has_key(entry, nulls)}
        entries = f"SELECT {parts['identity']} FROM here x WHERE {here}"
        return LIVE_OF.strip().format(**parts, **of_keys, here=entries, same=entry.equal("t.", "x.", nulls))

    # Keys without a NULL use the delta's index. A key with a NULL has no hash, unless NULLs are the same.
    both = [live(whole, dict.fromkeys(entry.key_positions, False))]
    if nullable and not entry.apart_positions:
        both.append(live(f"NOT ({whole}) LIMIT 1000", {}))
    return BY_HASH.format(
        **parts,
        segment=physical.segment(job.generation_id, ordinal),
        key_hash=key_hash,
        live=" UNION ALL ".join(both),
        sharing=sharing(job.source, entry, "live"),
    )


def _parts(job: Job, shown: str | None) -> dict[str, str]:
    return {
        "delta": physical.delta(job.generation_id),
        "identity": ", ".join(job.entry.physical(job.entry.identity_positions, prefix="x.")),
        "regular": REGULAR,
        "seen": f" AND {shown}" if shown else "",
    }


def _has_key(entry: Entry, nulls: dict[int, bool]) -> str:
    """SQL, true if `x` has the key of `k`."""
    return " AND ".join(entry.same_column(i, f"x.c{i + 1}", f"k.c{i + 1}", nulls.get(i)) for i in entry.key_positions)


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
