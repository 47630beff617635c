"""The backend, which uses indexes, too."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.db.backends.postgresql import base

from roir_client.django.mixin import UsesIndexes

counts: Counter[str] = Counter()


class Operations(base.DatabaseOperations):
    """Those of the other backend."""

    compiler_module = "tests.client.django_shop.counting.compiler"


class Counting(base.DatabaseWrapper):
    """The other backend."""

    ops_class = Operations

    def create_cursor(self, name: str | None = None) -> Any:
        """Counts cursors."""
        counts["cursors"] += 1
        return super().create_cursor(name)


class DatabaseWrapper(UsesIndexes, Counting):
    """Both."""
