"""Surveys the shards for prepare, before anything is created: tables, ranges, a sample for the segments."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition, QualifiedName, Scan, quote
from airflow_roir.engine.database import Database, execute, said, sqlstate
from airflow_roir.engine.generation import cut as plans
from airflow_roir.engine.generation.cut import Piece, Plan, make_plan
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.entry_size import cover
from airflow_roir.engine.locks.locks import EXCLUSIVE, Attempts
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.source import catalog, checks, owner, replication
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import Complaints, InvalidInput, RoirError, SourceChanged
from airflow_roir.options import AUTO, SOURCE, BuildOptions
from airflow_roir.shards import home, rules, shard, sources
from airflow_roir.shards.copy import shape_table
from airflow_roir.shards.copy.copies import copy_in, copy_out
from airflow_roir.shards.shard import SHARD_SCHEMA, Shard
from airflow_roir.shards.unique import uniqueness

DEFAULT_COLUMN = "shard"
ENCODING = "SELECT current_setting('server_encoding')"
# No value of this size fits into a B-tree, however well it is compressed.
HUGE_BYTES = 64 << 10
# Data exception, integrity constraint violation: from an enum or a domain that differs on the index server.
NOT_TAKEN = ("22", "23")
OIDS_INSIDE = """
SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type
  FROM pg_attribute a CROSS JOIN LATERAL roir.type_tree(a.atttypid) x (oid) JOIN pg_type t ON t.oid = x.oid
 WHERE a.attrelid = %(source)s AND a.attname = ANY (%(columns)s)
   AND t.typnamespace = 'pg_catalog'::regnamespace AND t.typname ~ '^(reg[a-z]+|aclitem)$' LIMIT 1
"""


@dataclass(frozen=True)
class ShardPlan:
    """One shard's table, and its ranges."""

    shard: Shard
    source: Source
    plan: Plan


@dataclass(frozen=True)
class Survey:
    """A survey of the shards. table: its full name there; shard_column: the column with the shard's name."""

    shards: tuple[ShardPlan, ...]
    table: QualifiedName
    shard_column: str

    @property
    def any_source(self) -> Source:
        """The table of one shard, which is alike in all."""
        return self.shards[0].source

    @property
    def listed(self) -> str:
        """The table and the shards, for people."""
        return f"{self.table} in {', '.join(quote(one.shard.name) for one in self.shards)}"

    @property
    def rows(self) -> int:
        """The estimated rows of all shards."""
        return sum(one.plan.rows for one in self.shards)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of all shards, in turns, so that workers spread over them."""
        dealt = zip_longest(*([replace(p, shard_id=one.shard.id) for p in one.plan.pieces] for one in self.shards))
        return tuple(piece for piece in chain.from_iterable(dealt) if piece is not None)


def check_options(definition: IndexDefinition, options: BuildOptions) -> None:
    """Raises InvalidInput for options that aren't possible over shards."""
    if options.scan not in (AUTO, SOURCE, Scan.KEY.value):
        raise InvalidInput(f"index {definition.name}: scan is {options.scan}, but shards are read by key; leave it out")
    if options.census or options.on_duplicate != BuildOptions.on_duplicate:
        raise InvalidInput(
            f"index {definition.name}: a build over shards looks for no duplicates; leave census and on_duplicate out. "
            "roir announce lists them, before a unique index is enforced"
        )


def look(
    index_server: Database, definition: IndexDefinition, options: BuildOptions
) -> tuple[list[tuple[Shard, Database, Source]], QualifiedName]:
    """The tables in the shards, which are alike, and their full name. Raises the first reason against a build."""
    check_options(definition, options)
    with index_server.transaction() as connection:
        named = [shard.find(connection, name) for name in definition.shards]
        encoding = str(execute(connection, ENCODING).scalar_one())
    found = []
    for one in named:
        database = one.database(index_server.application_name, index_server.limits)
        _check_encoding(database, one, encoding)
        found.append((one, database, _read(database, one, definition, options)))
    assert found
    sources.agree({one.name: source for one, _, source in found}, definition)
    tables = {source.name for _, _, source in found}
    if len(tables) > 1:
        listed = ", ".join(f"{source.name} in shard {quote(one.name)}" for one, _, source in found)
        raise InvalidInput(f"index {definition.name}: {definition.source} is {listed}; give the table with its schema")
    return found, found[0][2].name


def objections(index_server: Database, definition: IndexDefinition, options: BuildOptions) -> list[RoirError]:
    """The reasons against a build: one error for each shard that has one."""
    unknown = Complaints()
    named = []
    with index_server.transaction() as connection:
        for name in definition.shards:
            with unknown.noted():
                named.append(shard.find(connection, name))
    unknown.settle()
    against: list[RoirError] = []
    for one in named:
        try:
            _read(one.database(index_server.application_name, index_server.limits), one, definition, options)
        except RoirError as error:
            against.append(error)
        except DBAPIError as error:
            against.append(InvalidInput(f"shard {quote(one.name)} can't be looked at: {reason_of(error)}"))
    if not against:
        look(index_server, definition, options)
    return against


def survey(
    index_server: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Survey, Sequence[Source]]:
    """Reads and cuts the tables in all shards. Takes no lock but ACCESS SHARE, one shard after the other."""
    found, table = look(index_server, definition, options)
    # Each shard gets its share of the ranges; all together are at least four for each worker.
    share = replace(
        options,
        parallelism=-(-options.parallelism // len(found)),
        ranges=options.ranges and max(1, options.ranges // len(found)),
        segments=1,
    )
    planned = []
    for one, database, source in found:

        def cut(connection: Connection, source: Source = source) -> Plan:
            return make_plan(connection, source, definition, share)

        readers = Attempts(database, source.sql, source.relations, options.lock_timeout_ms, 5.0, EXCLUSIVE)
        planned.append(ShardPlan(one, source, readers.run(cut, report)))
    return Survey(tuple(planned), table, definition.shard_column or DEFAULT_COLUMN), [s for _, _, s in found]


def check_shape(shape: Source, found: Survey, definition: IndexDefinition) -> None:
    """Raises InvalidInput if the shards' tables have changed since the index was created."""
    for one in found.shards:
        alike = one.source.columns
        if shape.primary_key[1:] != one.source.primary_key or any(
            name not in alike or (alike[name].type, alike[name].collation) != (column.type, column.collation)
            for name, column in shape.columns.items()
            if name != found.shard_column
        ):
            raise InvalidInput(
                f"index {definition.name}: {found.table} in shard {quote(one.shard.name)} has another primary key or "
                "other types than when the index was made. Drop the index and build it again"
            )


@contextmanager
def sampled_shape(
    connection: Connection, index_server: Database, found: Survey, definition: IndexDefinition, options: BuildOptions
) -> Iterator[tuple[Source, Entry]]:
    """Yields a shape table with a sample of all shards, and its entry. Only this session sees it; it is rolled back."""
    with connection.begin_nested() as savepoint:
        name = shape_table.create(connection, found.any_source, definition, found.shard_column)
        source = catalog.read_source(connection, name)
        checks.check_definition(connection, source, definition)
        entry = Entry.of(source, definition, options.covering, 1)
        entry = cover(connection, definition.name, source, entry, options.covering)
        stored = [c.source for i, c in enumerate(entry.columns) if i < entry.identity or c.covered]
        for column in entry.columns:
            if column.source not in stored:
                execute(connection, f"ALTER TABLE {name.sql} ALTER {quote(column.source)} DROP NOT NULL")
        for one in found.shards:
            _sample(connection, index_server, found, one, name, stored, definition)
        yield source, entry
        savepoint.rollback()


def whole_plan(
    connection: Connection, found: Survey, sampled: Source, definition: IndexDefinition, options: BuildOptions
) -> Plan:
    """The plan over all shards. sampled: the shape table with a sample; this server's order of it cuts the segments."""
    wanted = plans.segments_for(options, found.rows)
    partition, bounds = plans.cut_segments(connection, sampled, definition, "", wanted)
    size = sum(one.plan.source_bytes for one in found.shards)
    seconds = sum(one.plan.sample_seconds for one in found.shards)
    rows = sum(one.plan.sampled for one in found.shards)
    return Plan(found.rows, size, found.pieces, tuple(bounds), partition, rows, seconds)


def _read(database: Database, one: Shard, definition: IndexDefinition, options: BuildOptions) -> Source:
    """Reads a shard's table. Raises the reason against a build, with the shard's name."""
    try:
        return _checked(database, one, definition, options)
    except RoirError as error:
        where = f"shard {quote(one.name)}"
        if where in str(error):
            raise
        raise type(error)(f"{where}: {error}") from error


def _checked(database: Database, one: Shard, definition: IndexDefinition, options: BuildOptions) -> Source:
    assert definition.source is not None
    with database.transaction() as connection:
        home.check(connection, one)
        checks.check_server(connection)
        source = sources.read(connection, definition.source, options.ignore_row_security)
        checks.check_collations(connection, source)
        if definition.unique:
            uniqueness.check(connection, one, source, definition)
        replication.check_publications(connection, options.ignore_publications, [SHARD_SCHEMA])
        _check_types(connection, source, definition)
        return source


def _check_encoding(database: Database, one: Shard, encoding: str) -> None:
    """Raises InvalidInput for SQL_ASCII beside another encoding: a text would have two forms."""
    with database.transaction() as connection:
        there = str(execute(connection, ENCODING).scalar_one())
    if there != encoding and "SQL_ASCII" in (there, encoding):
        raise InvalidInput(
            f"shard {quote(one.name)}: its database is in {there}, that of the index in {encoding}. SQL_ASCII doesn't "
            "define its bytes' meaning, so all databases must be in SQL_ASCII, or none"
        )


def _check_types(connection: Connection, source: Source, definition: IndexDefinition) -> None:
    """Raises InvalidInput for types that have oids inside, which mean nothing on another server."""
    columns = [*definition.key, *definition.include, *source.primary_key]
    row = execute(connection, OIDS_INSIDE, {"source": source.oid, "columns": columns}).first()
    if row is not None:
        raise InvalidInput(
            f"column {quote(row.name)} of {source.name} is of type {row.type}, which holds oids of its own database; "
            "they mean nothing on another server"
        )


def _check_equality(
    connection: Connection,
    there: Connection,
    one: ShardPlan,
    shape: QualifiedName,
    columns: Sequence[str],
    definition: IndexDefinition,
) -> None:
    """Raises InvalidInput if values of the key or the primary key may be equal on one server but not on the other."""
    ours = rules.read(connection, catalog.read_source(connection, shape).oid, columns)
    theirs = rules.read(there, one.source.oid, columns)
    for column in catalog.identity_columns(one.source, definition):
        unlike = rules.unlike(ours[column], theirs[column])
        if any(rule.startswith(rules.EQUALITY) for rule in unlike):
            raise InvalidInput(
                f"index {definition.name}: shard {quote(one.shard.name)} and the index server compare values of column "
                f"{quote(column)} of {one.source.name} by different rules: {rules.told(unlike)}. "
                "Give both the same collation, of the same version of its library, or take a column that is equal byte "
                'for byte, such as a generated column lower(…) of type text COLLATE "C"'
            )


def _sample(
    connection: Connection,
    index_server: Database,
    found: Survey,
    one: ShardPlan,
    into: QualifiedName,
    columns: Sequence[str],
    definition: IndexDefinition,
) -> None:
    """Copies a sample of a shard's rows, as many as its share of all rows, into the shape table."""
    share = one.plan.rows / found.rows if found.rows else 1.0
    most = max(1, round(index_server.limits.sample_rows * share))
    read = [name for name in columns if name != found.shard_column]
    rows = io.BytesIO()
    with one.shard.database(index_server.application_name, index_server.limits).transaction() as there:
        catalog.hold(there, one.source)
        if not owner.is_trusted(there, one.source):
            raise SourceChanged(f"table {one.source.name} has another owner now; start again")
        _check_equality(connection, there, one, into, read, definition)
        sample = plans.sample_of(there, one.source)
        size = " + ".join(f"coalesce(pg_column_size(s.{quote(name)}), 0)" for name in read)
        biggest = execute(there, f"SELECT max({size}) FROM {one.source.sql} s {sample}").scalar() or 0
        if biggest > HUGE_BYTES:
            raise InvalidInput(
                f"index {definition.name}: {one.source.name} in shard {quote(one.shard.name)} has a row whose key, "
                f"primary key and covered columns take {biggest} bytes, which fit into no B-tree. Choose other key "
                "columns; include long columns, with covering auto or none"
            )
        values = ", ".join(f"s.{quote(name)}" for name in read)
        copy_out(there, f"SELECT {values} FROM {one.source.sql} s {sample} ORDER BY random() LIMIT {most}", rows)
    rows.seek(0)
    # COPY has no constants.
    literal = "'" + one.shard.name.replace("'", "''") + "'"
    execute(connection, f"ALTER TABLE {into.sql} ALTER {quote(found.shard_column)} SET DEFAULT {literal}")
    try:
        copy_in(connection, f"{into.sql} ({', '.join(map(quote, read))})", rows)
    except DBAPIError as error:
        if sqlstate(error)[:2] not in NOT_TAKEN:
            raise
        raise InvalidInput(
            f"the index server refuses rows of {one.source.name} of shard {quote(one.shard.name)}: {said(error)}. "
            "Give the index server the same types as the shard"
        ) from None
