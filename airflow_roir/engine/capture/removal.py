"""The removal of an entry: a DELETE whose plan is kept, straight from the segment that the entry lies in.

A plan of a DELETE from the partitioned base isn't kept: it would lock all segments. So the text has one statement for
each segment, and the segments' bounds choose among them. The bounds are a guess that needs no proof: what isn't found
there is looked for in the whole base.
"""

from __future__ import annotations

from airflow_roir.engine import generation as physical
from airflow_roir.engine.capture.plpgsql import indent, literal
from airflow_roir.engine.capture.target import Target
from airflow_roir.engine.entry import Entry, is_null
from airflow_roir.engine.plan import Bound

# Types of keys whose text means the same value whatever a user's session is set to, and is refused by none: not so an
# enum's label, which may be renamed, or money.
PLAIN_TYPES = frozenset(
    (
        *("smallint", "integer", "bigint", "oid", "numeric", "real", "double precision", "boolean", "uuid"),
        *("text", "character varying", "bpchar", "bytea"),
        *("date", "timestamp without time zone", "timestamp with time zone"),
    )
)
# Each session parses the text, and keeps a plan of 16 kB for each segment that it has removed entries from.
MOST_SEGMENTS, LONGEST_BOUND = 64, 100


def take_out(target: Target, record: str) -> list[str]:
    """Remove the entry of a record from the base. record: OLD, or what is rarely removed."""
    entry, base = target.entry, physical.base(target.generation_id)
    # Nothing there, or only nothing that this snapshot sees: an insert tells, it raises 40001 at what it can't see.
    identity = ", ".join(entry.physical(entry.identity_positions))
    values = ", ".join(entry.source_columns(record)[: entry.identity])
    guessed = _bounds(target) if record == "OLD" else None
    return [
        *(delete(entry, base, record) if guessed is None else _by_segment(target, guessed, record)),
        *([] if guessed is not None else [_COUNT]),
        "IF found_entries = 0 AND one_snapshot THEN",
        f"  INSERT INTO {base} ({identity}) VALUES ({values}) ON CONFLICT ({identity}) DO NOTHING;",
        *indent(delete(entry, base, record)),
        "END IF;",
    ]


_COUNT = "GET DIAGNOSTICS found_entries = ROW_COUNT;"


def delete(entry: Entry, table: str, record: str) -> list[str]:
    """Delete the entry of a record by its own equality. Only an entry with a NULL in it pays for a dynamic plan."""
    return _unless_null(entry, table, record, [_delete(entry, table, record)])


def _by_segment(target: Target, bounds: tuple[Bound, ...], record: str) -> list[str]:
    entry, base = target.entry, physical.base(target.generation_id)
    known = [
        *_choose(target, bounds, record, 0, len(bounds) + 1),
        _COUNT,
        "IF found_entries = 0 THEN",
        f"  {_delete(entry, base, record)}",
        f"  {_COUNT}",
        "END IF;",
    ]
    return _unless_null(entry, base, record, known, [_COUNT])


def _choose(target: Target, bounds: tuple[Bound, ...], record: str, first: int, end: int) -> list[str]:
    """A binary search among the segments from `first` to before `end`, the first of all being 0."""
    if end - first == 1:
        return [_delete(target.entry, physical.segment(target.generation_id, first + 1), record)]
    middle = (first + end) // 2
    return [
        f"IF {_is_below(target.entry, record, bounds[middle - 1])} THEN",
        *indent(_choose(target, bounds, record, first, middle)),
        "ELSE",
        *indent(_choose(target, bounds, record, middle, end)),
        "END IF;",
    ]


def _is_below(entry: Entry, record: str, bound: Bound) -> str:
    values = [column.of(record) for column in entry.columns[: len(bound)]]
    # Read as strings are under any setting of standard_conforming_strings.
    texts = ["E" + literal(text.replace("\\", "\\\\")) for text in bound]
    if len(bound) == 1:
        return f"{values[0]} OPERATOR(pg_catalog.<) {texts[0]}"
    return f"ROW({', '.join(values)}) OPERATOR(pg_catalog.<) ROW({', '.join(texts)})"


def _bounds(target: Target) -> tuple[Bound, ...] | None:
    """The bounds between the segments, where removals can go by them."""
    bounds = target.bounds
    if bounds is None or len(bounds) >= MOST_SEGMENTS:
        return None
    cut_by = target.entry.columns[: target.entry.partition]
    if bounds and not all(column.cast in PLAIN_TYPES for column in cut_by):
        return None
    return bounds if all(len(text) <= LONGEST_BOUND for bound in bounds for text in bound) else None


def _delete(entry: Entry, table: str, record: str) -> str:
    """The statement for an entry without a NULL."""
    values = [entry.columns[i].of(record) for i in entry.identity_positions]
    same = entry.same(entry.physical(), values, dict.fromkeys(entry.nullable_positions, False))
    return f"DELETE FROM {table} WHERE {same};"


def _unless_null(
    entry: Entry, table: str, record: str, known: list[str], after_dynamic: list[str] | None = None
) -> list[str]:
    """`known` where no column of the entry is NULL, else a dynamic DELETE."""
    values = [entry.columns[i].of(record) for i in entry.identity_positions]
    names, nullable = entry.physical(), entry.nullable_positions
    if not nullable:
        return known
    any_null = " OR ".join(is_null(values[i]) for i in nullable)
    terms = []
    for i in entry.identity_positions:
        null, equal = (
            literal(entry.same_column(i, names[i], entry.columns[i].parameter(i + 1), null)) for null in (True, False)
        )
        terms.append(f"CASE WHEN {is_null(values[i])} THEN {null} ELSE {equal} END" if i in nullable else equal)
    joined = " || ' AND ' || ".join(terms)
    return [
        f"IF {any_null} THEN",
        f"  EXECUTE 'DELETE FROM {table} WHERE ' || {joined}",
        f"    USING {', '.join(values)};",
        *indent(after_dynamic or []),
        "ELSE",
        *indent(known),
        "END IF;",
    ]
