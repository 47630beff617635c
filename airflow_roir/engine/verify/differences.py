"""The SQL that compares rows and entries one by one, each row and its entry in one statement, so in one snapshot.

So a concurrent write can make a bucket of `hashes.py` suspicious, but never causes a discrepancy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from airflow_roir.definition import argument
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry, is_null
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.verify import hashes
from airflow_roir.entry_state import EntryState

# A lookup has an arm for each pattern of NULLs in the key, since only such an arm can use the index. With more nullable
# columns the statement would be too long.
MOST_NULLABLE = 4
# Characters of an included value that a discrepancy keeps: a lost segment makes a discrepancy of each of its entries.
MOST_KEPT = 1_000


# Rows `s` of a {leaf} beside their entries `e`. {columns}, {e_columns}: all columns of each.
MISSING_OR_DIFFERENT = """
SELECT {columns}, {other} AS other, NULL::text AS detail,
       CASE WHEN e.present IS NOT TRUE THEN 'missing'
            WHEN ROW({columns})::record *<> ROW({e_columns})::record THEN 'different' END AS kind
  FROM (SELECT {values} FROM {leaf} r WHERE {where}) s
  LEFT JOIN LATERAL ({lookup}) e ON true
"""
# In a unique index also beside the entry `h` of another row that has the key, if there is one. {has_row}: true if `o`
# is that row.
MISSING_DIFFERENT_OR_DUPLICATE = """
SELECT {columns}, CASE WHEN h.present THEN {holder} ELSE {other} END AS other,
       CASE WHEN h.present THEN {duplicate} END AS detail,
       CASE WHEN e.present IS NOT TRUE THEN CASE WHEN h.present THEN 'duplicate' ELSE 'missing' END
            WHEN ROW({columns})::record *<> ROW({e_columns})::record THEN 'different' END AS kind
  FROM (SELECT {values} FROM {leaf} r WHERE {where}) s
  LEFT JOIN LATERAL ({lookup}) e ON true
  LEFT JOIN LATERAL (SELECT * FROM ({holders}) h
                      WHERE e.present IS NOT TRUE AND EXISTS (SELECT FROM {source} o WHERE {has_row})
                      LIMIT 1) h ON true
"""
# The delta overrides the base (I3). Ghosts don't count.
IN_DELTA_OR_BASE = """
SELECT * FROM (SELECT 1 AS place, d.* FROM ({delta}) d UNION ALL SELECT 2, e.* FROM ({base}) e) x
 ORDER BY place LIMIT 1
"""


def missing_or_different(
    source: Source, entry: Entry, generation_id: int, leaf: str, where: str, with_delta: bool, index: str
) -> tuple[str, str]:
    """Source rows without their entry, or with a different one; see `recorded`. where: over the leaf, alias `r`.

    In a unique index a row is a duplicate if the entry of its key belongs to another row.
    """
    base = lookup(entry, physical.base(generation_id), "true AS present")
    stores = [physical.base(generation_id)]
    if with_delta:
        delta_of = f"(SELECT * FROM {physical.delta(generation_id)} WHERE state"
        delta = lookup(
            entry,
            f"{delta_of} <> '{EntryState.GHOST.value}')",
            f"b.state = '{EntryState.REGULAR.value}' AS present",
        )
        stores.append(f"{delta_of} = '{EntryState.REGULAR.value}')")
        base = IN_DELTA_OR_BASE.strip().format(delta=delta, base=base)
    parts = {
        "columns": ", ".join(entry.physical(prefix="s.")),
        "e_columns": ", ".join(entry.physical(prefix="e.")),
        "values": ", ".join(f"{value} AS c{i + 1}" for i, value in enumerate(hashes.of_source(entry, "r"))),
        "leaf": leaf,
        "where": where + entry.and_satisfied("r"),
        "lookup": base,
        "other": texts(entry, "e."),
    }
    compared = MISSING_OR_DIFFERENT.format(**parts)
    if entry.enforced:
        compared = MISSING_DIFFERENT_OR_DUPLICATE.format(
            **parts,
            holders=" UNION ALL ".join(holders(entry, store, "true AS present") for store in stores),
            source=source.sql,
            has_row=entry.has_row("o", "h."),
            holder=texts(entry, "h."),
            duplicate=duplicate_of(entry, "h.", index),
        )
    return recorded(entry, compared, ours="source_values", theirs="CASE WHEN kind <> 'missing' THEN other END")


def holders(entry: Entry, table: str, first: str) -> str:
    """SELECT of the entries that have the key of the outer row `s` and another primary key; as `lookup`.

    For unique indexes, and by them: one table has at most one such entry.
    """
    apart = entry.apart_positions
    nullable = [i for i in entry.nullable_positions if i in entry.key_positions and i not in apart][:MOST_NULLABLE]
    ours = " AND ".join(entry.same_column(i, f"b.c{i + 1}", f"s.c{i + 1}", False) for i in entry.rest_positions)
    arms = []
    for pattern in product((False, True), repeat=len(nullable)):
        nulls = dict(zip(nullable, pattern, strict=True)) | dict.fromkeys(apart, False)
        key = [entry.same_column(i, f"b.c{i + 1}", f"s.c{i + 1}", nulls.get(i)) for i in entry.key_positions]
        key += [is_null(f"s.c{i + 1}") for i, null in nulls.items() if null]
        columns = ", ".join(entry.physical(prefix="b."))
        arms.append(f"SELECT {first}, {columns} FROM {table} b WHERE {' AND '.join(key)} AND ({ours}) IS NOT TRUE")
    return " UNION ALL ".join(arms)


def duplicate_of(entry: Entry, prefix: str, index: str) -> str:
    """SQL for the text about a row whose key another row has. prefix: `alias.` of the other row's identity."""
    # Names can have a per cent sign, which psycopg2 would take for a placeholder.
    said, parts = "row ", []
    for i in entry.identity_positions:
        if entry.columns[i].primary_key:
            parts += [said + entry.columns[i].source + " ", hashes.text(entry.columns[i], f"{prefix}c{i + 1}")]
            said = ", "
    parts.append(
        " has this key, too. Change or delete rows until no two share a key, then: "
        f"roir verify {argument(index)} --repair"
    )
    literals = [literal(part).replace("%", "' || chr(37) || '") if n % 2 == 0 else part for n, part in enumerate(parts)]
    return f"({' || '.join(f'({part})' for part in literals)})"


def extra(
    source: Source,
    entry: Entry,
    generation_id: int,
    relation: str,
    where: str,
    with_delta: bool,
    itself: str | None = None,
    remedy: str = "",
) -> tuple[str, str]:
    """Entries that no source row projects to; see `recorded`. where: over the relation, alias `x`.

    An entry with the key of another version of its row is extra, too; the comparison from the source's side looks for
    the version itself. An entry that the delta overrides is judged in the delta. itself: SELECT whether a lookup leads
    to entry `s`; if it doesn't, that is damage, which a repair by lookups can't repair. remedy: what the user can do.
    """
    overridden = ""
    kinds = f"WHEN e.present IS NULL {'AND o.present IS NULL' if with_delta else ''} THEN 'extra'"
    detail = "NULL::text"
    if itself is not None:
        kinds = f"WHEN i.itself IS NOT TRUE THEN 'damaged' {kinds}"
        said = literal(
            f"{relation}: its B-tree leads to another entry of the same key and primary key, or to none. {remedy}"
        )
        detail = f"CASE WHEN i.itself IS NOT TRUE THEN {said} END"
    if with_delta:
        delta = lookup(
            entry,
            f"(SELECT * FROM {physical.delta(generation_id)} WHERE state <> '{EntryState.GHOST.value}')",
            "true AS present",
        )
        overridden = f"LEFT JOIN LATERAL ({delta}) o ON true"
    return recorded(
        entry,
        f"""
        SELECT {", ".join(entry.physical(prefix="s."))}, NULL::jsonb AS other, {detail} AS detail,
               CASE {kinds} END AS kind
          FROM (SELECT x.*, x.tableoid AS place, x.ctid AS tid FROM {relation} x WHERE {where}) s
          LEFT JOIN LATERAL (SELECT true AS present FROM {source.sql} r WHERE {entry.has_row("r", "s.")} LIMIT 1) e
            ON true {overridden}
          {f"LEFT JOIN LATERAL ({itself}) i ON true" if itself is not None else ""}""",
        ours="entry_values",
        theirs="",
    )


# The columns of a comparison, as a column definition list.
COMPARED = "kind text, detail text, key jsonb, primary_key jsonb, looked_at jsonb, other jsonb"
SUMMED = "buckets int[], counts bigint[], sums numeric[], rows bigint"


def recorded(entry: Entry, compared: str, ours: str, theirs: str) -> tuple[str, str]:
    """The query that compares, and the statement that writes its differences down; `{compared}` is the query's place.

    It is one statement, so one snapshot; it returns how many it read and how many differ.

    `compared` has the columns of the side that is read, `other` (the other side's, as JSON), the kind of difference,
    and `detail`. A damaged row is written down once.
    """
    primary_key = [i for i in entry.identity_positions if entry.columns[i].primary_key]
    columns = f"kind, key, primary_key, {ours}" + (
        ", " + ("entry_values" if ours == "source_values" else "source_values") if theirs else ""
    )
    around = f"""
    WITH compared AS MATERIALIZED (SELECT * FROM {{compared}}), written AS (
        INSERT INTO roir.discrepancy (verification_id, unit_id, detail, {columns})
        SELECT %(verification)s, %(unit)s, detail, kind, key, primary_key, looked_at{", " + theirs if theirs else ""}
          FROM compared c WHERE kind IS NOT NULL AND (kind <> 'damaged' OR NOT EXISTS (
               SELECT FROM roir.discrepancy d WHERE d.verification_id = %(verification)s AND d.kind = 'damaged'
                  AND d.key = c.key AND d.primary_key = c.primary_key AND d.detail = c.detail))
    )
    SELECT count(*) AS rows, count(kind) AS found FROM compared"""
    query = f"""
        SELECT kind, detail, CASE WHEN kind IS NOT NULL THEN {texts(entry, "c.", range(entry.key))} END AS key,
               CASE WHEN kind IS NOT NULL THEN {texts(entry, "c.", primary_key)} END AS primary_key,
               CASE WHEN kind IS NOT NULL THEN {texts(entry, "c.")} END AS looked_at,
               CASE WHEN kind IS NOT NULL THEN other END AS other
          FROM ({compared}) c"""
    return query, around


def literal(said: str) -> str:
    """The text as an SQL literal."""
    return "'" + said.replace("'", "''") + "'"


def texts(entry: Entry, prefix: str, positions: Sequence[int] | None = None) -> str:
    """SQL for a JSON array of lossless texts. Unlike jsonb_build_array, an array takes any number of columns."""
    chosen = range(len(entry.columns)) if positions is None else positions
    listed = ", ".join(
        hashes.text(entry.columns[i], f"{prefix}c{i + 1}")
        if i < entry.identity
        else f"left({hashes.text(entry.columns[i], f'{prefix}c{i + 1}')}, {MOST_KEPT})"
        for i in chosen
    )
    return f"to_jsonb(ARRAY[{listed}]::text[])"


def lookup(entry: Entry, table: str, first: str) -> str:
    """SELECT, by index, of the entry with the identity of the outer row `s`: `first`, then all its columns."""
    # For more nullable columns no pattern is needed: by the columns before them the index finds few entries.
    nullable = entry.nullable_positions[:MOST_NULLABLE]
    head = f"SELECT {first}, {', '.join(entry.physical(prefix='b.'))} FROM {table} b WHERE "
    arms = []
    for pattern in product((False, True), repeat=len(nullable)):
        nulls = dict(zip(nullable, pattern, strict=True))
        of_this_pattern = [is_null(f"s.c{i + 1}") for i, null in nulls.items() if null]
        arms.append(head + " AND ".join([entry.equal("b.", "s.", nulls), *of_this_pattern]))
    return " UNION ALL ".join(arms) + " LIMIT 1"
