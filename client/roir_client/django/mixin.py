"""For a database backend of PostgreSQL: the compilers of its statements look up what they can first.

class DatabaseWrapper(UsesIndexes, postgis.DatabaseWrapper):
    pass
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from roir_client.django.restriction import OPTION, Indexes, of

_COMPILERS = ("SQLCompiler", "SQLUpdateCompiler", "SQLDeleteCompiler", "SQLAggregateCompiler")


class LooksUp:
    """A mixin of compilers. Executing a statement looks up; compiling it, as for `str(query)`, doesn't."""

    query: Any
    connection: Any
    _looks_up = True

    def execute_sql(self, *args: Any, **options: Any) -> Any:
        """Executes the statement with the keys that were found."""
        with self._restricted():
            return super().execute_sql(*args, **options)  # type: ignore[misc]

    def execute_returning_sql(self, *args: Any, **options: Any) -> Any:
        """The same for UPDATE … RETURNING, which Django 6 has."""
        with self._restricted():
            return super().execute_returning_sql(*args, **options)  # type: ignore[misc]

    @contextmanager
    def _restricted(self) -> Iterator[None]:
        query = self.query
        restricted = self.connection.roir.restricted(self) if self._looks_up else None
        if restricted is None:
            yield
            return
        self._looks_up = False
        self.query = restricted
        try:
            yield
        finally:
            # A compiler may execute its statement again: then the rows are others.
            self._looks_up = True
            self.query = query


class CompilesWithIndexes:
    """A mixin of `DatabaseOperations`."""

    def compiler(self, compiler_name: str) -> Any:
        """The backend's own compiler, which looks up first."""
        compiler = super().compiler(compiler_name)  # type: ignore[misc]
        return _looking_up(compiler) if compiler_name in _COMPILERS else compiler


class UsesIndexes:
    """A mixin of `DatabaseWrapper`, to be named before it."""

    ops_class: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not issubclass(cls.ops_class, CompilesWithIndexes):
            cls.ops_class = type("DatabaseOperations", (CompilesWithIndexes, cls.ops_class), {})

    @property
    def roir(self) -> Indexes:
        """The indexes of this connection's database."""
        return of(self)

    def get_connection_params(self) -> dict[str, Any]:
        """Without our own option, which the driver doesn't know."""
        params: dict[str, Any] = super().get_connection_params()  # type: ignore[misc]
        params.pop(OPTION, None)
        return params


@lru_cache
def _looking_up(compiler: Any) -> Any:
    return type(compiler.__name__, (LooksUp, compiler), {})
