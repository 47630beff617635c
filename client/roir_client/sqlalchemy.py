"""SQLAlchemy 2, Core and ORM, sync and async: queries of partitioned tables use the global indexes of airflow-roir.

    from roir_client.sqlalchemy import use_indexes

    use_indexes(engine)

A SELECT, UPDATE or DELETE whose WHERE compares the leading columns of an index with values, by `=`, `IN` or `IS NULL`
connected by AND, is preceded by a look-up in the index, on the same connection and in the same transaction. The primary
keys found are added to the statement as constants, so that PostgreSQL plans, opens and locks only the partitions of
these rows. The statement keeps its own condition: it never selects or changes a row that it wouldn't without.

Snapshots: at REPEATABLE READ and SERIALIZABLE both statements have one snapshot: nothing differs. At READ
COMMITTED each has its own, as two statements of the application would. The statement sees what it would have seen at
the moment of the look-up, minus the rows that changed since such that they don't meet the condition any more, and minus
those that moved to another partition since. The same holds at the driver's AUTOCOMMIT if the server's default level is
READ COMMITTED; at another default statements stay as they are.

A statement stays as it is if the index is being repaired or a verification found differences, if the role may not read
the index or the primary key, if more rows are found than `most_rows`, or if in any doubt. Sub-queries, CTEs, members of
a UNION, conditions of ON, lambda statements and statements with several sets of parameters stay as they are.

Take the engine out (`stop`) before you remove the schema `roir` from the database: the look-up is a function there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from sqlalchemy import Delete, Engine, Update, bindparam, event, literal_column, text
from sqlalchemy import column as new_column
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import operators
from sqlalchemy.sql.selectable import Select

from roir_client import lookup, shape
from roir_client.lookup import EQUAL, Found
from roir_client.registry import Registry
from roir_client.shape import Target
from roir_client.upsert import Upserted, upsert
from roir_client.use import LEAST_PARTITIONS, MOST_ROWS, REFRESH_S, Use, log

__all__ = ["DRIVERS", "OPTION", "Indexes", "Upserted", "upsert", "use_indexes"]

# execution_options(roir=False), of a statement, a connection or a session, leaves statements as they are.
OPTION = "roir"
DRIVERS = ("psycopg2", "psycopg", "psycopg_async", "asyncpg")
# Numbers of values, of one statement, for which the statement that looks up is kept.
MOST_SIZES = 100
# No other kind of statement is looked at.
_STATEMENTS = (Select, Update, Delete)
# SQLAlchemy expands it at each execution.
_EXPANDED = "[POSTCOMPILE_"
_IN: operators.custom_op[bool] = operators.custom_op("IN", precedence=5, is_comparison=True)


@dataclass(frozen=True)
class _Sent:
    """A statement as the driver takes it. binds: the names and processors of its parameters, in their order."""

    sql: str
    binds: Sequence[tuple[str, Any]]
    positional: bool

    def parameters(self, values: Mapping[str, Any]) -> Any:
        """The values as the driver takes them."""
        some = ((name, process(values[name]) if process else values[name]) for name, process in self.binds)
        return tuple(value for _, value in some) if self.positional else dict(some)


@dataclass(eq=False)
class _Rewriting:
    """Where a compiled statement takes the keys that were found for a target.

    added: what is added at the beginning of its WHERE; the places of the constants are cut out. beside: the text before
    that place, or, if `leads` is False, behind it: the one that no execution expands.
    """

    target: Target
    added: Sequence[str]
    beside: str
    leads: bool
    lookups: dict[tuple[int, ...], _Sent] = field(default_factory=dict)

    def place(self, sql: str) -> int | None:
        """Where to add; None if this is another text."""
        if self.leads:
            return len(self.beside) if sql.startswith(self.beside) else None
        return len(sql) - len(self.beside) if sql.endswith(self.beside) else None

    def constants(self, found: Found) -> str:
        """What to add."""
        some = [found.constants(n) for n in range(len(self.target.index.identity))]
        return "".join(part for pair in zip(self.added, [*some, ""], strict=True) for part in pair)


class Indexes(Use):
    """The indexes that the statements of one engine use. `use_indexes` makes it.

    It counts what `Use` does, and `text`: a statement that another listener has changed; `isolation`: a statement
    outside a transaction, at another level than READ COMMITTED.
    """

    def __init__(self, engine: Engine, **options: Any) -> None:
        super().__init__(**options)
        self._engine = engine
        # By compiled statement, then by its schema_translate_map.
        self._rewritings: WeakKeyDictionary[Any, dict[Any, Sequence[_Rewriting]]] = WeakKeyDictionary()
        # First: other listeners may add a comment to the text.
        event.listen(engine, "before_cursor_execute", self._before_cursor_execute, retval=True, insert=True)

    def stop(self) -> None:
        """Takes the engine out: nothing is looked up any more."""
        if event.contains(self._engine, "before_cursor_execute", self._before_cursor_execute):
            event.remove(self._engine, "before_cursor_execute", self._before_cursor_execute)

    def _before_cursor_execute(
        self, connection: Any, cursor: Any, sql: str, parameters: Any, context: Any, several: bool
    ) -> tuple[str, Any]:
        if (
            self.enabled
            and isinstance(context.invoked_statement, _STATEMENTS)
            and not several
            and context.execution_options.get(OPTION) is not False
        ):
            if self.is_due:
                self._read(connection)
            if self.registry.by_table:
                try:
                    sql = self._restricted(connection, sql, context)
                except DBAPIError:
                    # The transaction is over; so would the statement's own error have ended it.
                    raise
                except Exception as error:
                    self.fail(error)
        return sql, parameters

    def _read(self, connection: Any) -> None:
        """Reads the registry in this session. An error of it isn't the application's."""
        saved = not _autocommits(connection)
        if saved:
            connection.exec_driver_sql("SAVEPOINT roir_registry")
        try:
            if self.read(lambda sql: connection.execute(text(sql)).scalar()):
                self._rewritings = WeakKeyDictionary()
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            log.warning("the indexes couldn't be read: %s", error)
            if saved:
                connection.exec_driver_sql("ROLLBACK TO SAVEPOINT roir_registry")
        if saved:
            connection.exec_driver_sql("RELEASE SAVEPOINT roir_registry")

    def _restricted(self, connection: Any, sql: str, context: Any) -> str:
        """The statement's text with the keys that were found; itself if nothing was, or nothing can be."""
        new = sql
        for one in self._rewritings_of(context):
            place = one.place(sql)
            asked = _asked(one.target, context, self.most_rows)
            if place is None:
                self.counts["text"] += 1
            elif asked is None:
                self.counts["values"] += 1
            elif _autocommits(connection) and connection.default_isolation_level != "READ COMMITTED":
                # Both statements have one snapshot only in one transaction.
                self.counts["isolation"] += 1
            elif self.note(one.target.index, found := self._look_up(connection, one, asked)):
                place += len(new) - len(sql)
                new = new[:place] + one.constants(found) + new[place:]
        return new

    def _rewritings_of(self, context: Any) -> Sequence[_Rewriting]:
        # Before the registry: what is made from an old one mustn't be kept among the new ones.
        known = self._rewritings
        compiled = context.compiled
        of_maps = known.get(compiled)
        if of_maps is None:
            of_maps = known[compiled] = {}
        schemas = compiled.schema_translate_map and context.execution_options.get("schema_translate_map")
        name = tuple(schemas.items()) if schemas else None
        found = of_maps.get(name)
        if found is None:
            found = of_maps[name] = _rewritings(compiled, self.registry, schemas or {})
        return found

    def _look_up(self, connection: Any, one: _Rewriting, asked: Sequence[Sequence[Any]]) -> Found:
        sizes = tuple(map(len, asked))
        sent = one.lookups.get(sizes)
        if sent is None:
            if len(one.lookups) >= MOST_SIZES:
                one.lookups.clear()
            sent = one.lookups[sizes] = _lookup_statement(one.target, sizes, self.most_rows, connection.dialect)
        values = {f"v{i}_{j}": value for i, some in enumerate(asked) for j, value in enumerate(some)}
        streams = connection.get_execution_options().get("stream_results")
        options = {"stream_results": False} if streams else None
        told = connection.exec_driver_sql(sent.sql, sent.parameters(values), options).scalar_one()
        return lookup.answer(told, self.most_rows)


# By engine: an engine that is given again has new options, not two look-ups.
_used: WeakKeyDictionary[Engine, ref[Indexes]] = WeakKeyDictionary()


def use_indexes(
    engine: Any,
    *,
    enabled: bool = True,
    least_partitions: int = LEAST_PARTITIONS,
    most_rows: int = MOST_ROWS,
    refresh_s: float = REFRESH_S,
) -> Indexes:
    """Lets the statements of an engine use the global indexes of its database.

    engine: an `Engine` or `AsyncEngine` of PostgreSQL.
    enabled: False leaves statements as they are until `Indexes.enabled` is set.
    least_partitions: statements of tables with fewer partitions stay as they are.
    most_rows: so do those that find more rows in the index, or name more values.
    refresh_s: how often it reads which indexes there are, in seconds. It does so by the way, in the session of a
        statement, and at once when a look-up finds that an index has gone.

    Returns what counts, switches and stops it. Raises ValueError if the engine's database or driver is another one.

    For an engine that uses them already the new options replace the old ones. It needs no right but SELECT on the
    index's view, and on the table's primary key.
    """
    engine = getattr(engine, "sync_engine", engine)
    if engine.dialect.name != "postgresql" or engine.dialect.driver not in DRIVERS:
        raise ValueError(
            f"this engine is for {engine.dialect.name} by {engine.dialect.driver}; indexes can be used in postgresql "
            f"by {', '.join(DRIVERS)}"
        )
    if engine in _used and (before := _used[engine]()) is not None:
        before.stop()
    indexes = Indexes(
        engine, enabled=enabled, least_partitions=least_partitions, most_rows=most_rows, refresh_s=refresh_s
    )
    _used[engine] = ref(indexes)
    return indexes


def _autocommits(connection: Any) -> bool:
    return bool(connection.connection.dbapi_connection.autocommit)


def _rewritings(compiled: Any, known: Registry, schemas: Mapping[Any, Any]) -> Sequence[_Rewriting]:
    """How a compiled statement can be restricted. schemas: its schema_translate_map."""
    statement, dialect = compiled.statement, compiled.dialect
    found = []
    for target in shape.targets(statement, compiled, known, schemas):
        marks = [f"roir_constants_{n}_" for n in range(len(target.index.identity))]
        conditions = [
            _IN(_column(target.from_, name), literal_column(f"({mark})"))
            for name, mark in zip(target.index.identity, marks, strict=True)
        ]
        restricted = _compiled(_with(statement, conditions), compiled, dialect, schemas)
        plain = _compiled(statement, compiled, dialect, schemas) if schemas else compiled.string
        cut = _cut(plain, restricted, marks)
        if cut is None:
            log.debug("index %s: nothing can be added to the statement", target.index)
        else:
            found.append(_Rewriting(target, *cut))
    return tuple(found)


def _with(statement: Any, conditions: Sequence[Any]) -> Any:
    """A statement with conditions before its own."""
    new = statement.where(*conditions)
    new._where_criteria = (*new._where_criteria[-len(conditions) :], *new._where_criteria[: -len(conditions)])
    return new


def _compiled(statement: Any, like: Any, dialect: Any, schemas: Mapping[Any, Any]) -> str:
    """The text of a statement, compiled as another one was."""
    options = {"schema_translate_map": schemas, "render_schema_translate": True} if schemas else {}
    return str(statement.compile(dialect=dialect, column_keys=like.column_keys, **options).string)


def _cut(plain: str, restricted: str, marks: Sequence[str]) -> tuple[Sequence[str], str, bool] | None:
    """The part that `restricted` alone has, cut at the marks, and the text beside it; None if they differ elsewhere."""
    at = next((n for n, (a, b) in enumerate(zip(plain, restricted, strict=False)) if a != b), len(plain))
    before, after = plain[:at], plain[at:]
    added = restricted[at : len(restricted) - len(after)]
    leads = _EXPANDED not in before
    if before + added + after != restricted or (not leads and _EXPANDED in after):
        return None
    parts = []
    for mark in marks:
        part, mark, added = added.partition(mark)
        if not mark:
            return None
        parts.append(part)
    return [*parts, added], before if leads else after, leads


def _asked(target: Target, context: Any, most: int) -> list[Sequence[Any]] | None:
    """The values of each condition; None if they serve nothing."""
    values = context.compiled_parameters[0]
    asked: list[Sequence[Any]] = []
    for pin in target.pins:
        if pin.bind is None:
            asked.append(())
            continue
        names = (pin.bind,) if pin.kind == EQUAL else context._expanded_parameters[pin.bind]
        if not 0 < len(names) <= most:
            return None
        some = [values[name] for name in names]
        if any(one is None for one in some):
            if pin.kind == EQUAL or shape.may_turn_none(pin.type):
                return None
            some = [one for one in some if one is not None]
        if not some or not all(shape.is_sent_typed(pin.type, one, context.dialect) for one in some):
            return None
        asked.append(some)
    return asked


def _lookup_statement(target: Target, sizes: Sequence[int], most: int, dialect: Any) -> _Sent:
    names = [[f"v{i}_{j}" for j in range(size)] for i, size in enumerate(sizes)]
    asked = [
        (pin.column, pin.kind, [f":{name}" for name in some]) for pin, some in zip(target.pins, names, strict=True)
    ]
    named = [part for part in target.named if part is not None]
    sql = lookup.statement(target.index, named, asked, most)
    binds = [bindparam(name, type_=pin.type) for pin, some in zip(target.pins, names, strict=True) for name in some]
    compiled = text(sql).bindparams(*binds).compile(dialect=dialect)
    process = {bind.key: bind.type.dialect_impl(dialect).bind_processor(dialect) for bind in binds}
    order: Sequence[str] = (compiled.positiontup or ()) if compiled.positional else list(process)
    return _Sent(compiled.string, [(name, process[name]) for name in order], bool(compiled.positional))


def _column(from_: Any, name: str) -> Any:
    """A column of a table or alias by its name in the database, mapped or not."""
    for column in from_.c:
        if column.name == name:
            return column
    table: Any = new_column(name)
    table.table = from_
    return table
