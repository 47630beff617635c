"""Points the project to a test's database."""

from __future__ import annotations

from typing import Any

from django.db import connections
from psycopg2.extensions import parse_dsn

ENGINE, PLAIN = "roir_client.django", "django.db.backends.postgresql"


def point(dsn: str, alias: str = "default", engine: str = ENGINE, **options: Any) -> Any:
    """The connection of an alias, to a database. options: those of `OPTIONS`."""
    parts = parse_dsn(dsn)
    one = {
        "ENGINE": engine,
        "NAME": parts["dbname"],
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": parts.get("port", ""),
        "OPTIONS": {**({"roir": {"least_partitions": 1}} if engine == ENGINE else {}), **options},
    }
    leave(alias)
    connections.settings.update(connections.configure_settings({"default": {}, alias: one}))
    return connections[alias]


def leave(alias: str = "default") -> None:
    """Closes this thread's connection of an alias."""
    if alias in connections.settings and hasattr(connections._connections, alias):
        connections[alias].close()
        del connections[alias]
