"""Reads a table's rows through an index from SQLAlchemy, as `roir.rows` does from SQL.

from airflow_roir.reading import rows

session.scalars(select(rows(Order, "shop.orders_by_customer", Order.customer_id == 4711)))

It needs neither Airflow nor Spark.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

from sqlalchemy import ColumnElement, FromClause, func, inspect, literal_column, select
from sqlalchemy import column as new_column
from sqlalchemy import table as new_table
from sqlalchemy.orm import aliased
from sqlalchemy.sql.selectable import TableValuedAlias
from sqlalchemy.sql.visitors import replacement_traverse

from airflow_roir.definition import QualifiedName, parse_name

Row = TypeVar("Row")


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

    Raises InvalidInput if `index` is no SQL identifier.
    """
    mapped = not isinstance(source, FromClause)
    table: Any = inspect(source).local_table if mapped else source
    if isinstance(index, str):
        name = parse_name(index, "index")
        # Only for names and types: the server knows which of the columns the index has.
        columns = [new_column(c.name, c.type) for c in table.columns]
        view: Any = new_table(name.name, *columns, schema=name.schema)
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
    null_row: ColumnElement[Any] = literal_column(f"NULL::{QualifiedName(table.schema, table.name).sql}")
    reading = func.roir.rows(null_row, func.array(found)).table_valued(
        *(new_column(c.name, c.type) for c in table.columns)
    )
    return aliased(source, reading, adapt_on_names=True) if mapped else reading
