"""The rows of one shard, by their primary keys, as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    Text,
    and_,
    cast,
    func,
    literal,
    null,
    select,
    tuple_,
)
from sqlalchemy import column as new_column
from sqlalchemy import table as new_table
from sqlalchemy.dialects.postgresql import OID
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.types import UserDefinedType

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine.retry.trouble import first_line, said
from airflow_roir.errors import InvalidInput, NotStrict, RightMissing, RoirError, ShardUnreachable
from airflow_roir.reading.candidates import NO_RIGHT, Home, KeyColumn, is_away, key_text, state_of, with_session

# The most rows that one statement asks a shard for: it contains their keys.
KEYS = 1000

Key = tuple[Any, ...]


class _Type(UserDefinedType[Any]):
    """A type by its name on the index server: the driver may bind a value as another type (float4, char)."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        return self.name


def ask(
    engine: Engine,
    shard: str,
    home: Home | None,
    source: Any,
    table: Any,
    primary_key: Sequence[KeyColumn],
    where: ColumnElement[bool],
    keys: Sequence[Key],
) -> dict[str, Any]:
    """The rows of these primary keys that meet the condition, by the texts of their keys, and no others.

    home: the database that the shard must be: another database, a standby, or one that lost commits doesn't have the
    truth. None: any. Raises ShardUnreachable, NotStrict, InvalidInput (it is another table), RightMissing, RoirError.
    """
    found: dict[str, Any] = {}
    for start in range(0, len(keys), KEYS):
        part = keys[start : start + KEYS]
        try:
            found |= with_session(engine, partial(_read, shard, home, source, table, primary_key, where, part))
        except DBAPIError as error:
            if is_away(error):
                raise ShardUnreachable(f"shard {quote(shard)} can't be asked: {first_line(error)}", shard) from error
            if state_of(error) == NO_RIGHT:
                raise RightMissing(
                    f"shard {quote(shard)}: {said(error)}; readers need SELECT on the table, and for bounded and "
                    "strict also USAGE on schema roir_shard and SELECT on roir_shard.home and roir_shard.outbox"
                ) from error
            raise RoirError(f"shard {quote(shard)}: {said(error)}") from error
    return found


def _read(
    shard: str,
    home: Home | None,
    source: Any,
    table: Any,
    primary_key: Sequence[KeyColumn],
    where: ColumnElement[bool],
    keys: Sequence[Key],
    connection: Connection,
) -> dict[str, Any]:
    here: Any
    if home is None:
        here = select(literal(True).label("asked")).subquery("roir_home")
        heads: list[Any] = [null(), null(), null(), null()]
    else:
        outbox = new_table(
            "outbox", new_column("name", Text), new_column("tick"), new_column("source"), schema="roir_shard"
        )
        asked_for = func.pg_catalog.to_regclass(_name(connection, table).sql)
        here = (
            select(
                cast(new_column("token"), Text).label("token"),
                select(outbox.c.tick).where(outbox.c.name == home.outbox).scalar_subquery().label("tick"),
                func.pg_catalog.pg_is_in_recovery().label("standby"),
                select(outbox.c.source == cast(asked_for, OID))
                .where(outbox.c.name == home.outbox)
                .scalar_subquery()
                .label("same"),
            )
            .select_from(new_table("home", schema="roir_shard"))
            .subquery("roir_home")
        )
        heads = [here.c.token, here.c.tick, here.c.standby, here.c.same]
    mapped = not isinstance(source, FromClause)
    columns = [table.c[one.name] for one in primary_key]
    wanted: list[Any] = [*heads, columns[0].is_not(None), key_text(columns)]
    wanted += [source] if mapped else list(table.columns)
    head = len(wanted) - (1 if mapped else len(table.columns))
    query = select(*wanted).select_from(here.outerjoin(source, and_(_is_one_of(primary_key, columns, keys), where)))
    found: dict[str, Any] = {}

    def asked(session: Session) -> list[tuple[Any, Any]]:
        # The same result twice: the columns about its origin, and the rows as SQLAlchemy's own.
        result = session.execute(query)
        # Values of a column needn't be hashable; an instance that loads others by a join comes in several rows.
        frozen = (result.unique() if mapped else result).freeze()
        told = frozen().columns(*range(head)).all()
        rows = frozen().scalars(head).all() if mapped else frozen().columns(*range(head, len(wanted))).all()
        return list(zip(told, rows, strict=True))

    with Session(connection) as session:
        answered = asked(session)
        if home is not None and not answered:
            # A class may have criteria of its own (inheritance, inner joins), which have removed the row about the
            # origin. Before the rows, in a transaction of its own: a standby may be promoted meanwhile.
            session.rollback()
            _check(shard, home, table, *session.execute(select(*heads)).one())
            session.rollback()
            answered = asked(session)
        session.expunge_all()
    for (token, tick, standby, same, present, text), row in answered:
        if home is not None:
            _check(shard, home, table, token, tick, standby, same)
        if present:
            found[text] = row
    return found


def _name(connection: Connection, table: Any) -> QualifiedName:
    """The table's name in a statement: the engine's option `schema_translate_map` may set the schema."""
    translated = connection.get_execution_options().get("schema_translate_map") or {}
    return QualifiedName(translated.get(table.schema, table.schema), table.name)


def _check(shard: str, home: Home, table: Any, token: str, tick: int | None, standby: bool, same: bool | None) -> None:
    if same is False and table.name != home.table.name:
        raise InvalidInput(
            f"shard {quote(shard)}: {table.fullname} isn't the table that is indexed there, {home.table}"
        )
    why = None
    if home.level == "eventual":
        return
    if standby:
        why = "a standby answers, which may be behind; its primary must be asked"
    elif home.token is not None and token != home.token:
        why = "another database answers than the one that was added"
    elif tick is None:
        why = "its capture is gone"
    elif not same:
        why = f"{table.fullname} is another table there than the one that is indexed"
    elif tick < home.tick:
        why = "it has lost commits that the index has"
    if why is not None:
        raise NotStrict(f"shard {quote(shard)}: {why} (docs/troubleshooting.md#not-strict)")


def _is_one_of(
    primary_key: Sequence[KeyColumn], columns: Sequence[ColumnElement[Any]], keys: Sequence[Key]
) -> ColumnElement[bool]:
    types = [_Type(one.type) for one in primary_key]
    ours: list[Any] = [
        cast(column, _Type(one.type)) if one.domain else column
        for one, column in zip(primary_key, columns, strict=True)
    ]
    given: list[list[Any]] = [[cast(literal(value), t) for value, t in zip(key, types, strict=True)] for key in keys]
    if len(ours) == 1:
        condition: ColumnElement[bool] = ours[0].in_([key[0] for key in given])
        return condition
    return tuple_(*ours).in_([tuple_(*key) for key in given])
