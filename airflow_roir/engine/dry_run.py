"""The checks and the plan that prepare makes before it locks out writers; `roir plan` shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import IndexDefinition, QualifiedName, argument, quote
from airflow_roir.engine.apart import apart
from airflow_roir.engine.control import live_options, operations
from airflow_roir.engine.control.stored_definition import existing_index, stored_definition
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import entry_size
from airflow_roir.engine.generation.cut import make_plan
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.health import source_faults
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import EXCLUSIVE, Attempts
from airflow_roir.engine.locks.table_lock import check_name, lock_table, telling_of_names
from airflow_roir.engine.readers import rows_view, view
from airflow_roir.engine.scan import choosing
from airflow_roir.engine.scan.findings import Also, DryRun
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog, checks, expressions, owner, replication
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import Complaints, InvalidInput, NotFound, RightMissing, SourceChanged
from airflow_roir.nearest import meant_of
from airflow_roir.options import BuildOptions


def run(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 5.0,
    command: str | None = None,
    also: Also = lambda connection, dry: None,
) -> DryRun:
    """Validate a definition against the database and plan its ranges and segments. Changes nothing.

    patience_s: how long to try while another session locks the whole table (a TRUNCATE, an ALTER). command: the command
    that `roir status` shows as waiting for that lock; None: no wait is shown, and nothing is written. also: called in
    the planning transaction, as the table's owner.
    Raises InvalidInput or NotFound, naming the thing and the remedy; LockNotAcquired, naming the sessions that lock it.
    """
    with database.transaction() as connection:
        existing, definition, found = look(connection, definition, options)
    if found is None:
        return apart().dry_run(database, existing, definition, options, report, also)
    source = found

    def plan(connection: Connection) -> DryRun:
        checks.check_definition(connection, source, definition, existing is not None)
        if existing is None:
            check_name_is_free(connection, index)
        if options.rows_view and (existing is None or rows_view.shown(connection, existing.id) is None):
            rows_view.check_name(connection, index)
        index_id = existing.id if existing else None
        with expressions.planned(connection, source, definition, index_id) as (computed, judged):
            found = make_plan(connection, computed, definition, options)
            choice = choosing.choose(connection, computed, options, found, index_id)
            entry = Entry.of(computed, definition, options.covering, found.partition)
            entry = entry_size.cover(connection, index, computed, entry, options.covering)
            size = entry_size.measure(connection, index, computed, entry)
            kind = "rebuild" if existing else "create"
            dry = DryRun(index, computed, definition, entry, found, choice, kind, size, index_id, expressions=judged)
            also(connection, dry)
        return replace(dry, source=source)

    index = QualifiedName(definition.name.schema or source.name.schema, definition.name.name)
    waiter = None if command is None else Waiter(command, str(index))
    timeout_ms = options.lock_timeout_ms
    readers = Attempts(database, source.sql, source.relations, timeout_ms, patience_s, EXCLUSIVE, waiter)

    def plan_as_owner(connection: Connection) -> DryRun:
        # The lock keeps the table's owner as it is from here on.
        lock_table(connection, source.sql, source.oid, "ACCESS SHARE")
        check_columns(connection, source, definition)
        with owner.for_a_while(connection, source):
            found = plan(connection)
        check_name(connection, source.sql, source.oid)
        return found

    with telling_of_names():
        return readers.run(plan_as_owner, report)


def look(
    connection: Connection, definition: IndexDefinition, options: BuildOptions
) -> tuple[Row[Any] | None, IndexDefinition, Source | None]:
    """The index's row, if there is one, its definition and its source (None if the rows are in shards).

    Raises the first error that refuses the build.
    """
    # Sizes are measured by a function that is made for that, and undone.
    check_schema(connection, writes=True)
    checks.check_rights(connection)
    checks.check_server(connection)
    check_lock_timeout(connection, options)
    existing, definition = whole_definition(connection, definition)
    assert definition.source is not None
    check_options(definition, options, existing)
    live_options.columns(connection, options)
    if definition.shards:
        replication.check_publications(connection, options.ignore_publications)
        return existing, definition, None
    # An existing index knows its source by oid: another table may have taken the name since it was looked up.
    if existing is None:
        source = catalog.read_source(connection, definition.source)
    else:
        source = catalog.read_source_by_oid(connection, existing.source_oid)
        definition = replace(definition, source=source.name)
    for check in of_source(connection, source, options, existing, definition.unique):
        check()
    return existing, definition, source


def whole_definition(connection: Connection, definition: IndexDefinition) -> tuple[Row[Any] | None, IndexDefinition]:
    """The existing index, if there is one, and the definition completed from it. Raises NotFound, InvalidInput."""
    existing = existing_index(connection, definition)
    if existing is not None:
        refuse_kept(connection, existing)
        definition = stored_definition(connection, existing, definition)
    elif definition.source is None:
        raise NotFound(
            f"there is no index {definition.name} to rebuild; to create it, give the table and key columns"
            f"{operations.near_index(connection, definition.name)}"
        )
    return existing, definition


def refuse_kept(connection: Connection, existing: Row[Any]) -> None:
    """Raise InvalidInput if the index is being dropped: a build would bring it back."""
    if operations.is_kept(connection, existing.id):
        name = operations.index_name(existing)
        raise InvalidInput(f"{operations.KEPT.format(index=name)}. Then build the index, by its table and key columns")


def of_source(
    connection: Connection, source: Source, options: BuildOptions, existing: Row[Any] | None, unique: bool
) -> Iterator[Callable[[], None]]:
    """The checks of a source that may refuse a build; each can be called whether or not another one refused."""
    yield from of_table(connection, source, options, unique)
    yield partial(checks.check_bounds, connection, source)
    if existing is not None:
        yield partial(check_shape, connection, existing, source)


def of_table(
    connection: Connection, source: Source, options: BuildOptions, unique: bool
) -> Iterator[Callable[[], None]]:
    """The checks of `of_source` that need no control schema."""
    yield partial(checks.check_row_security, connection, source, options.ignore_row_security)
    yield partial(checks.check_row_locks, connection, source, unique)
    yield partial(checks.check_partition_key, connection, source)
    yield partial(replication.check_publications, connection, options.ignore_publications)
    yield partial(replication.check_subscriptions, connection, source)
    yield partial(checks.check_collations, connection, source)


def check_columns(connection: Connection, source: Source, definition: IndexDefinition) -> None:
    """Raise SourceChanged if columns were renamed or retyped since they were looked at. Under a lock they stay.

    Entries would be made of the wrong columns if two names were exchanged, and cut to the old length if a type was
    widened.
    """
    names = {*definition.columns, *source.primary_key}
    now = catalog.read_source_by_oid(connection, source.oid)
    if now.primary_key != source.primary_key or any(now.columns.get(n) != source.columns.get(n) for n in names):
        raise SourceChanged(f"table {source.name} was altered meanwhile; nothing was changed. Start again")


def check_shape(connection: Connection, existing: Row[Any], source: Source) -> None:
    """Raise InvalidInput if the view would get other columns or types: PostgreSQL can't replace it by such a view."""
    active = execute(connection, operations.ACTIVE_GENERATION, {"index": existing.id}).first()
    if active is not None:
        name = operations.index_name(existing)
        problems = source_faults.of_columns(connection, str(name), source, active.id, Entry.from_json(active.entry))
        if problem := next(iter(problems), view.renamed_column(connection, name, existing.id)):
            raise InvalidInput(problem)


def check_options(definition: IndexDefinition, options: BuildOptions, existing: Row[Any] | None) -> None:
    """Raise InvalidInput for options that don't fit together."""
    name = definition.name
    complaints = Complaints()
    if options.census and existing is not None:
        complaints.add(
            InvalidInput(
                f"index {name} exists, but a census removes all that it builds. Give the census another name, or "
                f"compare the index with its table: roir verify {argument(name)}"
            )
        )
    if options.rows_view and options.census:
        complaints.add(InvalidInput(f"index {name}: a census keeps nothing, so it can't make a rows view"))
    if options.rows_view and definition.shards:
        complaints.add(rows_view.over_shards(name))
    if options.rows_view and (definition.expressions or definition.where):
        complaints.add(rows_view.computed(name))
    if options.census and not definition.unique:
        complaints.add(InvalidInput(f"index {name}: a census lists the duplicates of a unique index: give unique, too"))
    if options.on_duplicate != BuildOptions.on_duplicate and not definition.unique:
        complaints.add(
            InvalidInput(
                f"index {name} is not unique, so it has no duplicates: give unique, too, or leave on_duplicate out"
            )
        )
    complaints.settle()


# Not here: a session's temporary schema. The server itself refuses permanent views there.
OWN_SCHEMAS = ("roir", "roir_data", "pg_catalog", "information_schema", "pg_toast")


def check_name_is_free(connection: Connection, name: QualifiedName) -> None:
    """Raise unless the view can be created: the schema exists, the name is free, and our role may create there."""
    row = execute(
        connection,
        "SELECT n.oid, has_schema_privilege(n.oid, 'CREATE') AS may, current_user AS role, "
        "(SELECT relkind::text FROM pg_class c WHERE c.relnamespace = n.oid AND c.relname = %(name)s) AS taken, "
        "(SELECT true FROM pg_type t WHERE t.typnamespace = n.oid AND t.typname = %(name)s) AS taken_by_type "
        "FROM pg_namespace n WHERE n.nspname = %(schema)s",
        {"schema": name.schema, "name": name.name},
    ).first()
    assert name.schema is not None
    if name.schema in OWN_SCHEMAS:
        raise InvalidInput(f"index {name}: schema {name.schema} is roir's or the server's own; choose another")
    if row is None:
        schemas = "SELECT nspname FROM pg_namespace WHERE has_schema_privilege(oid, 'USAGE') LIMIT 10000"
        near = meant_of(name.schema, {*execute(connection, schemas).scalars()} - {*OWN_SCHEMAS})
        raise NotFound(f"index {name}: there is no schema {quote(name.schema)}; create it first{near}")
    if row.taken or row.taken_by_type:
        raise InvalidInput(
            f"index {name}: another relation or type has that name in {quote(name.schema)}; choose another"
        )
    if not row.may:
        raise RightMissing(
            f"index {name}: role {quote(row.role)} has no right to create in schema {quote(name.schema)}; "
            f"run: GRANT USAGE, CREATE ON SCHEMA {quote(name.schema)} TO {quote(row.role)}"
        )


def check_lock_timeout(connection: Connection, options: BuildOptions) -> None:
    """Raise InvalidInput if lock_timeout_ms is so long that, in a deadlock, the server could cancel a writer first."""
    deadlock = int(execute(connection, "SELECT setting FROM pg_settings WHERE name = 'deadlock_timeout'").scalar_one())
    if options.lock_timeout_ms >= deadlock:
        raise InvalidInput(
            f"lock_timeout_ms is {options.lock_timeout_ms}, but the server's deadlock_timeout is {deadlock} ms. "
            "Choose a smaller lock_timeout_ms, so that in a deadlock the build gives way, not a writer"
        )
