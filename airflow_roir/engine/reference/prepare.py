"""Begins a reference: its columns, functions, triggers and the foreign key, in one short transaction.

From its commit on, every write to the child is checked. Rows that were there before have no place yet: the operation's
workers fill them (`filling.py`). The foreign key is NOT VALID until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import QualifiedName, parse_columns, parse_name, quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.new_operation import (
    SET_ROWS,
    STATUS,
    BegunOperation,
    begin_or_adopt,
    insert_operation,
)
from airflow_roir.engine.database import Database, execute, to_json
from airflow_roir.engine.generation import cut
from airflow_roir.engine.generation.cut import Piece
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.feeds import is_apart
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.locks.table_lock import check_name, telling_of_names
from airflow_roir.engine.prepare import INSERT_RANGES
from airflow_roir.engine.readers import view
from airflow_roir.engine.reference import functions, record
from airflow_roir.engine.reference.reference import ACTIONS, Reference, fill_trigger_name, trigger_name
from airflow_roir.engine.schema import rights
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source import owner as owners
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, OperationRunning, RightMissing
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.operation import Kind, Phase
from airflow_roir.options import ReferenceOptions

VERSION = "SELECT current_setting('server_version_num')::int"
# NOT VALID for a partitioned child.
PARTITIONED_FROM = 180000
BATCH_ROWS = 2_000
TRUSTED = """
SELECT c.oid::regclass::text AS name, pg_get_userbyid(c.relowner) AS owner, current_user AS me
  FROM pg_class c WHERE c.oid = ANY (%(oids)s) AND NOT roir.trusts(c.relowner) ORDER BY 1 LIMIT 1
"""
GENERATED = """
SELECT a.attname::text FROM pg_attribute a
 WHERE a.attrelid = %(child)s AND a.attname = ANY (%(names)s) AND a.attgenerated <> '' LIMIT 1
"""


def parse_child(text: str) -> tuple[QualifiedName, tuple[str, ...]]:
    """Reads `payments(order_id)`: the child and its columns. Raises InvalidInput."""
    table, bracket, rest = text.rpartition("(")
    if not bracket or not rest.rstrip().endswith(")"):
        raise InvalidInput(f"child {text!r}: write the table with its columns, payments(order_id)")
    return parse_name(table.strip(), "child"), parse_columns(rest.rstrip()[:-1], "child")


def begin(
    database: Database,
    child: str,
    index: str,
    options: ReferenceOptions,
    actor: str,
    *,
    on_delete: str = "no-action",
    on_update: str = "no-action",
    deferred: bool = False,
    name: str | None = None,
    added: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> BegunOperation:
    """Begin a foreign key of a child to a unique index, or adopt the unfinished one, and start its operation.

    child: as `parse_child` reads it. on_delete, on_update: of `ACTIONS`; on_update is `no-action` or `cascade`.
    deferred: the check comes at the commit. name: the constraint's. added: names of the columns to add.
    Raises NotFound, InvalidInput, RightMissing, LockNotAcquired, and all that `begin_or_adopt` raises.
    """
    table, keys = parse_child(child)
    if on_delete not in ACTIONS:
        raise InvalidInput(f"on delete {on_delete!r}: choose one of {', '.join(ACTIONS)}")
    asked: dict[str, Any] = {
        "on_delete": on_delete,
        "on_update": on_update,
        "deferred": deferred,
        "name": name,
        "added": tuple(added),
    }

    def new(row: Row[Any] | None) -> BegunOperation:
        assert row is not None
        return _begin(database, row, table, keys, options, actor, asked, report)

    wanted = parse_name(index, "index")
    return begin_or_adopt(
        database, lambda c: operations.find_index(c, wanted), [Kind.REFERENCE], options, actor, new, report
    )


def _begin(
    database: Database,
    index: Row[Any],
    table: QualifiedName,
    keys: Sequence[str],
    options: ReferenceOptions,
    actor: str,
    asked: dict[str, Any],
    report: Callable[[str], None],
) -> BegunOperation:
    with database.transaction() as connection:
        child = catalog.read_source(connection, table)
        parent = catalog.read_source_by_oid(connection, index.source_oid)
        planned = _planned(connection, index, parent, child, keys, asked)
        rows, pieces = cut.cut_source(connection, child, lambda rows: max(1, min(rows, cut.ROWS_PER_RANGE)))
    named = str(operations.index_name(index))
    attempts = Attempts(
        database,
        f"{parent.sql} or {child.sql}",
        [*parent.relations, *child.relations],
        options.lock_timeout_ms,
        options.lock_patience_s,
        waiter=Waiter("reference", named),
    )

    def body(connection: Connection) -> BegunOperation:
        attempts.lock(connection, [parent.sql], "SHARE ROW EXCLUSIVE")
        attempts.lock(connection, [child.sql], "ACCESS EXCLUSIVE")
        for one in (parent, child):
            check_name(connection, one.sql, one.oid)
        view.hold(connection, index.id)
        generation = operations.active_generation(connection, index)
        if execute(connection, STATUS, {"id": generation.id}).scalar_one() != GenerationStatus.ACTIVE:
            raise OperationRunning(f"index {named}: it was dropped, published or reverted just now; try again")
        entry = Entry.from_json(generation.entry)
        made = [column for column in planned.added if column not in child.columns]
        number = record.write(connection, index.id, planned, made, actor)
        _make(connection, replace(planned, id=number), parent, child, operations.index_name(index).sql, made)
        operation = insert_operation(
            connection,
            index_id=index.id,
            generation_id=generation.id,
            kind=Kind.REFERENCE,
            phase=Phase.FILL,
            options=options,
            source=parent,
            entry=entry,
            actor=actor,
            batch_rows=BATCH_ROWS,
            rows_estimate=0,
        )
        execute(connection, SET_ROWS, {"operation": operation, "rows": rows})
        execute(connection, record.SET_OPERATION, {"operation": operation, "id": number})
        execute(connection, INSERT_RANGES, {"operation": operation, "ranges": to_json(_ranges(pieces))})
        said = f"{quote(planned.name)} of {child.sql}"
        operations.record_event(connection, index.id, operation, actor, Kind.REFERENCE.value, said)
        return BegunOperation(operation, generation.id, named, Kind.REFERENCE.value, adopted=False)

    with telling_of_names():
        return attempts.run(body, report, [child.sql])


def _planned(
    connection: Connection,
    index: Row[Any],
    parent: Source,
    child: Source,
    keys: Sequence[str],
    asked: dict[str, Any],
) -> Reference:
    generation = operations.active_generation(connection, index)
    if is_apart(connection, generation.id):
        raise InvalidInput(f"index {operations.index_name(index)}: a foreign key can't reference an index over shards")
    planned = record.plan(connection, parent, Entry.from_json(generation.entry), child, keys, **asked)
    stranger = execute(connection, TRUSTED, {"oids": [parent.oid, child.oid]}).first()
    if stranger is not None:
        raise RightMissing(
            f"table {stranger.name} belongs to role {quote(stranger.owner)}, whose triggers and checks would run as "
            f"{quote(stranger.me)}. Run roir reference as the tables' owner"
        )
    if child.partitioned and execute(connection, VERSION).scalar_one() < PARTITIONED_FROM:
        raise InvalidInput(
            f"table {child.name} is partitioned: PostgreSQL before 18 can't add a foreign key there without a long lock"
        )
    generated = execute(connection, GENERATED, {"child": child.oid, "names": list(keys)}).scalar()
    if generated is not None:
        raise InvalidInput(f"table {child.name}: column {quote(generated)} is generated, so no trigger can read it")
    return planned


def _ranges(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    return [
        {"ordinal": n, "relation": piece.relation, "lower": piece.lower, "upper": piece.upper}
        for n, piece in enumerate(pieces)
    ]


def _make(
    connection: Connection, reference: Reference, parent: Source, child: Source, index: str, made: Sequence[str]
) -> None:
    """Create all that a reference consists of. index: the index's view, as it is written."""
    execute(connection, "SET LOCAL roir.own_ddl = 'on'")
    for name, column in zip(reference.added, reference.parent_rest, strict=True):
        if name in made:
            collation = f" COLLATE {column.collation}" if column.collation else ""
            execute(connection, f"ALTER TABLE {child.sql} ADD COLUMN {quote(name)} {column.type}{collation}")
    for statement in functions.views(reference, parent, index):
        execute(connection, statement)
    make_functions(connection, reference, parent, child, filling=True)
    fill_name, name = fill_trigger_name(reference.id), trigger_name(reference.id)
    for statement in functions.triggers(reference, child.sql, parent.sql, fill_name, name):
        execute(connection, statement)
    ours = ", ".join(map(quote, (*reference.keys, *reference.added)))
    theirs = ", ".join(quote(column.name) for column in (*reference.parent_keys, *reference.parent_rest))
    when = " DEFERRABLE INITIALLY DEFERRED" if reference.deferred else ""
    execute(
        connection,
        f"ALTER TABLE {child.sql} ADD CONSTRAINT {quote(reference.name)} FOREIGN KEY ({ours}) "
        # A move to another partition changes the rest of the parent's primary key, and takes the child along.
        f"REFERENCES {parent.sql} ({theirs}) ON UPDATE CASCADE ON DELETE {ACTIONS[reference.on_delete]}{when} "
        "NOT VALID",
    )


def make_functions(connection: Connection, reference: Reference, parent: Source, child: Source, filling: bool) -> None:
    """Create or replace a reference's functions, with their owners and rights. filling: rows are still to be filled."""
    of_parent, of_child = quote(parent.owner), quote(child.owner)
    views = [reference.object("index"), reference.object("parent")]
    rights.take_back(connection, views)
    for name, right in zip(views, ("SELECT", "SELECT, UPDATE"), strict=True):
        execute(connection, f"GRANT {right} ON {name} TO {of_parent}")
    keys = reference.key_types
    rest = ", ".join(column.cast for column in reference.parent_rest)
    for text, signature, source, caller in (
        (functions.find(reference), f"find({keys},text)", parent, of_child),
        (functions.fill(reference), "fill()", child, None),
        (functions.check(reference), "check()", child, None),
        (functions.children(reference), f"children({keys})", child, of_parent),
        (functions.adopt(reference), f"adopt({keys},{rest})", child, of_parent),
        (functions.change(reference, filling), "change()", parent, None),
    ):
        execute(connection, text)
        name = reference.object(signature)
        rights.take_back(connection, functions=[name])
        if caller is not None:
            execute(connection, f"GRANT EXECUTE ON FUNCTION {name} TO {caller}")
            execute(connection, f"GRANT EXECUTE ON FUNCTION {name} TO CURRENT_USER")
        owners.hand_over(connection, source, name)
