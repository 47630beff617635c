"""The text of a source's capture function: what one write does to each generation, in its mode (DESIGN section 4).

The *quick* path trusts an event's NEW where that is the row as it stands now: the tuple's `xmax` is 0. It isn't where
a trigger (a user's or a foreign key's) or a function that a statement calls wrote to the same row while that statement
still had events queued: the inner events then come first. There, where primary keys move among rows, and for a row
that is gone, the *careful* path asks the source itself, by primary key, whether the entry belongs, for the old and the
new entry alike. Neither depends on the order of events, and nothing is remembered between them that a session could
reset.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_roir.definition import Scan, quote
from airflow_roir.engine import generation as physical
from airflow_roir.engine import tables
from airflow_roir.engine.catalog import Source
from airflow_roir.engine.entry import Entry, is_null
from airflow_roir.entry_state import EntryState

CAPTURE, DIRECT, ACTIVE = "capture", "direct", "active"

# The event's new version of the row has been written to again since, by this very transaction (or only locked).
_IS_TOUCHED_AGAIN = "NEW.xmax <> '0'::xid"


@dataclass(frozen=True)
class Target:
    """A generation that the capture function maintains, in its mode. scan: what it is built from."""

    generation_id: int
    entry: Entry
    mode: str
    scan: Scan = Scan.KEY


def function_name(source_oid: int) -> str:
    """The capture function of a source, named by its oid."""
    return f"{tables.DATA_SCHEMA}.capture_{source_oid}"


def render(source: Source, generations: list[Target]) -> str:
    """The whole CREATE FUNCTION statement, pure text of its arguments."""
    text = body(source, generations)
    tag = "roir"
    while f"${tag}$" in text:  # a column may be called anything, `$roir$` too
        tag += "_"
    return (
        f"CREATE OR REPLACE FUNCTION {function_name(source.oid)}() RETURNS trigger\n"
        # Without rows that a policy hides the careful path would take entries away: then rather an error.
        "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off\n"
        f"AS ${tag}$\n{text}\n${tag}$"
    )


def body(source: Source, generations: list[Target]) -> str:
    """What stands between the dollars of `render`."""
    declarations = ["DECLARE", "  careful boolean := true;"]
    if any(target.mode != CAPTURE for target in generations):
        declarations += [
            "  one_snapshot boolean :=",
            "    current_setting('transaction_isolation') IN ('repeatable read', 'serializable');",
            "  found_entries bigint;",
        ]
    statements = _indent(_statements(source, generations))
    return "\n".join([*declarations, "BEGIN", *statements, "  RETURN NULL;", "END"])


def _statements(source: Source, generations: list[Target]) -> list[str]:
    if not generations:
        return ["-- No generation is maintained at present."]
    # In one statement, bases first: the fold locks in that order too, so the two can't deadlock.
    truncated = [physical.base(g.generation_id) for g in generations]
    truncated += [physical.delta(g.generation_id) for g in generations if g.mode != ACTIVE]
    truncate = [
        "IF TG_OP = 'TRUNCATE' THEN",
        *(_indent(_truncated_leaf(source, generations)) if source.partitioned else []),
        f"  TRUNCATE {', '.join(truncated)};",
        *(_indent(_emptied(generations))),
        "  RETURN NULL;",
        "END IF;",
    ]
    lines = truncate
    if not source.pk_deferrable:
        # The update first: each question costs an event a microsecond or two, and most writes are updates.
        lines = [
            "IF TG_OP = 'UPDATE' THEN",
            f"  careful := {_IS_TOUCHED_AGAIN}",
            f"    OR {_image('OLD', source.primary_key)} *<> {_image('NEW', source.primary_key)};",
            "ELSIF TG_OP = 'INSERT' THEN",
            f"  careful := {_IS_TOUCHED_AGAIN};",
            f"ELS{truncate[0]}",
            *truncate[1:],
        ]
    for target in generations:
        lines += [f"-- generation {target.generation_id}, {target.mode} mode"]
        if target.mode == CAPTURE:
            lines += _capture_mode(source, target)
        else:
            lines += _maintain_mode(source, target)
    return lines


def _emptied(generations: list[Target]) -> list[str]:
    """What their blocks were planned for is gone, so that nothing is left to be scanned."""
    scanned = [f"({g.generation_id}, TG_RELID)" for g in generations if g.mode == CAPTURE and g.scan.by_blocks]
    return [f"INSERT INTO roir.emptied (generation_id, relation) VALUES {', '.join(scanned)};"] if scanned else []


def _truncated_leaf(source: Source, generations: list[Target]) -> list[str]:
    return [
        f"IF TG_RELID <> {source.oid} THEN",
        f"  PERFORM roir.refuse_restored({source.oid});",
        f"  PERFORM roir.forget_partition({source.oid}, TG_RELID);",
        *_indent(_emptied(generations)),
        "  RETURN NULL;",
        "END IF;",
    ]


def _capture_mode(source: Source, target: Target) -> list[str]:
    """Touched wins: every entry that a write touches goes to the delta, whatever the base holds."""
    entry, delta = target.entry, physical.delta(target.generation_id)

    def write(record: str, state: EntryState) -> list[str]:
        values = [
            f"{record}.{quote(column.source)}" if i < entry.identity or state == EntryState.REGULAR else "NULL"
            for i, column in enumerate(entry.columns)
        ]
        return [
            f"INSERT INTO {delta} ({_columns(entry)}, state)",
            f"VALUES ({', '.join(values)}, '{state.value}')",
            f"{entry.on_conflict(state=True)};",
        ]

    def settle(record: str) -> list[str]:
        return _as_it_stands(source, entry, record, delta, write(record, EntryState.ANTIMATTER), with_state=True)

    everything = [column.source for column in entry.columns]
    identity = everything[: entry.identity]
    moved = []
    if target.scan is Scan.BLOCK:
        # Else a batch could meet the row twice, or not at all. Within a block one snapshot sees it once.
        moved = [f"ELSIF {_block_of('OLD')} <> {_block_of('NEW')} THEN", *_indent(write("NEW", EntryState.REGULAR))]
    return [
        "IF careful THEN",
        *_indent(_for_both(settle)),
        "ELSIF TG_OP = 'INSERT' THEN",
        *_indent(write("NEW", EntryState.REGULAR)),
        f"ELSIF {_image('OLD', everything)} *<> {_image('NEW', everything)} THEN",
        f"  IF {_image('OLD', identity)} *<> {_image('NEW', identity)} THEN",
        *_indent(write("OLD", EntryState.ANTIMATTER), 2),
        "  END IF;",
        *_indent(write("NEW", EntryState.REGULAR)),
        *moved,
        "END IF;",
    ]


def _block_of(record: str) -> str:
    """SQL for the number of the block that a version of a row is in."""
    return f"({record}.ctid::text::point)[0]"


def _maintain_mode(source: Source, target: Target) -> list[str]:
    """Direct and active mode: the base itself is kept right; in direct mode the delta shrinks on the way (I5)."""
    entry, base = target.entry, physical.base(target.generation_id)
    delta = physical.delta(target.generation_id) if target.mode == DIRECT else None

    def forget(record: str) -> list[str]:
        return _delete(entry, delta, record) if delta else []

    def put(record: str) -> list[str]:
        values = [f"{record}.{quote(column.source)}" for column in entry.columns]
        return [
            *forget(record),
            f"INSERT INTO {base} ({_columns(entry)})",
            f"VALUES ({', '.join(values)})",
            f"{entry.on_conflict()};",
        ]

    def take_out(record: str) -> list[str]:
        # Nothing there, or only nothing that this snapshot sees: an insert tells, it raises 40001 at what it can't see.
        identity = ", ".join(entry.physical(entry.identity_positions))
        values = ", ".join(f"{record}.{quote(entry.columns[i].source)}" for i in entry.identity_positions)
        return [
            *_delete(entry, base, record),
            "GET DIAGNOSTICS found_entries = ROW_COUNT;",
            "IF found_entries = 0 AND one_snapshot THEN",
            f"  INSERT INTO {base} ({identity}) VALUES ({values}) ON CONFLICT ({identity}) DO NOTHING;",
            *_indent(_delete(entry, base, record)),
            "END IF;",
        ]

    # The delta before the base, always: a fold step takes rows in that order too.
    def remove(record: str) -> list[str]:
        return [*forget(record), *take_out(record)]

    def settle(record: str) -> list[str]:
        return [*forget(record), *_as_it_stands(source, entry, record, base, take_out(record))]

    everything = [column.source for column in entry.columns]
    identity = everything[: entry.identity]
    # An old snapshot is told by the row that says this mode, which it must see: a removal may find the entry in the
    # delta and miss the base's younger copy, a write may miss a younger antimatter, a lookup the row itself.
    return [
        "IF one_snapshot THEN",
        "  IF NOT EXISTS (SELECT FROM roir.generation g",
        f"                  WHERE g.id = {target.generation_id} AND g.capture_mode = '{target.mode}') THEN",
        *_indent(_serialization_failure(target), 2),
        "  END IF;",
        "END IF;",
        "IF careful THEN",
        *_indent(_for_both(settle)),
        "ELSIF TG_OP = 'INSERT' THEN",
        *_indent(put("NEW")),
        f"ELSIF {_image('OLD', everything)} *<> {_image('NEW', everything)} THEN",
        f"  IF {_image('OLD', identity)} *<> {_image('NEW', identity)} THEN",
        *_indent(remove("OLD"), 2),
        "  END IF;",
        *_indent(put("NEW")),
        "END IF;",
    ]


def _as_it_stands(
    source: Source, entry: Entry, record: str, table: str, gone: list[str], with_state: bool = False
) -> list[str]:
    """Write the record's entry as the source has it now, or do what is due where it has none."""
    state = ", state" if with_state else ""
    regular = f", '{EntryState.REGULAR.value}'" if with_state else ""
    return [
        f"INSERT INTO {table} ({_columns(entry)}{state})",
        f"SELECT {', '.join(entry.source_columns('s'))}{regular}",
        f"  FROM {source.sql} s WHERE {_row_of(source, entry, record)} LIMIT 1",
        f"{entry.on_conflict(state=with_state)};",
        "IF NOT FOUND THEN",
        *_indent(gone),
        "END IF;",
    ]


def _for_both(settle: object) -> list[str]:
    assert callable(settle)
    return [
        "IF TG_OP <> 'INSERT' THEN",
        *_indent(settle("OLD")),
        "END IF;",
        "IF TG_OP <> 'DELETE' THEN",
        *_indent(settle("NEW")),
        "END IF;",
    ]


def _serialization_failure(target: Target) -> list[str]:
    return [
        "RAISE EXCEPTION USING ERRCODE = 'serialization_failure',",
        "  MESSAGE = 'could not serialize access: an index entry of this row was written after the "
        "transaction''s snapshot',",
        f"  DETAIL = 'roir generation {target.generation_id}', HINT = 'Retry the transaction.';",
    ]


def _delete(entry: Entry, table: str, record: str) -> list[str]:
    """Delete the entry of a record by its own equality. Only an entry with a NULL in it pays for a dynamic plan."""
    values = [entry.columns[i].of(record) for i in entry.identity_positions]
    plain = " AND ".join(f"c{i + 1} {entry.columns[i].equals} {values[i]}" for i in entry.identity_positions)
    # NOT NULL may be dropped from a key column at any time; a primary key's column can never hold NULL.
    nullable = [i for i in entry.identity_positions if not entry.columns[i].primary_key]
    if not nullable:
        return [f"DELETE FROM {table} WHERE {plain};"]
    any_null = " OR ".join(is_null(values[i]) for i in nullable)
    terms = []
    for i in entry.identity_positions:
        equal = _literal(f"c{i + 1} {entry.columns[i].equals} ${i + 1}")
        terms.append(
            f"CASE WHEN {is_null(values[i])} THEN '{is_null(f'c{i + 1}')}' ELSE {equal} END" if i in nullable else equal
        )
    using = ", ".join(values)
    joined = " || ' AND ' || ".join(terms)
    return [
        f"IF {any_null} THEN",
        f"  EXECUTE 'DELETE FROM {table} WHERE ' || {joined}",
        f"    USING {using};",
        "ELSE",
        f"  DELETE FROM {table} WHERE {plain};",
        "END IF;",
    ]


def _row_of(source: Source, entry: Entry, record: str) -> str:
    """SQL: the row `s` of the source has the record's primary key and still projects to the record's entry."""
    terms = []
    for column in entry.columns[: entry.identity]:
        ours, theirs = column.of("s"), column.of(record)
        same = f"{ours} {column.equals} {theirs}"
        terms.append(same if column.primary_key else f"({same} OR {is_null(ours)} AND {is_null(theirs)})")
    return " AND ".join(terms)


def _image(record: str, columns: list[str] | tuple[str, ...]) -> str:
    # ::record, or PostgreSQL would take `ROW(…) *<> ROW(…)` for a comparison of the columns one by one.
    return f"ROW({', '.join(f'{record}.{quote(column)}' for column in columns)})::record"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _columns(entry: Entry) -> str:
    return ", ".join(entry.physical())


def _indent(lines: list[str], levels: int = 1) -> list[str]:
    return ["  " * levels + line for line in lines]
