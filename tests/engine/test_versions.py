"""Old code and new: code that knows an operation's checkpoint format continues it, and other code refuses it."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.schema import schema
from airflow_roir.errors import SchemaVersionMismatch
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(1)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    run_sql(
        dsn, "CREATE TABLE t (id int PRIMARY KEY, k text)", "INSERT INTO t SELECT i, 'k' FROM generate_series(1, 9) i"
    )


def test_code_with_the_same_checkpoint_format_continues(database: Database) -> None:
    prepared, first = steps.begin(database)
    end_run(database, first)
    again = start_run(database, "ix", "a newer release")
    assert again.operation_id == prepared.operation_id
    steps.finish_all(database, again)
    steps.assert_exact(database)


def test_code_with_another_checkpoint_format_refuses_and_can_still_abort(database: Database, dsn: str) -> None:
    _, first = steps.begin(database)
    end_run(database, first)
    run_sql(dsn, "UPDATE roir.operation SET format_version = 9")
    with pytest.raises(SchemaVersionMismatch, match=r"format \d, but this code writes \d"):
        start_run(database, "ix", "another release")
    assert abort.abort(database, "ix", "me").status == "aborted"


def test_code_older_than_the_control_schema_changes_nothing(database: Database, dsn: str) -> None:
    _, first = steps.begin(database)
    end_run(database, first)
    run_sql(dsn, "UPDATE roir.schema_version SET version_num = '9999'")
    for call in (
        lambda: start_run(database, "ix", "old"),
        lambda: steps.begin(database),
        lambda: abort.abort(database, "ix", "old"),
    ):
        with pytest.raises(SchemaVersionMismatch, match="newer"):
            call()


def test_code_newer_than_the_control_schema_asks_for_the_upgrade(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The next release's number: so far there is only one migration.
    monkeypatch.setattr(schema, "head", lambda: "0002")
    with pytest.raises(SchemaVersionMismatch, match="upgrade the schema with: roir init"):
        steps.begin(database)
