"""The things that a connection may lack before its database can have an index, with the remedies."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from airflow_roir.errors import RoirError
from airflow_roir.page.databases import WHERE_KEPT, NoConnection, NotPostgres


@dataclass(frozen=True)
class Lack:
    """what: connection, type or schema. says: a sentence without its full stop."""

    what: str
    says: str
    remedy: str


def lack_of(connection_id: str, error: RoirError) -> Lack:
    """The thing that a connection lacks. error: of an attempt to read its indexes."""
    if isinstance(error, NoConnection):
        add = f"airflow connections add {shlex.quote(connection_id)} --conn-uri"
        return Lack(
            "connection",
            f"Airflow has no connection {connection_id}",
            f"Add it: {add} postgresql://USER:PASSWORD@HOST/DATABASE",
        )
    if isinstance(error, NotPostgres):
        return Lack("type", f"connection {connection_id} isn't of type postgres", f"Make it of that type {WHERE_KEPT}")
    return Lack("schema", f"the database of connection {connection_id} has no control schema", "Create it: roir init")
