"""Removes and updates an entry directly in its segment, with kept plans.

A plan of a DELETE from the partitioned base, or of an UPDATE, isn't kept: it would lock all segments. So the text has
one statement for each segment, and the segments' bounds choose among them. The bounds may be wrong: an entry that isn't
found in that segment is looked for in the whole base.
"""

from __future__ import annotations

from collections.abc import Callable

from airflow_roir.engine.capture.plpgsql import indent, literal
from airflow_roir.engine.capture.target import Target
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Bound
from airflow_roir.engine.generation.entry import Entry, is_null

# Types of keys whose text means the same value in every session, whatever its settings, and is always valid. An enum's
# label may be renamed, money depends on settings.
PLAIN_TYPES = frozenset(
    (
        *("smallint", "integer", "bigint", "oid", "numeric", "real", "double precision", "boolean", "uuid"),
        *("text", "character varying", "bpchar", "bytea"),
        *("date", "timestamp without time zone", "timestamp with time zone"),
    )
)
# Each session parses the text, and keeps a plan of some 20 kB for each segment that it has removed entries from.
MOST_SEGMENTS, LONGEST_BOUND = 64, 100
# An upsert has one plan for all segments. A session makes six plans of each segment's own statement before it keeps
# one: if it is short, or writes rarely, they cost more than they save.
MOST_UPDATED_SEGMENTS = 16


def take_out(target: Target, record: str) -> list[str]:
    """Removes the entry of a record from the base. record: OLD, or another one, whose entry is rarely removed."""
    entry, base = target.entry, physical.base(target.generation_id)
    # If no entry is found, this snapshot may only not see it. An insert shows that: it raises 40001 at such an entry.
    identity = ", ".join(entry.physical(entry.identity_positions))
    values = ", ".join(entry.source_columns(record)[: entry.identity])
    guessed = _bounds(target, MOST_SEGMENTS) if record == "OLD" else None
    arbiter = ", ".join(entry.physical(entry.key_positions)) if entry.enforced else identity
    probe = [f"INSERT INTO {base} ({identity}) VALUES ({values}) ON CONFLICT ({arbiter}) DO NOTHING;"]
    if entry.apart_positions:
        rest = physical.segment(target.generation_id, physical.DEFAULT_SEGMENT)
        probe = [
            f"IF {' OR '.join(is_null(entry.columns[i].of(record)) for i in entry.apart_positions)} THEN",
            f"  INSERT INTO {rest} ({identity}) VALUES ({values}) ON CONFLICT ({identity}) DO NOTHING;",
            "ELSE",
            *indent(probe),
            "END IF;",
        ]
    return [
        *(delete(entry, base, record) if guessed is None else _by_segment(target, guessed, record)),
        *([] if guessed is not None else [_COUNT]),
        "IF found_entries = 0 AND one_snapshot THEN",
        *indent(probe),
        *indent(delete(entry, base, record)),
        "END IF;",
    ]


def update_in_place(target: Target, put: list[str]) -> list[str]:
    """Writes the entry of NEW, whose (key, pk) is OLD's: by UPDATE if the entry exists, else by `put`.

    By `put` in a transaction with one snapshot: it raises 40001 at an invisible entry, and takes no predicate locks.
    """
    entry = target.entry
    # A unique index has no upsert: `put` tries an insert, reads the holder and updates, both planned each time.
    bounds = _bounds(target, MOST_SEGMENTS if entry.enforced else MOST_UPDATED_SEGMENTS)
    if not entry.included_positions or (bounds is None and not entry.enforced):
        return put
    values = zip(entry.physical(), entry.source_columns("NEW"), strict=True)
    assigned = ", ".join(f"{name} = {value}" for name, value in values)

    def update(segment: str) -> str:
        return f"UPDATE {segment} SET {assigned} WHERE {_same(entry, 'NEW')};"

    by_update = (
        [update(physical.base(target.generation_id))]
        if bounds is None
        else _choose(target, bounds, "NEW", update, 0, len(bounds) + 1)
    )
    elsewhere = " OR ".join(["one_snapshot", *(["new_null"] if entry.nullable_positions else [])])
    return [
        f"IF {elsewhere} THEN",
        "  found_entries := 0;",
        "ELSE",
        *indent(by_update),
        f"  {_COUNT}",
        "END IF;",
        "IF found_entries = 0 THEN",
        *indent(put),
        "END IF;",
    ]


def set_null(entry: Entry, record: str) -> list[str]:
    """Sets `old_null` or `new_null`: true if a record's entry has a NULL, whose removal needs another statement."""
    if not entry.nullable_positions:
        return []
    has_null = " OR ".join(is_null(entry.columns[i].of(record)) for i in entry.nullable_positions)
    return [f"{record.lower()}_null := {has_null};"]


_COUNT = "GET DIAGNOSTICS found_entries = ROW_COUNT;"


def delete(entry: Entry, table: str, record: str) -> list[str]:
    """Deletes the entry of a record by its types' equality. Only an entry with a NULL costs a dynamic plan."""
    return _unless_null(entry, table, record, [_delete(entry, table, record)])


def _by_segment(target: Target, bounds: tuple[Bound, ...], record: str) -> list[str]:
    entry, base = target.entry, physical.base(target.generation_id)
    known = [
        *_choose(target, bounds, record, lambda segment: _delete(entry, segment, record), 0, len(bounds) + 1),
        _COUNT,
        "IF found_entries = 0 THEN",
        f"  {_delete(entry, base, record)}",
        f"  {_COUNT}",
        "END IF;",
    ]
    return _unless_null(entry, base, record, known, [_COUNT])


def _choose(
    target: Target, bounds: tuple[Bound, ...], record: str, statement: Callable[[str], str], first: int, end: int
) -> list[str]:
    """A binary search among the segments [first, end), numbered from 0 in the order of keys."""
    if end - first == 1:
        return [statement(physical.segment(target.generation_id, target.segment_at(first)))]
    middle = (first + end) // 2
    return [
        f"IF {_is_below(target.entry, record, bounds[middle - 1])} THEN",
        *indent(_choose(target, bounds, record, statement, first, middle)),
        "ELSE",
        *indent(_choose(target, bounds, record, statement, middle, end)),
        "END IF;",
    ]


def _is_below(entry: Entry, record: str, bound: Bound) -> str:
    values = [column.of(record) for column in entry.columns[: len(bound)]]
    # E'' strings mean the same under any setting of standard_conforming_strings.
    texts = ["E" + literal(text.replace("\\", "\\\\")) for text in bound]
    if len(bound) == 1:
        return f"{values[0]} OPERATOR(pg_catalog.<) {texts[0]}"
    return f"ROW({', '.join(values)}) OPERATOR(pg_catalog.<) ROW({', '.join(texts)})"


def _bounds(target: Target, most: int) -> tuple[Bound, ...] | None:
    """The bounds between the segments; None if there are more than `most` segments, or the bounds can't be used."""
    bounds = target.bounds
    if bounds is None or len(bounds) >= most:
        return None
    cut_by = target.entry.columns[: max(map(len, bounds), default=0)]
    if bounds and not all(column.cast in PLAIN_TYPES for column in cut_by):
        return None
    return bounds if all(len(text) <= LONGEST_BOUND for bound in bounds for text in bound) else None


def _delete(entry: Entry, table: str, record: str) -> str:
    """The DELETE statement for an entry without a NULL."""
    return f"DELETE FROM {table} WHERE {_same(entry, record)};"


def _same(entry: Entry, record: str) -> str:
    """SQL, true for the entry of a record, if that has no NULL."""
    values = [entry.columns[i].of(record) for i in entry.identity_positions]
    return entry.same(entry.physical(), values, dict.fromkeys(entry.nullable_positions, False))


def _unless_null(
    entry: Entry, table: str, record: str, known: list[str], after_dynamic: list[str] | None = None
) -> list[str]:
    """`known` if no column of the entry is NULL, else a dynamic DELETE."""
    values = [entry.columns[i].of(record) for i in entry.identity_positions]
    names, nullable = entry.physical(), entry.nullable_positions
    if not nullable:
        return known

    def term(i: int) -> str:
        null, equal = (
            literal(entry.same_column(i, names[i], entry.columns[i].parameter(i + 1), null)) for null in (True, False)
        )
        if i not in nullable:
            return equal[1:-1]
        # If only one column can be NULL, it is this one.
        return (
            null[1:-1]
            if len(nullable) == 1
            else f"'\n    || CASE WHEN {is_null(values[i])} THEN {null} ELSE {equal} END || '"
        )

    statement = f"  EXECUTE 'DELETE FROM {table} WHERE {' AND '.join(map(term, entry.identity_positions))}'"
    return [
        f"IF {record.lower()}_null THEN",
        *statement.splitlines(),
        f"    USING {', '.join(values)};",
        *indent(after_dynamic or []),
        "ELSE",
        *indent(known),
        "END IF;",
    ]
