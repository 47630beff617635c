"""The database backend: Django's own for PostgreSQL, which uses indexes."""

from __future__ import annotations

from django.db.backends.postgresql import base

from roir_client.django.mixin import UsesIndexes


class DatabaseWrapper(UsesIndexes, base.DatabaseWrapper):
    """A connection whose statements use indexes."""
