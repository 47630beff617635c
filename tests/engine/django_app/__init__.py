"""An application of Django's with a model of an indexed table and one of its index. Importing it sets Django up."""

from __future__ import annotations

import tests.client.django_shop.set_up  # noqa: F401
from tests.client.django_shop import databases


def connect_to(dsn: str) -> None:
    """From now on the application is one of this database, by Django's own backend."""
    databases.point(dsn, engine=databases.PLAIN)
