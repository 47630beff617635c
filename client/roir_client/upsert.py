"""Inserts a row, or updates the one that has its key, by a globally unique index.

`ON CONFLICT (key) DO UPDATE` needs a constraint of PostgreSQL's catalog, which a global index isn't. So this looks for
the row, then inserts one, and looks again if another transaction was faster, as the loop in PostgreSQL's documentation
does. Each attempt is a savepoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, inspect, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapper, Session

from roir_client import registry
from roir_client.registry import Index, Registry

UNIQUE_VIOLATION, SERIALIZATION_FAILURE = "23505", "40001"

Model = TypeVar("Model")
_known: WeakKeyDictionary[Engine, Registry] = WeakKeyDictionary()


@dataclass(frozen=True)
class Upserted(Generic[Model]):
    """What `upsert` has done. row: the object, of the session; inserted: False if the row was there and was updated."""

    row: Model
    inserted: bool


def upsert(
    session: Session,
    model: type[Model],
    values: Mapping[str, Any],
    *,
    by: str | Sequence[Any],
    new: Mapping[str, Any] | None = None,
    attempts: int = 10,
) -> Upserted[Model]:
    """Inserts a row, or updates the row that has its key, and flushes the session. It doesn't commit.

    values: by the names of the model's attributes; those of the key are among them. An existing row keeps its key.
    by: a globally unique index: its name, or its key's columns as attributes or their names, in any order.
    new: more values, for an inserted row only, for example of the partition key.
    attempts: how often it tries in all, if other transactions insert and delete the key meanwhile.

    Other transactions can't change the row until this one ends. With an `AsyncSession`, call it by
    `await session.run_sync(lambda session: upsert(session, …))`.

    Raises ValueError if there is no such index, or the key has no value or a NULL, which equals no other. Raises
    SQLAlchemy's `IntegrityError` if another constraint refuses the row, or if after the last attempt the key is still
    taken by a row that the session doesn't see: a policy may hide it. At REPEATABLE READ and SERIALIZABLE it raises
    `OperationalError` (40001) if the row came or changed after the snapshot: retry the transaction.
    """
    mapper = inspect(model)
    connection = session.connection(bind_arguments={"mapper": mapper})
    table: Any = mapper.local_table
    translated = (connection.get_execution_options().get("schema_translate_map") or {}).get(table.schema, table.schema)
    index, key = _index(connection, mapper, (translated, table.name), by)
    missing = [name for name in key if values.get(name) is None]
    if missing:
        raise ValueError(f"upsert by {index} needs a value of {', '.join(missing)}")
    # The application's own pending rows are part of no attempt.
    session.flush()
    for left in reversed(range(attempts)):
        try:
            with session.begin_nested():
                return _attempt(session, model, key, values, new or {})
        except DBAPIError as error:
            if not left or not _may_retry(session, mapper, error, index):
                raise
    raise ValueError("upsert needs at least one attempt")


def _attempt(
    session: Session, model: type[Model], key: Sequence[str], values: Mapping[str, Any], new: Mapping[str, Any]
) -> Upserted[Model]:
    same = [getattr(model, name) == values[name] for name in key]
    # As an UPDATE locks it. `of`: not the tables of an eager join.
    found = select(model).where(*same).with_for_update(key_share=True, of=model)
    row = session.scalars(found, execution_options={"populate_existing": True}).unique().one_or_none()
    if row is None:
        row = model(**{**new, **values})
        session.add(row)
        session.flush()
        return Upserted(row, inserted=True)
    for name, value in values.items():
        if name not in key:
            setattr(row, name, value)
    session.flush()
    return Upserted(row, inserted=False)


def _may_retry(session: Session, mapper: Mapper[Any], error: DBAPIError, index: Index) -> bool:
    """True if a new snapshot may find the row."""
    state, about = _diagnosis(error)
    if state == UNIQUE_VIOLATION:
        return about == index.name.rpartition(".")[2]
    if state != SERIALIZATION_FAILURE:
        return False
    # At READ COMMITTED: the row has moved to another partition.
    level = session.execute(text("SHOW transaction_isolation"), bind_arguments={"mapper": mapper}).scalar_one()
    return bool(level == "read committed")


def _diagnosis(error: DBAPIError) -> tuple[str | None, str | None]:
    """An error's SQLSTATE and constraint. psycopg's errors have a `diag`; asyncpg's own error is the cause."""
    found: Any = error.orig
    state = getattr(found, "sqlstate", None) or getattr(found, "pgcode", None)
    about = getattr(found, "diag", None) or getattr(found, "__cause__", None)
    return state, getattr(about, "constraint_name", None)


def _index(
    connection: Any, mapper: Mapper[Any], table: tuple[str | None, str], by: str | Sequence[Any]
) -> tuple[Index, list[str]]:
    """The index, and the model's attributes of its key."""
    for known in (_known.get(connection.engine), None):
        # The index may be new.
        if known is None:
            known = _known[connection.engine] = registry.read(lambda sql: connection.execute(text(sql)).scalar())
        for index in known.of(*table):
            columns = [column.name for column in index.key[: index.unique]]
            if len(columns) < index.unique or set(index.identity) <= {*columns}:
                continue
            attributes = _attributes(mapper, columns)
            if attributes is not None and _is_meant(by, index, attributes):
                return index, attributes
    what = by if isinstance(by, str) else ", ".join(map(_name, by))
    raise ValueError(f"{'.'.join(filter(None, table))} has no published unique index {what}")


def _attributes(mapper: Mapper[Any], columns: Sequence[str]) -> list[str] | None:
    """The attributes of the table's columns; None if one isn't mapped."""
    mapped = {column.name: mapper.get_property_by_column(column).key for column in mapper.columns}
    return [mapped[name] for name in columns] if {*columns} <= {*mapped} else None


def _is_meant(by: str | Sequence[Any], index: Index, attributes: Sequence[str]) -> bool:
    if isinstance(by, str):
        return by in (index.name, index.name.rpartition(".")[2])
    return sorted(map(_name, by)) == sorted(attributes)


def _name(attribute: Any) -> str:
    return attribute if isinstance(attribute, str) else str(attribute.key)
