"""The text of a source's capture function of rows: what one write does to each generation, in its mode.

See docs/architecture.md#touched-wins.

The trigger's function only hands the columns of entries on to `capture_row`. PL/pgSQL compiles and keeps a trigger's
function for each partition that a session writes to: as one, it took half a megabyte of each in each session.

The *quick* path trusts an event's NEW if that is the present row: the tuple's `xmax` is 0. NEW is outdated if a trigger
(a user's or a foreign key's), or a function that the statement calls, wrote to the same row while the statement still
had events queued: the inner events then come first. In that case, if primary keys move among rows, and for a row that
is gone, the *careful* path asks the source itself, by primary key, whether the entry belongs, for the old and the new
entry alike. Neither path depends on the order of events, and nothing is remembered between them that a session could
reset.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from airflow_roir.definition import DATA_SCHEMA, Scan, quote
from airflow_roir.engine.capture import careful_path, segment_writes, unique_put
from airflow_roir.engine.capture.plpgsql import called_function, function, indent
from airflow_roir.engine.capture.target import CAPTURE, DIRECT, Target
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry, EntryColumn
from airflow_roir.engine.source.source import Computed, Source
from airflow_roir.entry_state import EntryState

# This transaction has written again to the event's new version of the row since (or has only locked it).
_IS_TOUCHED_AGAIN = "touched_again"

# Classes of errors that come from no value of a row: what is missing, locks, resources, the server itself.
NOT_OF_ROWS = ("25", "40", "42", "53", "54", "55", "57", "58", "XX")

# Plans are kept: one that was made for an empty table would read the whole table for each row once it is large.
BY_INDEX = " SET enable_seqscan = off"


def trigger_name(source_oid: int) -> str:
    """The name of the capture trigger of rows, by oid: a table and one of its partitions may both be sources."""
    return f"roir_capture_{source_oid}"


def function_name(source_oid: int) -> str:
    """The trigger's function for a source's rows, named by the source's oid. It runs as the source's owner."""
    return f"{DATA_SCHEMA}.capture_{source_oid}"


def row_type_name(source_oid: int) -> str:
    """The type of the columns of a source's row that its entries have."""
    return f"{DATA_SCHEMA}.row_{source_oid}"


def row_function_name(source_oid: int) -> str:
    """The function that captures a row, without its parameters."""
    return f"{DATA_SCHEMA}.capture_row_{source_oid}"


def row_function(source_oid: int) -> str:
    """The function that captures a row, with the types of its parameters."""
    row = row_type_name(source_oid)
    return f"{row_function_name(source_oid)}(text,oid,name,boolean,tid,tid,{row},{row})"


def row_columns(generations: Sequence[Target]) -> list[tuple[str, str, str | None]]:
    """The columns of `row_type_name`: their names, types and collations. Conditions follow, each a boolean."""
    conditions = [(condition.call, "boolean", None) for condition in _conditions_of(generations)]
    return [(column.held, column.type, column.collation) for column in _columns_of(generations)] + conditions


def render(source: Source, generations: list[Target], kept: bool = False) -> list[str]:
    """The statements that make the functions for rows. They depend on nothing but the arguments.

    kept: the type has these columns already, and stays. Otherwise these statements come after `undo`.
    """
    row = row_type_name(source.oid)
    columns = ", ".join(
        f"{quote(name)} {type_}" + (f" COLLATE {collation}" if collation else "")
        for name, type_, collation in row_columns(generations)
    )
    made = [] if kept else [f"CREATE TYPE {row} AS ({columns})", f"REVOKE ALL ON TYPE {row} FROM PUBLIC"]
    parameters = (
        "tg_op text, tg_relid oid, tg_table_schema name, touched_again boolean, old_place tid, new_place tid, "
        f"old {row}, new {row}"
    )
    return [
        *made,
        called_function(row_function_name(source.oid), parameters, body(source, generations)),
        function(function_name(source.oid), trigger_body(source, generations), BY_INDEX),
    ]


def undo(source_oid: int) -> list[str]:
    """The statements that drop the function that captures a row, and its type."""
    # The function may be gone: its owner may drop it.
    return [
        f"DROP FUNCTION IF EXISTS {row_function_name(source_oid)}",
        f"DROP TYPE IF EXISTS {row_type_name(source_oid)}",
    ]


def _columns_of(generations: Sequence[Target]) -> list[EntryColumn]:
    found: dict[str, EntryColumn] = {}
    for target in generations:
        for column in target.entry.columns:
            found.setdefault(column.held, column)
    return list(found.values())


def _conditions_of(generations: Sequence[Target]) -> list[Computed]:
    return list(dict.fromkeys(target.entry.condition for target in generations if target.entry.condition))


def _calls_of(targets: Sequence[Target]) -> dict[str, str]:
    """SQL for the expressions of OLD and the conditions of some generations, by their names in the row's type."""
    values = {one.held: one.computed.of("OLD") for one in _columns_of(targets) if one.computed is not None}
    return values | {one.call: f"coalesce({one.of('OLD')}, false)" for one in _conditions_of(targets)}


def _of_copies_alone(generations: Sequence[Target]) -> dict[str, str]:
    """Those of `_calls_of` that only generations have which are being copied."""
    maintained = _calls_of([target for target in generations if target.mode != CAPTURE])
    copied = _calls_of([target for target in generations if target.mode == CAPTURE])
    return {name: value for name, value in copied.items() if name not in maintained}


def _row_of(record: str, source: Source, generations: Sequence[Target], without: Collection[str] = ()) -> str:
    """SQL for what entries have of a record. Each expression is evaluated once; not for a record that isn't there.

    without: the expressions and conditions that aren't evaluated; they are NULL and false.
    """
    absent = {"OLD": "INSERT", "NEW": "DELETE"}[record]
    values = []
    for column in _columns_of(generations):
        if column.held in without:
            values.append("NULL")
        elif column.computed is None:
            values.append(f"{record}.{quote(column.source)}")
        else:
            values.append(f"CASE WHEN TG_OP <> '{absent}' THEN {column.computed.of(record)} END")
    values += [
        f"CASE WHEN TG_OP <> '{absent}' THEN coalesce({condition.of(record)}, false) ELSE false END"
        if condition.call not in without
        else "false"
        for condition in _conditions_of(generations)
    ]
    return f"ROW({', '.join(values)})::{row_type_name(source.oid)}"


def _old_row(source: Source, generations: Sequence[Target], lenient: dict[str, str]) -> list[str]:
    """Statements that set `was` to what entries have of OLD.

    An expression may raise for a row that was there before the build began. No build has copied that row, and no write
    has put it into a delta, so it has no entry: NULL stands for the expression, antimatter of which removes nothing. So
    users can change and delete such a row, as beside an index of PostgreSQL's own that is being built.
    """
    not_of_rows = ", ".join(f"'{one}'" for one in NOT_OF_ROWS)
    caught = ["EXCEPTION WHEN OTHERS THEN", f"  IF left(SQLSTATE, 2) IN ({not_of_rows}) THEN RAISE; END IF;"]
    one_by_one = [
        line
        for name, value in lenient.items()
        for line in ("BEGIN", f"  was.{quote(name)} := {value};", *caught, "END;")
    ]
    return [
        "BEGIN",
        f"  was := {_row_of('OLD', source, generations)};",
        *caught,
        "  -- An old row for which an expression raises has no entry yet.",
        f"  was := {_row_of('OLD', source, generations, without=lenient)};",
        *indent(one_by_one),
        "END;",
    ]


def trigger_body(source: Source, generations: list[Target]) -> str:
    """The body of the trigger's function, without the dollar quotes."""
    if not generations:
        return "BEGIN\n  -- No generation is maintained at present.\n  RETURN NULL;\nEND"
    old, new = (_row_of(record, source, generations) for record in ("OLD", "NEW"))
    lenient = _of_copies_alone(generations)
    if lenient:
        old = "was"
    return "\n".join(
        [
            "DECLARE",
            "  done boolean;",
            *([f"  was {row_type_name(source.oid)};"] if lenient else []),
            "BEGIN",
            *(f"  -- generation {target.generation_id}, {target.mode} mode" for target in generations),
            *(indent(_old_row(source, generations, lenient)) if lenient else []),
            # An assignment: PL/pgSQL evaluates it without a query.
            f"  done := {row_function_name(source.oid)}(TG_OP, TG_RELID, TG_TABLE_SCHEMA, NEW.xmax <> '0'::xid,",
            "    OLD.ctid, NEW.ctid,",
            f"    {old},",
            f"    {new});",
            "  RETURN NULL;",
            "END",
        ]
    )


def body(source: Source, generations: list[Target]) -> str:
    """The body of the function that captures a row, without the dollar quotes."""
    declarations = [
        "DECLARE",
        "  -- Whether the source is asked what became of the row. A DELETE always does.",
        "  careful boolean := true;",
        "  -- Its answer: a row that has the entry now, and that the entry `belongs`.",
        "  here record;",
    ]
    maintained = [target for target in generations if target.mode != CAPTURE]
    if source.pk_deferrable or maintained:
        declarations += [
            "  one_snapshot boolean :=",
            "    current_setting('transaction_isolation') IN ('repeatable read', 'serializable');",
            "  found_entries bigint;",
            "  gone boolean;",
        ]
    if any(target.entry.nullable_positions for target in maintained):
        declarations += ["  old_null boolean;", "  new_null boolean;"]
    if any(target.entry.enforced and target.mode != CAPTURE for target in generations):
        declarations += ["  holder record;", "  held boolean;", "  taken boolean;"]
    statements = indent(_statements(source, generations))
    return "\n".join([*declarations, "BEGIN", *statements, "", "  RETURN true;", "END"])


def _statements(source: Source, generations: list[Target]) -> list[str]:
    if not generations:
        return ["-- No generation is maintained at present."]
    lines = []
    if not source.pk_deferrable:
        # UPDATE first: each test costs an event a microsecond or two, and most writes are updates.
        lines = [
            "-- Is NEW the present version of the row? Not if this transaction has written to the row again since.",
            "IF TG_OP = 'UPDATE' THEN",
            f"  careful := {_IS_TOUCHED_AGAIN}",
            f"    OR {_image('OLD', source.primary_key)} *<> {_image('NEW', source.primary_key)};",
            "ELSIF TG_OP = 'INSERT' THEN",
            f"  careful := {_IS_TOUCHED_AGAIN};",
            "END IF;",
        ]
    else:
        lines = ["-- Rows may share a primary key for a while: every write is careful."]
    if source.partitioned:
        lines += ["", *refuse_leaf_of_others()]
    for target in generations:
        lines += ["", f"-- generation {target.generation_id}, {target.mode} mode"]
        maintained = _capture_mode(source, target) if target.mode == CAPTURE else _maintain_mode(source, target)
        lines += maintained if target.entry.condition is None else _where_satisfied(target.entry.condition, maintained)
    return lines


def _where_satisfied(condition: Computed, statements: list[str]) -> list[str]:
    """The statements, for the event as a partial index sees it: an update into the condition is an insert, out of it a
    delete. A record that doesn't satisfy it has no entry, so its events say nothing about one.
    """
    old, new = (f"{record}.{quote(condition.call)}" for record in ("OLD", "NEW"))
    return [
        f"IF {old} OR {new} THEN",
        "  DECLARE",
        f"    tg_op text := CASE WHEN NOT {old} THEN 'INSERT' WHEN NOT {new} THEN 'DELETE' ELSE TG_OP END;",
        f"    careful boolean := careful OR NOT {new};",
        "  BEGIN",
        *indent(statements, 2),
        "  END;",
        "END IF;",
    ]


def refuse_leaf_of_others() -> list[str]:
    """Refuses leaves of other owners: to read one may run its owner's code, with the rights of the source's owner."""
    return [
        "-- May our owner read this leaf?",
        # Tested here, since a call would cost each event more.
        "IF careful AND (SELECT c.xmax <> '0'::xid OR NOT pg_has_role(c.relowner, current_user, 'USAGE')",
        "                  FROM pg_class c WHERE c.oid = TG_RELID) THEN",
        "  PERFORM roir.refuse_leaves_of_others(ARRAY[TG_RELID]);",
        "END IF;",
    ]


def _capture_mode(source: Source, target: Target) -> list[str]:
    """Touched wins: every entry that a write touches goes to the delta, whatever the base holds."""
    entry, delta = target.entry, physical.delta(target.generation_id)

    def write(record: str, state: EntryState) -> list[str]:
        values = target.values(record)
        if state is not EntryState.REGULAR:
            values[entry.identity :] = ["NULL"] * (len(values) - entry.identity)
        return [
            f"INSERT INTO {delta} ({_columns(entry)}, state)",
            f"VALUES ({', '.join(values)}, '{state.value}')",
            f"{entry.on_conflict(state=True)};",
        ]

    def settle(record: str) -> list[str]:
        belongs = write("here", EntryState.REGULAR)
        gone = [
            "-- No row has it: antimatter, which takes the entry out of the index at the fold.",
            *write(record, EntryState.ANTIMATTER),
        ]
        return careful_path.as_it_stands(source, target, record, belongs, gone)

    everything = [column.held for column in entry.columns]
    identity = everything[: entry.identity]
    # If rows may share a key for a while, the snapshot must see them all.
    refused = refuse_old_snapshots(target) if source.pk_deferrable else []
    moved = []
    if target.scan is Scan.BLOCK:
        # Otherwise batches could meet the row twice, or not at all. Within a block one snapshot sees it once.
        moved = [
            "",
            "-- Has the row moved to another block? The scan of the old one may miss it.",
            f"ELSIF {_block_of('OLD')} <> {_block_of('NEW')} THEN",
            *indent(write("NEW", EntryState.REGULAR)),
        ]
    return [
        *refused,
        "-- Careful: a regular row for what the source has now, antimatter for what it hasn't. A DELETE ends here.",
        "IF careful THEN",
        *indent(careful_path.for_both(settle)),
        "",
        "-- Quick: NEW is the row.",
        "ELSIF TG_OP = 'INSERT' THEN",
        *indent(write("NEW", EntryState.REGULAR)),
        "",
        "-- Has the update changed the entry?",
        f"ELSIF {_image('OLD', everything)} *<> {_image('NEW', everything)} THEN",
        f"  IF {_image('OLD', identity)} *<> {_image('NEW', identity)} THEN",
        "    -- Another key: the old entry goes.",
        *indent(write("OLD", EntryState.ANTIMATTER), 2),
        "  END IF;",
        *indent(write("NEW", EntryState.REGULAR)),
        *moved,
        "END IF;",
    ]


def _block_of(record: str) -> str:
    """SQL for the number of the block that has a version of a row."""
    return f"({record.lower()}_place::text::point)[0]"


def _maintain_mode(source: Source, target: Target) -> list[str]:
    """Direct and active mode: writes maintain the base itself; in direct mode they also remove delta rows (I5)."""
    entry, base = target.entry, physical.base(target.generation_id)
    delta = physical.delta(target.generation_id) if target.mode == DIRECT else None

    def forget(record: str) -> list[str]:
        return segment_writes.delete(entry, delta, record) if delta else []

    def put(record: str) -> list[str]:
        if entry.enforced:
            return unique_put.put(source, target, record)
        return [
            f"INSERT INTO {base} ({_columns(entry)})",
            f"VALUES ({', '.join(target.values(record))})",
            f"{entry.on_conflict()};",
        ]

    # Always the delta before the base: a fold step takes rows in that order, too.
    def settle(record: str) -> list[str]:
        gone = ["-- No row has it: the entry goes.", *segment_writes.take_out(target, record)]
        return [*forget(record), *careful_path.as_it_stands(source, target, record, put("here"), gone)]

    everything = [column.held for column in entry.columns]
    identity = everything[: entry.identity]
    # The snapshot must see the row that names this mode, or it is too old: a removal could find the entry in the delta
    # and miss the base's younger copy, a write could miss a younger antimatter, a lookup the row itself.
    refused = refuse_old_snapshots(target)
    if source.pk_deferrable:
        return [
            *refused,
            *careful_path.for_both(lambda record: [*segment_writes.set_null(entry, record), *settle(record)]),
        ]
    # Before the paths part, since nearly all of them need it.
    new_null = [*segment_writes.set_null(entry, "NEW"), ""] if entry.nullable_positions else []
    return [
        *refused,
        *new_null,
        # Most writes fail both conditions. The statements for the old entry are long, so both paths share them.
        "-- Careful, or another key: the old entry goes, unless the source has it still; then comes the new one.",
        "-- A DELETE is careful.",
        f"IF careful OR TG_OP = 'UPDATE' AND {_image('OLD', identity)} *<> {_image('NEW', identity)} THEN",
        "  IF TG_OP <> 'INSERT' THEN",
        *indent([*segment_writes.set_null(entry, "OLD"), *forget("OLD")], 2),
        "    gone := true;",
        "    IF careful THEN",
        *indent(careful_path.look(source, target, "OLD"), 3),
        "      IF here.belongs THEN",
        *indent(put("here"), 4),
        "        gone := false;",
        "      END IF;",
        "    END IF;",
        "    IF gone THEN",
        *indent(segment_writes.take_out(target, "OLD"), 3),
        "    END IF;",
        "  END IF;",
        "",
        "  -- Quick: NEW is the row.",
        "  IF NOT careful THEN",
        *indent([*forget("NEW"), *put("NEW")], 2),
        "",
        "  -- Careful: does the source have the new entry?",
        "  ELSIF TG_OP <> 'DELETE' THEN",
        *indent(settle("NEW"), 2),
        "  END IF;",
        "",
        "ELSIF TG_OP = 'INSERT' THEN",
        *indent([*forget("NEW"), *put("NEW")]),
        "",
        "-- The same key. Has the update changed another column of the entry?",
        f"ELSIF {_image('OLD', everything)} *<> {_image('NEW', everything)} THEN",
        *indent([*forget("NEW"), *segment_writes.update_in_place(target, put("NEW"))]),
        "END IF;",
    ]


def refuse_old_snapshots(target: Target) -> list[str]:
    """Raises 40001 for a snapshot that is older than the generation's mode, or than its segments."""
    layout = f", {target.layout}" if target.layout else ""
    return [
        "-- Was the switch to this mode, or a swap of segments, after our snapshot? Then it doesn't see all entries.",
        f"IF one_snapshot AND NOT roir.is_in_mode({target.generation_id}, '{target.mode}'{layout}) THEN",
        "  RAISE EXCEPTION USING ERRCODE = 'serialization_failure',",
        "    MESSAGE = 'could not serialize access: an index entry of this row was written after the "
        "transaction''s snapshot',",
        f"    DETAIL = 'roir generation {target.generation_id}', HINT = 'Retry the transaction.';",
        "END IF;",
        "",
    ]


def _image(record: str, columns: list[str] | tuple[str, ...]) -> str:
    # ::record: without it PostgreSQL would compare the columns of `ROW(…) *<> ROW(…)` one by one.
    return f"ROW({', '.join(f'{record}.{quote(column)}' for column in columns)})::record"


def _columns(entry: Entry) -> str:
    return ", ".join(entry.physical())
