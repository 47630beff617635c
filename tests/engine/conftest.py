"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.hostile import scene as scene
from tests.engine.public import world as world
from tests.engine.steps import sql


@pytest.fixture
def stranger(dsn: str) -> Iterator[str]:
    """The DSN of a role without any rights but to connect. Roles are the server's: dropped afterwards."""
    [(name,)] = sql(steps.session(dsn), "SELECT 'stranger_' || current_database()")
    run_sql(dsn, f"CREATE ROLE {name} LOGIN")
    yield dsn.replace("//postgres:@", f"//{name}:@")
    run_sql(dsn, f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")
