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
those that moved to another partition since.

A statement stays as it is if the index is being repaired or a verification found differences, if the role may not read
the index or the primary key, if more rows are found than `most_rows`, or if in any doubt. Sub-queries, CTEs, members of
a UNION, conditions of ON, lambda statements and statements with several sets of parameters stay as they are.

Take the engine out (`stop`) before you remove the schema `roir` from the database: the look-up is a function there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from sqlalchemy import BindParameter, Boolean, Delete, Engine, Update, bindparam, event, text
from sqlalchemy import column as new_column
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression
from sqlalchemy.sql.selectable import Select
from sqlalchemy.types import UserDefinedType

from roir_client import lookup, registry, shape
from roir_client.lookup import EQUAL, FOUND, Found
from roir_client.registry import Index, Registry
from roir_client.shape import Target

log = logging.getLogger("roir_client")

# execution_options(roir=False), of a statement, a connection or a session, leaves statements as they are.
OPTION = "roir"
DRIVERS = ("psycopg2", "psycopg", "psycopg_async", "asyncpg")
# With fewer partitions the planner is as fast by itself.
LEAST_PARTITIONS = 100
# With more rows the constants cost more than they save.
MOST_ROWS = 100
# Shapes of statements whose analysis is kept.
MOST_SHAPES = 2_000
# No other kind of statement is looked at.
_STATEMENTS = (Select, Update, Delete)
_IN = operators.custom_op("IN", precedence=5, is_comparison=True, return_type=Boolean())
# The answer of an index that isn't what the registry says.
_STALE = ("gone", "error")
# The shortest time between two readings of the registry.
PAUSE_S = 1.0


class _Constants(UserDefinedType[str]):
    """SQL of constants, as the server has written it."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "text"

    def literal_processor(self, dialect: Any) -> Callable[[str], str]:
        return lambda value: value


_CONSTANTS = _Constants()


class Indexes:
    """The indexes that the statements of one engine use. `use_indexes` makes it.

    enabled: False leaves all statements as they are. counts: how often a statement was `rewritten`, and how often not,
    by reason: `values` that can't serve, `type` of a value, `many` rows, the session's `settings`, `gone`, `doubtful`,
    `name`, `rights`, `error` and `failed`, which the logger `roir_client` explains.
    """

    def __init__(self, engine: Engine, enabled: bool, least_partitions: int, most_rows: int, refresh_s: float) -> None:
        self.enabled = enabled
        self.counts: Counter[str] = Counter()
        self._engine = engine
        self._least_partitions = least_partitions
        self._most_rows = most_rows
        self._refresh_s = refresh_s
        self._lock = threading.Lock()
        self._refresh_at = 0.0
        self._known: tuple[Registry, dict[Any, tuple[Target, ...]]] = (Registry(), {})
        self._lookups: dict[Any, Any] = {}
        event.listen(engine, "before_execute", self._before_execute, retval=True)

    def refresh(self) -> None:
        """Reads again which indexes there are, before the next statement."""
        self._refresh_at = 0.0

    def stop(self) -> None:
        """Takes the engine out: nothing is looked up any more."""
        if event.contains(self._engine, "before_execute", self._before_execute):
            event.remove(self._engine, "before_execute", self._before_execute)

    def _before_execute(
        self, connection: Any, statement: Any, several: Any, values: Any, options: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        if self.enabled and isinstance(statement, _STATEMENTS) and not several and options.get(OPTION) is not False:
            if time.monotonic() >= self._refresh_at:
                self._read(connection)
            known, shapes = self._known
            if known.by_table:
                try:
                    statement = self._restricted(connection, statement, values, options, known, shapes)
                except DBAPIError:
                    # The transaction is over; so would the statement's own error have ended it.
                    raise
                except Exception as error:
                    # A value that can't be bound, for example: the statement itself says it better.
                    self.counts["failed"] += 1
                    log.info("a statement stays as it is", exc_info=error)
        return statement, several, values

    def _read(self, connection: Any) -> None:
        """Reads the registry in this session. Meanwhile other threads use the old one."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._refresh_at = time.monotonic() + self._refresh_s
            read = registry.read(lambda sql: _fetched(connection, sql), self._least_partitions)
            if read != self._known[0]:
                self._known = (read, {})
                self._lookups = {}
                log.info("%d indexes can be used", len(read))
        finally:
            self._lock.release()

    def _restricted(
        self,
        connection: Any,
        statement: Any,
        values: Mapping[str, Any],
        options: Mapping[str, Any],
        known: Registry,
        shapes: dict[Any, tuple[Target, ...]],
    ) -> Any:
        """The statement with the keys that were found; itself if nothing was, or nothing can be."""
        key = statement._generate_cache_key()
        if key is None:
            return statement
        schemas = options.get("schema_translate_map")
        name = key.key if not schemas else (key.key, tuple(schemas.items()))
        targets = shapes.get(name)
        if targets is None:
            targets = shape.targets(statement, key.bindparams, known, connection.dialect, schemas or {})
            if len(shapes) >= MOST_SHAPES:
                shapes.clear()
            shapes[name] = targets
        if not targets:
            return statement
        if len(key) > 2 and key[2]:
            values = {**key[2], **values}
        conditions = list(shape.leaves(statement._where_criteria))
        for target in targets:
            asked = _asked(target, key.bindparams, values, self._most_rows, connection.dialect)
            if asked is None:
                self.counts["values"] += 1
                continue
            found = self._look_up(connection, target, asked)
            log.debug("index %s: %s, %d rows", target.index, found.outcome, len(found.keys or ()))
            if found.outcome == FOUND:
                self.counts["rewritten"] += 1
                from_ = shape.column_of(conditions[target.leaf]).table
                statement = statement.where(*_restriction(from_, target.index, found))
                continue
            self.counts[found.outcome] += 1
            if found.outcome in _STALE:
                self._refresh_at = min(self._refresh_at, time.monotonic() + PAUSE_S)
                log.info("index %s isn't used: %s", target.index, found.said or found.outcome)
        return statement

    def _look_up(self, connection: Any, target: Target, asked: Sequence[Sequence[Any]]) -> Found:
        sizes = tuple(map(len, asked))
        statement = self._lookups.get((target, sizes))
        if statement is None:
            if len(self._lookups) >= MOST_SHAPES:
                self._lookups.clear()
            statement = self._lookups[target, sizes] = _lookup_statement(target, sizes, self._most_rows)
        values = {f"v{i}_{j}": value for i, some in enumerate(asked) for j, value in enumerate(some)}
        return Found(*connection.execute(statement, values).one())


# By engine: an engine that is given again has new options, not two look-ups.
_used: WeakKeyDictionary[Engine, ref[Indexes]] = WeakKeyDictionary()


def use_indexes(
    engine: Any,
    *,
    enabled: bool = True,
    least_partitions: int = LEAST_PARTITIONS,
    most_rows: int = MOST_ROWS,
    refresh_s: float = 60.0,
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
    indexes = Indexes(engine, enabled, least_partitions, most_rows, refresh_s)
    _used[engine] = ref(indexes)
    return indexes


def _fetched(connection: Any, sql: str) -> str | None:
    found: str | None = connection.execute(text(sql)).scalar()
    return found


def _asked(
    target: Target, binds: Sequence[BindParameter[Any]], given: Mapping[str, Any], most: int, dialect: Any
) -> list[Sequence[Any]] | None:
    """The values of each condition; None if they can't be known, or serve nothing."""
    asked: list[Sequence[Any]] = []
    for pin in target.pins:
        if pin.bind is None:
            asked.append(())
            continue
        bind = binds[pin.bind]
        if bind.key in given:
            value = given[bind.key]
        elif bind.required or (given and shape.is_overridden(bind, given)):
            return None
        else:
            value = bind.effective_value
        some = [value] if pin.kind == EQUAL else list(value)
        if any(one is None for one in some):
            if pin.kind == EQUAL or shape.may_turn_none(pin.type):
                return None
            some = [one for one in some if one is not None]
        if not 0 < len(some) <= most or not all(shape.is_sent_typed(pin.type, one, dialect) for one in some):
            return None
        asked.append(some)
    return asked


def _lookup_statement(target: Target, sizes: Sequence[int], most: int) -> Any:
    names = [[f"v{i}_{j}" for j in range(size)] for i, size in enumerate(sizes)]
    conditions = [
        lookup.condition(pin.kind, [f":{name}" for name in some], pin.column.accepts)
        for pin, some in zip(target.pins, names, strict=True)
    ]
    named = [part for part in target.named if part is not None]
    sql = lookup.statement(target.index, named, [pin.column.name for pin in target.pins], conditions, most)
    binds = [bindparam(name, type_=pin.type) for pin, some in zip(target.pins, names, strict=True) for name in some]
    return text(sql).bindparams(*binds)


def _restriction(from_: Any, index: Index, found: Found) -> list[Any]:
    """The conditions that the rows found meet, and perhaps others, which the statement's own condition leaves out."""
    return [_is_in(_column(from_, name), found.constants(n)) for n, name in enumerate(index.identity)]


def _is_in(left: Any, constants: str) -> Any:
    # Rendered into the text: in a generic plan of a prepared statement a parameter would prune nothing when planned.
    right = bindparam("roir", f"({constants})", _CONSTANTS, literal_execute=True, unique=True)
    return BinaryExpression(left, right, _IN, type_=Boolean())


def _column(from_: Any, name: str) -> Any:
    """A column of a table or alias by its name in the database, mapped or not."""
    for column in from_.c:
        if column.name == name:
            return column
    table: Any = new_column(name)
    table.table = from_
    return table
