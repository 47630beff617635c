"""Reads a table's rows through an index from SQLAlchemy, as `roir.rows` does from SQL.

from roir_client.rows import rows

session.scalars(select(rows(Order, "shop.orders_by_customer", Order.customer_id == 4711)))
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, overload

from sqlalchemy import ColumnElement, FromClause, func, inspect, literal_column, select
from sqlalchemy import column as new_column
from sqlalchemy import table as new_table
from sqlalchemy.orm import aliased
from sqlalchemy.sql.selectable import TableValuedAlias
from sqlalchemy.sql.visitors import replacement_traverse

Row = TypeVar("Row")
_PART = r'("(?:[^"]|"")+"|[^\W\d][\w$]*)'
_NAME = re.compile(rf"\s*(?:{_PART}\s*\.\s*)?{_PART}\s*")


@overload
def rows(source: FromClause, index: str | FromClause, where: ColumnElement[bool]) -> TableValuedAlias: ...
@overload
def rows(source: type[Row], index: str | FromClause, where: ColumnElement[bool]) -> type[Row]: ...


def rows(source: Any, index: str | FromClause, where: ColumnElement[bool]) -> Any:
    """The rows of a table whose entries in an index meet a condition; PostgreSQL opens these rows' partitions alone.

    source: a `Table`, or an ORM class, which is mapped to one table.
    index: the index's name as SQL, `shop.orders_by_customer`, or a selectable of its view.
    where: the condition on the entries, over the source's own columns or, if `index` is a selectable, over its columns.
        It can only contain columns of the index: the key, the primary key and the included ones.

    Returns something to select from: for a table an alias with its columns, for an ORM class an alias of that class,
    both of one snapshot, in no order. The caller needs SELECT on the table and on the index.

    Raises ValueError if `index` is no SQL identifier.
    """
    mapped = not isinstance(source, FromClause)
    table: Any = inspect(source).local_table if mapped else source
    if isinstance(index, str):
        schema, name = _parsed(index)
        # Only for names and types: the server knows which of the columns the index has.
        columns = [new_column(c.name, c.type) for c in table.columns]
        view: Any = new_table(name, *columns, schema=schema)
    else:
        view = index
    # The alias is the whole entry, unless a column has that name: also one of the index that isn't mapped here.
    alias = "roir_entry"
    while alias in view.c:
        alias += "_"
    entries = view.alias(alias)

    def of_the_entry(element: Any, **_: Any) -> Any:
        for one in (table, index):
            if isinstance(one, FromClause) and isinstance(element, ColumnElement) and one.c.contains_column(element):
                return entries.c[element.name]
        return None

    condition = replacement_traverse(where, {}, of_the_entry)
    found = select(entries.table_valued()).where(condition).scalar_subquery()
    # Not a cast: in its type SQLAlchemy doesn't double a % for the driver.
    null_row: ColumnElement[Any] = literal_column(f"NULL::{_quoted(table.schema, table.name)}")
    reading = func.roir.rows(null_row, func.array(found)).table_valued(
        *(new_column(c.name, c.type) for c in table.columns)
    )
    return aliased(source, reading, adapt_on_names=True) if mapped else reading


def _parsed(name: str) -> tuple[str | None, str]:
    """A schema and a name, as SQL means them."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"index {name!r}: not a name, or a schema and a name, as SQL writes them")
    schema, last = (part and _meant(part) for part in found.groups())
    return schema, last


def _meant(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part.lower()


def _quoted(*parts: str | None) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts if part is not None)
