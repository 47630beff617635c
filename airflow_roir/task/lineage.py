"""Describes an index to OpenLineage, as a dataset that is made from its source. It doesn't need the provider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg2.extensions import parse_dsn

from airflow_roir.definition import parse_name

DEFAULT_PORT = "5432"


@dataclass(frozen=True)
class Lineage:
    """The datasets' names, as OpenLineage names those of PostgreSQL. source: None if the table was dropped."""

    namespace: str
    source: str | None
    index: str


def lineage(dsn: str, index: str, source: str | None) -> Lineage:
    """The names of a publish's datasets: `postgres://host:port` and `database.schema.table`, the parts unquoted.

    dsn: of the connection; only host, port and database are taken from it. If it has several hosts: the first one.
    index, source: as SQL, with their schemas.
    """
    settings = parse_dsn(dsn)
    host, port = (settings.get(name, "").split(",")[0] for name in ("host", "port"))
    # A folder of sockets is this machine.
    host = "localhost" if not host or host.startswith(("/", "@")) else host
    database = settings.get("dbname") or settings.get("user", "")
    return Lineage(
        f"postgres://{host}:{port or DEFAULT_PORT}",
        None if source is None else _dataset(database, source),
        _dataset(database, index),
    )


def as_operator_lineage(names: Lineage) -> Any:
    """The lineage for Airflow's OpenLineage provider; None if that isn't installed."""
    try:
        from airflow.providers.common.compat.openlineage.facet import Dataset
        from airflow.providers.openlineage.extractors import OperatorLineage
    except ImportError:
        return None
    inputs = [] if names.source is None else [Dataset(namespace=names.namespace, name=names.source)]
    return OperatorLineage(inputs=inputs, outputs=[Dataset(namespace=names.namespace, name=names.index)])


def _dataset(database: str, name: str) -> str:
    parts = parse_name(name)
    return ".".join(part for part in (database, parts.schema, parts.name) if part)
