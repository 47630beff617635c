"""Django 5.2 and 6: queries of partitioned tables use the global indexes of airflow-roir.

    DATABASES = {"default": {"ENGINE": "roir_client.django", ...}}

A SELECT, UPDATE or DELETE of the ORM whose WHERE compares the leading columns of an index with values, by `exact`, `in`
or `isnull=True` connected by AND, is preceded by a look-up in the index, on the same connection. The primary keys found
are added to the statement as constants, so that PostgreSQL plans, opens and locks only the partitions of these rows.
The statement keeps its own condition: it never selects or changes a row that it wouldn't without.

Snapshots: in a transaction (`atomic`, `ATOMIC_REQUESTS`) at REPEATABLE READ or SERIALIZABLE both statements have one
snapshot: nothing differs. At READ COMMITTED each has its own, in a transaction or not. The statement sees what it would
have seen at the moment of the look-up, minus the rows that changed since such that they don't meet the condition any
more, and minus those that have another primary key since, or moved to another partition. Outside a transaction, at a
level above READ COMMITTED, statements stay as they are.

A statement stays as it is if the index is being repaired or a verification found differences, if the role may not read
the index or the primary key, if more rows are found than `most_rows`, or if in any doubt. Sub-queries, members of a
`union`, `raw` and conditions behind an outer join stay as they are. For `update` and `delete` of a QuerySet that joins
Django writes a sub-query: it is restricted, the change itself isn't. A table that is joined, by `select_related` or as
the parent of a model, is restricted by conditions on its own columns alone.

`OPTIONS` of the database may have `"roir"`: False, or a dict of `enabled`, `least_partitions`, `most_rows` and
`refresh_s`, as `roir_client.use` has them. Look-ups are statements of the connection: `connection.queries`, logs and
`assertNumQueries` see them. Reading which indexes there are isn't.

For a backend that isn't Django's own: `roir_client.django.mixin`. django-tenants takes ours as its `ORIGINAL_BACKEND`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roir_client.django.restriction import Indexes


def indexes(using: str = "default") -> Indexes:
    """The indexes of a database: their `counts`, `refresh` and `enabled`. using: its alias."""
    from django.db import connections

    found: Indexes = connections[using].roir
    return found


@contextmanager
def unchanged() -> Iterator[None]:
    """Leaves the statements that are executed inside as they are, in this thread or task."""
    from roir_client.django.restriction import off

    token = off.set(True)
    try:
        yield
    finally:
        off.reset(token)
