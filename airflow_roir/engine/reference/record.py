"""The record of references: `roir.reference`, and what a reference is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute, to_json
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.reference.reference import ON_UPDATE, Reference, ReferenceStatus, object_name
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Column, Source
from airflow_roir.errors import InvalidInput, NotFound

COLUMNS = "r.*, i.schema_name, i.name AS index_name, i.source_oid"
OF_OPERATION = f"""
SELECT {COLUMNS} FROM roir.reference r JOIN roir.index i ON i.id = r.index_id WHERE r.operation_id = %(operation)s
"""
ALL = f"""
SELECT {COLUMNS} FROM roir.reference r JOIN roir.index i ON i.id = r.index_id
 WHERE %(index)s::bigint IS NULL OR r.index_id = %(index)s ORDER BY r.id
"""
INSERT = """
INSERT INTO roir.reference (operation_id, {columns}) VALUES (NULL, {values}) RETURNING id
"""
SET_OPERATION = "UPDATE roir.reference SET operation_id = %(operation)s WHERE id = %(id)s"
SET_STATUS = "UPDATE roir.reference SET status = %(to)s WHERE id = %(id)s AND status = %(expected)s"
# The child by the reference's triggers, which survive a rename and a dump; NULL if it was dropped.
CHILD = """
SELECT t.tgrelid::bigint AS oid FROM pg_trigger t
 WHERE t.tgfoid = to_regprocedure(%(function)s) AND t.tgparentid = 0 LIMIT 1
"""
CHILD_COLUMNS = """
SELECT a.attname::text AS name FROM pg_constraint c CROSS JOIN unnest(c.conkey) WITH ORDINALITY k (attnum, n)
  JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.attnum
 WHERE c.conrelid = %(child)s AND c.conname = %(name)s AND c.contype = 'f' ORDER BY k.n
"""


def plan(
    connection: Connection,
    parent: Source,
    entry: Entry,
    child: Source,
    keys: Sequence[str],
    *,
    added: Sequence[str] = (),
    name: str | None = None,
    on_delete: str = "no-action",
    on_update: str = "no-action",
    deferred: bool = False,
    number: int = 0,
) -> Reference:
    """A reference as it would be made. number: its id. Raises InvalidInput, NotFound (a column of the child)."""
    key = entry.columns[: entry.key]
    rest = [entry.columns[i] for i in entry.rest_positions]
    where = f"table {child.name}"
    if not entry.unique:
        raise InvalidInput(f"table {parent.name}: a foreign key needs a unique index; build one: roir build --unique")
    if entry.condition is not None:
        raise InvalidInput(f"table {parent.name}: the index has a condition, so it hasn't all rows; use another one")
    if outside := [column.source for column in key if not column.primary_key]:
        raise InvalidInput(
            f"table {parent.name}: column {outside[0]} isn't in the primary key; a foreign key can only reference a "
            "unique index of columns of the primary key"
        )
    if not rest:
        raise InvalidInput(f"table {parent.name}: its primary key is the index's key; reference that by PostgreSQL")
    if on_update not in ON_UPDATE:
        raise InvalidInput(f"{where}: a change of the parent's key can be refused or cascade: {' or '.join(ON_UPDATE)}")
    if len(keys) != len(key):
        raise InvalidInput(f"{where}: the index has {len(key)} key columns; name as many of the child")
    for ours, theirs in zip(keys, key, strict=True):
        _check_type(child, ours, parent, theirs.source)
    added = tuple(added) or tuple(_added_name(keys, parent, key[0].source, column.source) for column in rest)
    if len(added) != len(rest):
        raise InvalidInput(f"{where}: name {len(rest)} columns for {', '.join(column.source for column in rest)}")
    for ours, theirs in zip(added, rest, strict=True):
        if ours in child.columns:
            _check_type(child, ours, parent, theirs.source)
        if ours in keys:
            raise InvalidInput(f"{where}: column {ours} can't be both in the key and added")
    return Reference(
        id=number,
        name=name or f"{child.name.name}_{'_'.join(keys)}_fkey"[:63],
        keys=tuple(keys),
        added=tuple(added),
        parent_keys=tuple(parent.columns[column.source] for column in key),
        parent_rest=tuple(parent.columns[column.source] for column in rest),
        equals=tuple(column.equals for column in (*key, *rest)),
        on_delete=on_delete,
        on_update=on_update,
        deferred=deferred,
    )


def _added_name(keys: Sequence[str], parent: Source, key: str, column: str) -> str:
    """`order_created` for `order_id` and the parent's columns `id` and `created`."""
    first = keys[0]
    stem = first.removesuffix(f"_{key}") if first != f"_{key}" else first
    return f"{stem}_{column}" if stem != first else f"{parent.name.name}_{column}"


def _check_type(child: Source, ours: str, parent: Source, theirs: str) -> None:
    if ours not in child.columns:
        raise NotFound(f"table {child.name} has no column {quote(ours)}")
    mine, wanted = child.columns[ours], parent.columns[theirs]
    if _type(mine) != _type(wanted):
        raise InvalidInput(
            f"table {child.name}: column {quote(ours)} is of type {_type(mine)}, column {quote(theirs)} of table "
            f"{parent.name} of type {_type(wanted)}; both must be of the same type"
        )


def _type(column: Column) -> str:
    return column.comparand


def write(connection: Connection, index_id: int, reference: Reference, made: Sequence[str], actor: str) -> int:
    """Write a new reference's row; returns its id. made: the columns that the child hasn't had."""
    values = {
        "index_id": index_id,
        "name": reference.name,
        "key_columns": to_json(list(reference.keys)),
        "added_columns": to_json(list(reference.added)),
        "made_columns": to_json(list(made)),
        "on_delete": reference.on_delete,
        "on_update": reference.on_update,
        "deferred": reference.deferred,
        "created_by": actor,
    }
    statement = INSERT.format(columns=", ".join(values), values=", ".join(f"%({name})s" for name in values))
    return int(execute(connection, statement, values).scalar_one())


def of_operation(connection: Connection, operation_id: int) -> Row[Any]:
    """The reference that an operation makes. Raises NotFound once it was removed."""
    row = execute(connection, OF_OPERATION, {"operation": operation_id}).first()
    if row is None:
        raise NotFound(f"operation {operation_id}: its reference is gone")
    return row


def all_of(connection: Connection, index_id: int | None = None) -> Sequence[Row[Any]]:
    """The references to an index, or to all."""
    return execute(connection, ALL, {"index": index_id}).all()


def child_oid(connection: Connection, reference_id: int) -> int | None:
    """The oid of a reference's child; None if it was dropped, or its triggers were."""
    found: int | None = execute(connection, CHILD, {"function": f"{object_name(reference_id, 'fill')}()"}).scalar()
    return found


def load(connection: Connection, row: Row[Any]) -> tuple[Reference, Source, Source]:
    """A reference with its parent and child, by their present names. Raises NotFound."""
    parent = catalog.read_source_by_oid(connection, row.source_oid, check=False)
    oid = child_oid(connection, row.id)
    if oid is None:
        raise NotFound(f"foreign key {quote(row.name)}: its table was dropped, or its triggers were")
    child = catalog.read_source_by_oid(connection, oid, check=False)
    generation = operations.active_generation(connection, operations.read_index(connection, row.index_id))
    keys, added = list(row.key_columns), list(row.added_columns)
    present = list(execute(connection, CHILD_COLUMNS, {"child": oid, "name": row.name}).scalars())
    if len(present) == len(keys) + len(added):
        keys, added = present[: len(keys)], present[len(keys) :]
    actions: Mapping[str, Any] = {"on_delete": row.on_delete, "on_update": row.on_update, "deferred": row.deferred}
    entry = Entry.from_json(generation.entry)
    reference = plan(connection, parent, entry, child, keys, added=added, name=row.name, number=row.id, **actions)
    return reference, parent, child


def move(connection: Connection, reference_id: int, expected: ReferenceStatus, to: ReferenceStatus) -> bool:
    """Change a reference's status, if it is the expected one."""
    values = {"id": reference_id, "to": to.value, "expected": expected.value}
    return execute(connection, SET_STATUS, values).rowcount == 1
