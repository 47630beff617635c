"""The backend's compilers."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql.compiler import (
    SQLAggregateCompiler,
    SQLDeleteCompiler,
    SQLInsertCompiler,
    SQLUpdateCompiler,
)
from django.db.backends.postgresql.compiler import SQLCompiler as BaseSQLCompiler

from tests.client.django_shop.counting import base

__all__ = ["SQLAggregateCompiler", "SQLCompiler", "SQLDeleteCompiler", "SQLInsertCompiler", "SQLUpdateCompiler"]


class SQLCompiler(BaseSQLCompiler):
    """Counts what it compiles."""

    def as_sql(self, *args: Any, **options: Any) -> Any:
        """Compiles."""
        base.counts["compiled"] += 1
        return super().as_sql(*args, **options)
