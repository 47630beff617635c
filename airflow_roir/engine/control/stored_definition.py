"""The stored definition of an existing index, by the name that a user gave."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import IndexDefinition, QualifiedName, argument, key_list, parse_name, quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.engine.source import catalog, expressions
from airflow_roir.errors import InvalidInput

# The shards of the newest generation of an index over shards, which a rebuild keeps.
SHARDS = """
SELECT s.name FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
 WHERE l.generation_id = (SELECT max(g.id) FROM roir.generation g
                           WHERE g.index_id = %(index)s AND g.status IN ('building', 'active'))
 ORDER BY s.name
"""


def existing_index(connection: Connection, definition: IndexDefinition) -> Row[Any] | None:
    """The existing index with the definition's name, else None. Without schema that of the source, or the only one."""
    name = definition.name
    if name.schema is None and definition.source is not None:
        # A later check says whether the source can be indexed.
        found = definition.source if definition.shards else catalog.found(connection, definition.source)[1]
        name = QualifiedName(found.schema, name.name)
    return operations.index_if_there(connection, name)


def stored_definition(connection: Connection, existing: Row[Any], given: IndexDefinition) -> IndexDefinition:
    """The definition of an existing index. Raises InvalidInput if the user gave another one."""
    name = operations.index_name(existing)
    is_apart = existing.shard_table is not None
    if given.shards and not is_apart:
        raise InvalidInput(
            f"index {name} exists, and its table is in this database; for an index over shards take another name, or "
            "drop the index first"
        )
    source_name = parse_name(existing.shard_table) if is_apart else catalog.name_of(connection, existing.source_oid)
    shards = tuple(execute(connection, SHARDS, {"index": existing.id}).scalars()) if is_apart else ()
    stored = IndexDefinition(
        name,
        source_name,
        tuple(existing.key_columns),
        tuple(existing.included_columns),
        existing.is_unique,
        existing.nulls_not_distinct,
        given.shards or shards,
        existing.shard_column if given.shards or shards else None,
        tuple((name, text) for name, text in existing.expressions),
        existing.condition,
    )
    if given.unique and (given.unique, given.nulls_not_distinct) != (stored.unique, stored.nulls_not_distinct):
        raise InvalidInput(
            f"index {name} exists and is {uniqueness(stored)}; a rebuild keeps that. For a {uniqueness(given)} one, "
            "drop the index first, or build one of another name beside it"
        )
    if given.source is not None:
        if is_apart:
            same = given.source.name == source_name.name and given.source.schema in (None, source_name.schema)
            same = same and given.shard_column in (None, stored.shard_column)
        else:
            same = catalog.found(connection, given.source)[0] == existing.source_oid
        if not same or not _is_alike(connection, given, stored):
            texts = dict(stored.expressions)
            keys, included = (key_list(c, texts) or "none" for c in (stored.key, stored.include))
            where = f", where {stored.where}" if stored.where else ""
            raise InvalidInput(
                f"index {name} exists with another definition: on {source_name}, key {keys}, included {included}"
                f"{where}. A rebuild keeps its definition: leave out table and columns. For another definition, drop "
                "the index first"
            )
    return stored


def _is_alike(connection: Connection, given: IndexDefinition, stored: IndexDefinition) -> bool:
    """True if two definitions have the same columns, expressions and condition, however these are written."""
    if (given.key, given.include) != (stored.key, stored.include):
        return False
    if (given.expressions, given.where) == (stored.expressions, stored.where):
        return True
    if [name for name, _ in given.expressions] != [name for name, _ in stored.expressions]:
        return False
    assert given.source is not None
    source = catalog.read_source(connection, given.source)
    judged = {one.suffix: one.text for one in expressions.judge(connection, source, given)}
    texts = [judged[str(number)] for number, _ in enumerate(given.expressions, start=1)]
    where = judged.get(expressions.CONDITION, "")
    return (texts, where) == ([text for _, text in stored.expressions], stored.where)


def check_shards(connection: Connection, row: operations.OperationRow, index: str, definition: IndexDefinition) -> None:
    """Raises InvalidInput if an unfinished build of an index is over other shards than the definition's."""
    if not definition.shards:
        return
    present = list(execute(connection, SHARDS, {"index": row.index_id}).scalars())
    if sorted(definition.shards) != sorted(present):
        raise InvalidInput(
            f"index {index}: operation {row.id} is unfinished, and over the shards {', '.join(map(quote, present))}. "
            f"Finish it (roir resume {argument(index)}) or abort it (roir abort {argument(index)}) first"
        )


def uniqueness(definition: IndexDefinition) -> str:
    """Whether an index is unique, in the words of messages."""
    if not definition.unique:
        return "not unique"
    return "unique (NULLs not distinct)" if definition.nulls_not_distinct else "unique"
