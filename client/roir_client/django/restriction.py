"""The indexes that the statements of one of Django's databases use."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from django.core.exceptions import EmptyResultSet, FullResultSet, ImproperlyConfigured
from django.db import Error
from django.db.backends.postgresql.psycopg_any import IsolationLevel
from django.db.models import BooleanField, Expression, Field
from django.db.models.expressions import Col
from django.db.models.sql.where import AND, WhereNode

from roir_client import lookup
from roir_client.django import shape
from roir_client.django.shape import Target
from roir_client.lookup import Found
from roir_client.registry import Index
from roir_client.use import Use, log

# The key of OPTIONS.
OPTION = "roir"
off: ContextVar[bool] = ContextVar("roir_off", default=False)
# libpq's PQTRANS_INERROR.
_ABORTED = 3
# `orders`, or `shop"."orders`, with quotes around or not.
_NAME = re.compile(r'"?([^"]+)(?:"\."([^"]+))?"?')


class Among(Expression):
    """A column that has one of some values, which are constants in SQL.

    In a generic plan of a prepared statement a parameter would prune nothing when planned.
    """

    def __init__(self, column: Col, constants: str) -> None:
        super().__init__(output_field=BooleanField())
        self.column = column
        self.constants = constants

    def get_source_expressions(self) -> list[Any]:
        """The column."""
        return [self.column]

    def set_source_expressions(self, exprs: Sequence[Any]) -> None:
        """Takes the same column of another alias."""
        (self.column,) = exprs

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Sequence[Any]]:
        """`column IN (constants)`."""
        sql, parameters = compiler.compile(self.column)
        return f"{sql} IN ({self.constants})", parameters


class Indexes(Use):
    """The indexes of one database, for all connections to it (`roir_client.django.indexes` gives them).

    It counts what `Use` does, and `isolation`: a statement outside a transaction, at another level than READ COMMITTED.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tables: dict[str, tuple[tuple[str, ...], Sequence[Index]]] = {}

    def restricted(self, compiler: Any) -> Any | None:
        """A copy of a compiler's query with the keys that were found; None if nothing was, or nothing can be."""
        if not self.enabled or off.get():
            return None
        connection = compiler.connection
        query = compiler.query
        inner = getattr(query, "inner_query", query)
        if not inner.where.children or inner.combinator or _is_aborted(connection):
            return None
        if self.is_due:
            self._read(connection)
        if not self.registry.by_table or not self._names_one(inner):
            return None
        try:
            found = self._found(compiler, inner)
        except Error:
            # The transaction is over; so would the statement's own error have ended it.
            raise
        except (EmptyResultSet, FullResultSet):
            return None
        except Exception as error:
            self.fail(error)
            return None
        if not found:
            return None
        new = inner.clone()
        new.where = WhereNode([new.where, *found], AND)
        if inner is query:
            return new
        outer = query.clone()
        outer.inner_query = new
        return outer

    def _read(self, connection: Any) -> None:
        """By a cursor of the driver: an application may count its statements, and this is none of them."""
        connection.ensure_connection()
        driver = connection.connection
        saved = not driver.autocommit
        try:
            with connection.wrap_database_errors, driver.cursor() as cursor:
                if saved:
                    cursor.execute("SAVEPOINT roir_registry")
                try:
                    changed = self.read(lambda sql: _fetched(cursor, sql))
                except Exception:
                    if saved:
                        cursor.execute("ROLLBACK TO SAVEPOINT roir_registry")
                    raise
                finally:
                    if saved:
                        cursor.execute("RELEASE SAVEPOINT roir_registry")
        except Error as error:
            log.warning("the indexes couldn't be read: %s", error)
            return
        if changed:
            self._tables = {}

    def _names_one(self, query: Any) -> bool:
        return any(self._indexes_of(table.table_name) for table in query.alias_map.values())

    def _indexes_of(self, table: str) -> Sequence[Index]:
        # Before the registry: what is made from an old one mustn't be kept among the new ones.
        tables = self._tables
        known = tables.get(table)
        if known is None:
            named = _NAME.fullmatch(table)
            parts = tuple(part for part in named.groups() if part is not None) if named else (table,)
            known = tables[table] = parts, self.registry.of(parts[-2] if len(parts) > 1 else None, parts[-1])
        return known[1]

    def _found(self, compiler: Any, query: Any) -> list[Among]:
        """The conditions that the rows found meet, and perhaps others, which the query's own condition leaves out."""
        conditions = []
        for target in shape.targets(query, self._tables):
            asked = self._asked(compiler, target)
            if asked is None:
                self.counts["values"] += 1
                continue
            found = _look_up(compiler.connection, target, asked, self.most_rows)
            if self.note(target.index, found):
                conditions += [
                    Among(_column(target.alias, name), found.constants(n))
                    for n, name in enumerate(target.index.identity)
                ]
        return conditions

    def _asked(self, compiler: Any, target: Target) -> list[list[str]] | None:
        """SQL for the values of each condition, as the driver writes them; None if they serve nothing."""
        asked = []
        for _, condition in target.pins:
            values = condition.parameters(compiler)
            if values is None or len(values) > self.most_rows or any(value is None for value in values):
                return None
            asked.append([compiler.connection.ops.compose_sql("%s", [value]) for value in values])
        return asked


def _is_aborted(connection: Any) -> bool:
    """True if the server would refuse any statement."""
    if connection.needs_rollback:
        return True
    driver = connection.connection
    return driver is not None and driver.info.transaction_status == _ABORTED


def _look_up(connection: Any, target: Target, asked: Sequence[Sequence[str]], most: int) -> Found:
    some = [(column, pin.kind, values) for (column, pin), values in zip(target.pins, asked, strict=True)]
    sql = lookup.statement(target.index, target.named, some, most)
    alone = connection.get_autocommit()
    if alone:
        if connection.isolation_level not in (None, IsolationLevel.READ_COMMITTED):
            return Found("isolation")
        sql += ", current_setting('transaction_isolation')"
    with connection.cursor() as cursor:
        cursor.execute(sql)
        told, *level = cursor.fetchone()
    # Both statements have one snapshot only in one transaction.
    if alone and level != ["read committed"]:
        return Found("isolation")
    return lookup.answer(told, most)


def _fetched(cursor: Any, sql: str) -> str | None:
    cursor.execute(sql)
    found: str | None = cursor.fetchone()[0]
    return found


def _column(alias: str, name: str) -> Col:
    """A column by its name in the database, mapped or not."""
    field = Field()
    field.column = name
    return Col(alias, field)


_made: dict[tuple[Any, ...], Indexes] = {}
_making = threading.Lock()


def of(connection: Any) -> Indexes:
    """Those of a connection's database: the same for all connections with its alias, in all threads."""
    settings = connection.settings_dict
    key = connection.alias, settings["HOST"], settings["PORT"], settings["NAME"], settings["USER"]
    found = _made.get(key)
    if found is None:
        with _making:
            found = _made.get(key)
            if found is None:
                found = _made[key] = _from_options(connection.alias, settings["OPTIONS"].get(OPTION, {}))
    return found


def _from_options(alias: str, options: Any) -> Indexes:
    if isinstance(options, bool):
        options = {"enabled": options}
    try:
        return Indexes(**options)
    except TypeError as wrong:
        raise ImproperlyConfigured(f"DATABASES[{alias!r}]['OPTIONS']['{OPTION}']: {wrong}") from None
