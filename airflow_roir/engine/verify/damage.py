"""Damage: heap and index of a table disagree, so that a lookup doesn't find a row, or finds several.

A lookup can't notice that it misses something. So a row or entry that was read from its heap is looked up by the index
of its own identity, in one statement and so in one snapshot: a sound index leads to that row and to no other, even
under writers. If the sums of both sides come from one snapshot, both are compared once more without any index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from airflow_roir.definition import argument
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.verify import differences, hashes
from airflow_roir.entry_state import EntryState

# The most primary keys that one comparison names, in case a table is damaged all over.
MOST_NAMED = 1_000
BY_INDEX = (
    # A scan of a range of row addresses is still possible. All else uses an index, however small the table is.
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"
)
WITHOUT_INDEX = (
    "SET LOCAL enable_seqscan = on; SET LOCAL enable_indexscan = off; SET LOCAL enable_indexonlyscan = off; "
    "SET LOCAL enable_bitmapscan = off; SET LOCAL enable_nestloop = off"
)


def remedy_of_source(source: Source) -> str:
    """The remedy for a damaged source, for the user."""
    return (
        f"Leave one row of each primary key in {source.name}, found without its index (SET enable_indexscan = off; SET "
        f"enable_bitmapscan = off; SET enable_indexonlyscan = off), then REINDEX TABLE {source.name}, then verify again"
    )


def remedy_of_entries(index: str) -> str:
    """The remedy for damaged entries, for the user."""
    return f"Rebuild the index from its table: roir build {argument(index)}"


def itself(entry: Entry, table: str) -> str:
    """SELECT whether the lookup of entry `s` by its identity in these entries leads to that very entry."""
    found = differences.lookup(entry, table, "b.tableoid AS place, b.ctid AS tid")
    return f"SELECT e.place = s.place AND e.tid = s.tid AS itself FROM ({found}) e"


def unreachable_rows(source: Source, entry: Entry, leaf: str, where: str) -> tuple[str, str]:
    """Rows of a leaf that its primary key doesn't lead to, as `differences.recorded`. where: over it, alias `r`."""
    values = ", ".join(f"{value} AS c{i + 1}" for i, value in enumerate(hashes.of_source(entry, "r")))
    same = " AND ".join(
        f"{entry.columns[i].of('o')} {entry.columns[i].equals} s.c{i + 1}"
        for i in entry.identity_positions
        if entry.columns[i].primary_key
    )
    unreachable, several = (
        differences.literal(f"{leaf}: {seen}. {remedy_of_source(source)}")
        for seen in ("the primary key's index doesn't lead to this row", "several rows have this primary key")
    )
    return differences.recorded(
        entry,
        f"""
        SELECT {", ".join(entry.physical(prefix="s."))}, NULL::jsonb AS other,
               CASE WHEN f.found = 1 AND f.itself THEN NULL ELSE 'damaged' END AS kind,
               CASE WHEN f.found = 0 THEN {unreachable} ELSE {several} END AS detail
          FROM (SELECT {values}, r.ctid AS tid FROM {leaf} r WHERE {where}) s
         CROSS JOIN LATERAL (SELECT count(*) AS found, coalesce(bool_or(o.ctid = s.tid), false) AS itself
                               FROM {leaf} o WHERE {same}) f""",
        ours="source_values",
        theirs="",
    )


# The number of entries in a segment's heap, and of those that its B-tree leads to, in one statement.
COUNTS = """
SELECT (SELECT count(*) FROM {segment} x WHERE x.ctid >= '(0,0)'::tid) AS heap, (SELECT count(*) FROM {segment}) AS tree
"""


def mistaken(source: Source, base: str, entry: Entry, index: str) -> Iterator[tuple[str, str, str, str]]:
    """The searches, without indexes, for the other side of discrepancies that lookups called missing or extra.

    If the row or the entry exists but a lookup doesn't find it, that is damage, and a repair that adds or removes
    entries would make it worse. Yields the recorded kind, the table of the other side, the condition for its row `x`
    and the identity `s`, and the text for those that exist.
    """
    sides = (
        ("missing", base, entry.equal("x.", "s."), "its entry exists, but the B-tree doesn't lead to it",
         remedy_of_entries(index)),
        ("extra", source.sql, entry.has_row("x", "s."),
         "its row exists, but the primary key's index doesn't lead to it", remedy_of_source(source)),
    )  # fmt: skip
    for kind, table, same, seen, remedy in sides:
        yield kind, table, same, f"{table}: {seen}. {remedy}"


# All rows (side 1) and all entries (side -1), `b`, with their hash.
BOTH_SIDES = """
SELECT b.*, {hashed} AS hash
  FROM (SELECT 1 AS side, {rows} FROM {source} r WHERE {satisfied}
        UNION ALL
        SELECT -1, {columns} FROM ({entries}) y) b
"""
# {shown}: true if an entry `x` isn't hidden.
ENTRIES = "SELECT {columns} FROM {base} x WHERE {shown}"
# The delta overrides the base (I3). {same}: of `x` and `d`.
ENTRIES_WITH_DELTA = """
SELECT {columns} FROM {base} x
 WHERE {shown} AND NOT EXISTS (SELECT FROM {delta} d WHERE d.state <> '{ghost}' AND {same})
UNION ALL
SELECT {columns} FROM {delta} x WHERE x.state = '{regular}' AND {shown}
"""
# {both}: by `both_sides`.
BUCKETS = """
SELECT {bucket} AS bucket FROM ({both}) b GROUP BY 1
HAVING sum(b.side) <> 0 OR sum(b.side * b.hash::numeric) <> 0
"""
ROWS_OF_BUCKETS = """
SELECT {primary_key} AS primary_key, (array_agg({key} ORDER BY b.side DESC))[1] AS key,
       count(*) FILTER (WHERE b.side = 1) AS rows, count(*) FILTER (WHERE b.side = -1) AS entries
  FROM ({both}) b WHERE {bucket} = ANY ('{{{chosen}}}'::int[])
 GROUP BY 1 HAVING sum(b.side) <> 0 OR sum(b.side * b.hash::numeric) <> 0
 ORDER BY 1 LIMIT {most}
"""
# The columns that the last two return, as column definition lists.
DIFFERING_BUCKETS = "bucket int"
DIFFERING_ROWS = "primary_key jsonb, key jsonb, rows bigint, entries bigint"


def both_sides(source: Source, entry: Entry, generation_id: int, shown: str, with_delta: bool, newer: bool) -> str:
    """SELECT of all rows (side 1) and of all entries (side -1), with their hash."""
    columns = ", ".join(entry.physical())
    entries = (ENTRIES_WITH_DELTA if with_delta else ENTRIES).strip()
    return BOTH_SIDES.strip().format(
        hashed=hashes.row_hash(entry, entry.physical(prefix="b."), newer),
        rows=", ".join(f"{value} AS c{i + 1}" for i, value in enumerate(hashes.of_source(entry, "r"))),
        source=source.sql,
        satisfied=entry.satisfied("r"),
        columns=columns,
        entries=entries.format(
            columns=columns,
            base=physical.base(generation_id),
            delta=physical.delta(generation_id),
            shown=shown,
            same=entry.equal("x.", "d."),
            ghost=EntryState.GHOST.value,
            regular=EntryState.REGULAR.value,
        ),
    )


def differing_buckets(both: str, entry: Entry, buckets: int) -> str:
    """SELECT of the buckets whose rows and entries differ."""
    return BUCKETS.strip().format(bucket=hashes.bucket(entry, entry.physical(prefix="b."), buckets), both=both)


def differing_rows(both: str, entry: Entry, buckets: int, chosen: Sequence[int]) -> str:
    """SELECT of the primary keys in these buckets whose rows and entries differ, with the number of each."""
    primary_key = [i for i in entry.identity_positions if entry.columns[i].primary_key]
    return ROWS_OF_BUCKETS.strip().format(
        primary_key=differences.texts(entry, "b.", primary_key),
        key=differences.texts(entry, "b.", range(entry.key)),
        both=both,
        bucket=hashes.bucket(entry, entry.physical(prefix="b."), buckets),
        chosen=",".join(map(str, chosen)),
        most=MOST_NAMED,
    )
