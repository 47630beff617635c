"""Puts an entry into a unique index, in direct and active mode (docs/architecture.md#uniqueness).

Another row's entry may have the key. Then the source says whether that row still has it. If so, the write is refused,
as by PostgreSQL's own `UNIQUE … DEFERRABLE INITIALLY IMMEDIATE`. If not, that entry is stale, since the row's event is
still to come, or its antimatter is still to be folded, and the new row takes it over. A removal deletes by `(key, pk)`,
so the former holder's removal never undoes that.
"""

from __future__ import annotations

from collections.abc import Callable

from airflow_roir.engine.capture.plpgsql import indent, literal
from airflow_roir.engine.capture.target import DIRECT, Target
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry, is_null
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState


def put(source: Source, target: Target, record: str) -> list[str]:
    """Writes the entry of a record, or of `here`. The caller has removed the entry's own row from the delta."""
    entry = target.entry
    values = target.values(record)
    columns = ", ".join(entry.physical())
    into = f"({columns}) VALUES ({', '.join(values)})"
    lines = [
        *(_of_delta(source, target, record) if target.mode == DIRECT else []),
        *_of_base(source, target, record, into),
    ]
    if not entry.apart_positions:
        return lines
    rest = physical.segment(target.generation_id, physical.DEFAULT_SEGMENT)
    return [
        f"IF {' OR '.join(is_null(_compared(target, record)[i]) for i in entry.apart_positions)} THEN",
        f"  INSERT INTO {rest} {into} {entry.on_conflict()};",
        "ELSE",
        *indent(lines),
        "END IF;",
    ]


def _of_delta(source: Source, target: Target, record: str) -> list[str]:
    """Refuses the write if another row has the key in the delta. Before the base: the fold moves entries to there."""
    entry, delta = target.entry, physical.delta(target.generation_id)
    regular = f"d.state = '{EntryState.REGULAR.value}'"
    key, other = key_is(target, record, "d."), _rest_is(target, _rest(target, record), "d.")
    holder = ", ".join(entry.physical(entry.rest_positions, prefix="d."))
    return [
        "LOOP",
        f"  SELECT {holder} INTO holder FROM {delta} d WHERE {key} AND NOT ({other}) AND {regular} LIMIT 1;",
        "  EXIT WHEN NOT FOUND;",
        *indent(ask(source, target, record)),
        # The holder's row no longer has this key, by a write of our own whose event is still to come.
        f"  DELETE FROM {delta} d WHERE {key} AND {_rest_is(target, _of_holder(target), 'd.')};",
        "END LOOP;",
    ]


def _of_base(source: Source, target: Target, record: str, into: str) -> list[str]:
    entry, base = target.entry, physical.base(target.generation_id)
    key = key_is(target, record, "b.")
    holder = ", ".join(entry.physical(entry.rest_positions, prefix="b."))
    values = target.values(record)
    assigned = ", ".join(f"{name} = {value}" for name, value in zip(entry.physical(), values, strict=True))
    ours = _rest_is(target, _rest(target, record), "holder.")
    held = _rest_is(target, _of_holder(target), "b.")
    return [
        "LOOP",
        # Not DO UPDATE, which would lock the holder's entry: the holder's transaction may need it while we wait for it.
        f"  INSERT INTO {base} {into} ON CONFLICT ({', '.join(entry.physical(entry.key_positions))}) DO NOTHING;",
        "  EXIT WHEN FOUND;",
        # Our own entry first: one snapshot may also show another row's, which is gone since, and be too old to ask.
        f"  SELECT {holder}, b.tableoid AS place, b.ctid AS spot INTO holder FROM {base} b WHERE {key}",
        f"    ORDER BY {_rest_is(target, _rest(target, record), 'b.')} DESC LIMIT 1;",
        "  CONTINUE WHEN NOT FOUND;",
        f"  taken := NOT ({ours});",
        "  IF taken THEN",
        *indent(ask(source, target, record), 2),
        f"    PERFORM roir.note_taken({target.generation_id}, holder.place, holder.spot);",
        "  END IF;",
        f"  UPDATE {base} b SET {assigned} WHERE {key} AND {held};",
        "  IF FOUND THEN",
        # The holder may have lost the key and got it again between question and take-over: ask again. From now on a
        # writer that gives it the key waits for us.
        "    IF taken AND NOT one_snapshot THEN",
        *indent(ask(source, target, record), 3),
        "    END IF;",
        "    EXIT;",
        "  END IF;",
        "END LOOP;",
    ]


def ask(source: Source, target: Target, record: str) -> list[str]:
    """Raises if the holder's row has our key. FOR SHARE waits for a session that changes the row, and raises 40001 if
    our snapshot doesn't see the change.

    If the table was rewritten since our snapshot, we see no row and no error: the table's file shows that. In READ
    COMMITTED, a row that has moved to another partition raises 40001, too: then we ask again, and it is gone.
    """
    entry = target.entry
    given = [entry.columns[i].parameter(i + 1) for i in entry.identity_positions]
    key = _compared(target, record)[: entry.key]
    bound = ", ".join([*key, *_of_holder(target)])
    looks = look(source, target, lambda of: entry.same(of, given), bound)
    key_columns = entry.columns[: entry.key]
    names = ", ".join(literal(column.source) for column in key_columns)
    labels = ""
    if any(column.call for column in key_columns):
        labels = f", ARRAY[{', '.join(literal(column.label) for column in key_columns)}]"
    texts = ", ".join(_text(entry, i, value) for i, value in enumerate(key))
    tree = "pg_partition_root(TG_RELID)" if source.partitioned else "TG_RELID"
    # The holder's row may be in any leaf.
    leaves = f"ARRAY(SELECT t.relation FROM roir.partition_tree({source.oid}) t)"
    return [
        *([f"PERFORM roir.refuse_leaves_of_others({leaves});"] if source.partitioned else []),
        "LOOP",
        "  BEGIN",
        *indent(looks, 2),
        "    EXIT;",
        "  EXCEPTION WHEN serialization_failure THEN",
        "    IF one_snapshot THEN",
        "      RAISE;",
        "    END IF;",
        "  END;",
        "END LOOP;",
        "IF held THEN",
        f"  PERFORM roir.refuse_duplicate({source.oid}, TG_RELID, {literal(target.constraint)},",
        f"    ARRAY[{names}], ARRAY[{texts}]{labels});",
        # No row has the key, or the snapshot is older than a rewrite of the table and sees none.
        "ELSIF one_snapshot THEN",
        f"  PERFORM roir.refuse_rewritten({tree});",
        "END IF;",
    ]


def look(source: Source, target: Target, condition: Callable[[list[str]], str], bound: str) -> list[str]:
    """Locks the source's row that meets a condition, and puts true into `held` if there is one.

    condition: makes SQL of SQL for the row's columns, in entry order. bound: SQL for its parameters.
    """
    entry = target.entry

    def asked(relation: str, of: list[str], satisfied: str = "") -> str:
        return f"SELECT true FROM {relation} s WHERE {condition(of)}{satisfied} FOR SHARE"

    by_view = literal(asked(physical.source_view(target.generation_id), entry.physical(prefix="s.")))
    looks = [f"EXECUTE {by_view} INTO held USING {bound};"]
    if source.partitioned:
        return looks
    # As on the careful path: the table may be restored from a dump, without our view.
    head, tail = asked("\0", [column.of("s") for column in entry.columns], entry.and_satisfied("s")).split("\0")
    return [
        f"IF TG_RELID = {source.oid} THEN",
        *indent(looks),
        "ELSE",
        f"  EXECUTE {literal(head + 'ONLY ')} || TG_RELID::regclass || {literal(tail)} INTO held USING {bound};",
        "END IF;",
    ]


def _text(entry: Entry, i: int, value: str) -> str:
    """SQL for a key column's value in an error. `format` would make an empty text of a NULL."""
    text = f"format('%s', {value})"
    if i not in entry.nullable_positions or i in entry.apart_positions:
        return text
    return f"CASE WHEN NOT ({is_null(value)}) THEN {text} END"


def key_is(target: Target, record: str, prefix: str) -> str:
    """SQL, true if an entry has a record's key. With NULLS NOT DISTINCT two NULLs are the same."""
    entry = target.entry
    values = _compared(target, record)
    found = []
    for i in entry.key_positions:
        name = f"{prefix}c{i + 1}"
        known = entry.columns[i].primary_key or i in entry.apart_positions
        found.append(entry.same_column(i, name, values[i], False if known else None))
    return " AND ".join(found)


def rest_is_holder(target: Target, prefix: str) -> str:
    """SQL, true for the entry that `holder` has the primary key of, among those with its key."""
    return _rest_is(target, _of_holder(target), prefix)


def _rest(target: Target, record: str) -> list[str]:
    """The record's primary key, without the columns that are in the index's key."""
    values = _compared(target, record)
    return [values[i] for i in target.entry.rest_positions]


def _rest_is(target: Target, values: list[str], prefix: str) -> str:
    entry = target.entry
    names = entry.physical(entry.rest_positions, prefix=prefix)
    positions = entry.rest_positions
    return " AND ".join(
        f"{name} {entry.columns[i].equals} {value}" for i, name, value in zip(positions, names, values, strict=True)
    )


def _of_holder(target: Target) -> list[str]:
    return target.entry.physical(target.entry.rest_positions, prefix="holder.")


def _compared(target: Target, record: str) -> list[str]:
    """A record's columns as base types."""
    if record == "here":
        return target.entry.physical(prefix="here.")
    return [column.of(record) for column in target.entry.columns]
