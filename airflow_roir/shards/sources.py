"""Reads the definitions of the tables in the shards, and checks that they are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.source import catalog, checks
from airflow_roir.engine.source.catalog import identity_columns
from airflow_roir.engine.source.source import Column, Source
from airflow_roir.errors import Complaints, InvalidInput, RightMissing, SourceChanged
from airflow_roir.nearest import meant_of
from airflow_roir.shards.shard import SHARD_SCHEMA, Feed

ROLE = "SELECT session_user::text, rolsuper FROM pg_roles WHERE rolname = session_user"


def read(connection: Connection, name: QualifiedName, ignore_row_security: bool = False) -> Source:
    """Reads a shard's table. Raises NotFound, InvalidInput, and RightMissing if the login doesn't own it."""
    source = catalog.read_source(connection, name)
    check_owner(connection, source)
    checks.check_row_security(connection, source, ignore_row_security)
    return source


def read_by_oid(connection: Connection, feed: Feed) -> Source:
    """As `read`, by a feed's oid. Raises NotFound, and SourceChanged if a restore has given the table another oid."""
    if execute(connection, f"SELECT {SHARD_SCHEMA}.is_restored(%(name)s)", {"name": feed.outbox}).scalar_one():
        raise SourceChanged(
            f"shard {quote(feed.shard.name)} was restored from a dump, which gives each table another oid: rebuild the "
            "index; meanwhile the shipper ships on"
        )
    source = catalog.read_source_by_oid(connection, feed.source_oid)
    check_owner(connection, source)
    return source


def check_owner(connection: Connection, source: Source) -> None:
    """Raises RightMissing unless the login is the owner of the table: its code must not run with more rights."""
    role = execute(connection, ROLE).one()
    if source.owner != role.session_user:
        raise RightMissing(
            f"table {source.name} belongs to {quote(source.owner)}: connect to the shard as that role, not as "
            f"{quote(role.session_user)}, or code of the table would run with the rights of another role"
        )


def indexed_columns(source: Source, definition: IndexDefinition) -> list[str]:
    """The columns that an entry holds: key, primary key and included ones, each once."""
    return [*identity_columns(source, definition), *definition.include]


def agree(sources: Mapping[str, Source], definition: IndexDefinition) -> None:
    """Raises InvalidInput unless the indexed columns are alike in all shards. sources: by the shards' names."""
    (first, one), *others = sources.items()
    missing = Complaints()
    for column in (*definition.key, *definition.include):
        for name, source in sources.items():
            if column not in source.columns:
                near = meant_of(column, source.columns)
                missing.add(
                    InvalidInput(f"shard {quote(name)}: table {source.name} has no column {quote(column)}{near}")
                )
    missing.settle()
    for column in indexed_columns(one, definition):
        for name, source in sources.items():
            if source.columns[column].virtual:
                raise InvalidInput(
                    f"shard {quote(name)}: column {quote(column)} of {source.name} is a virtual generated column, "
                    "which triggers can't see; make it STORED"
                )
        if one.columns[column].oid_alias:
            raise InvalidInput(
                f"column {quote(column)} of {one.name} is of type {one.columns[column].type}, which holds oids of its "
                "own database; they mean nothing on another server"
            )
    for name, other in others:
        if other.primary_key != one.primary_key:
            raise InvalidInput(
                f"the primary key of {one.name} is ({_listed(one.primary_key)}) in shard {quote(first)}, but "
                f"({_listed(other.primary_key)}) in shard {quote(name)}; all shards must have the table alike"
            )
        for column in indexed_columns(one, definition):
            ours, theirs = _shape(one.columns[column]), _shape(other.columns[column])
            if ours != theirs:
                raise InvalidInput(
                    f"column {quote(column)} of {one.name} is {ours} in shard {quote(first)}, but {theirs} in shard "
                    f"{quote(name)}; all shards must have the indexed columns alike"
                )


def _shape(column: Column) -> str:
    return column.type if column.collation is None else f"{column.type} COLLATE {column.collation}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(quote, names))
