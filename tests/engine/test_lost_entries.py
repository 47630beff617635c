"""`DROP SCHEMA roir_data CASCADE`: every command names a remedy, and the remedy helps."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from airflow_roir.engine import clean_up, drop, install
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.verify import record
from airflow_roir.errors import SchemaMissing
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import compacting, steps

pytestmark = pytest.mark.sample(1)

COMMANDS: dict[str, Callable[[Database], object]] = {
    "status": status,
    "indexes": indexes,
    "build": steps.make_index,
    "clean-up": clean_up.clean_up,
    "verify": lambda database: verify(database, "ix"),
    "drop": lambda database: drop.drop_index(database, "ix", "test"),
    "pause": lambda database: requests.pause(database, "ix", "test"),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("kind", ["build", "verify", "compact", "nothing"])
def test_the_schema_of_entries_is_dropped(database: Database, dsn: str, kind: str) -> None:
    """An operation is unfinished, or none is. One index was rebuilt, one is unique."""
    steps.make_table(dsn)
    steps.make_index(database, include="v")
    steps.make_index(database, table=None, keys=None)
    steps.make_index(database, '"Of v"', keys="v, id", unique=True)
    if kind == "build":
        steps.begin(database, "ib")
    elif kind == "verify":
        record.begin(database, "ix", VerifyOptions(), "test")
    elif kind == "compact":
        compacting.begin(database, compacting.act("rewrite", 1))
    run_sql(dsn, "DROP SCHEMA roir_data CASCADE", "UPDATE t SET v = v + 1 WHERE id % 2 = 0")
    for command in COMMANDS.values():
        with pytest.raises(SchemaMissing, match="roir init"):
            command(database)
    told: list[str] = []
    install.init(database, told.append)
    install.init(database, told.append)
    assert len(told) == (3 if kind == "build" else 2)
    assert (status(database), indexes(database), clean_up.clean_up(database).warnings) == ([], [], [])
    assert not operations_unfinished(database)
    for line in told:
        arguments = shlex.split(line.split("roir build ")[1])
        given = dict(zip(arguments[1::2], arguments[2::2], strict=False))
        steps.make_index(
            database,
            arguments[0],
            given["--table"],
            given["--keys"],
            given.get("--include"),
            unique="--unique" in arguments,
        )
    run_sql(dsn, "DELETE FROM t WHERE id % 3 = 0", "INSERT INTO t VALUES (10001, 'new', 10001)")
    steps.assert_exact(database)
    steps.assert_exact(database, '"Of v"')


def operations_unfinished(database: Database) -> bool:
    with database.transaction() as connection:
        query = "SELECT count(*) FROM roir.operation WHERE status NOT IN ('completed', 'aborted')"
        return bool(connection.exec_driver_sql(query).scalar_one())
