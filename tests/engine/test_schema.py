"""The control schema: its values are those of the code, up and down; versions that don't fit are refused."""

from __future__ import annotations

import re
import shutil
from enum import Enum
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory

from airflow_roir.definition import Scan
from airflow_roir.engine import install
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.forecast import set_up
from airflow_roir.engine.schema import schema
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.entry_state import EntryState
from airflow_roir.errors import InvalidInput, SchemaVersionMismatch
from airflow_roir.generation_state import CaptureMode, GenerationStatus, SegmentStatus, UnitStatus
from airflow_roir.operation import Kind, Phase, Status
from tests.conftest import database_dsn, run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(2)

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, k text)", "INSERT INTO t SELECT i, i % 7 FROM generate_series(1, 30) i")

# The values that each CHECK of the control schema allows, by its name.
STATES: dict[str, type[Enum]] = {
    "generation_capture_mode": CaptureMode,
    "generation_scan": Scan,
    "generation_status": GenerationStatus,
    "operation_kind": Kind,
    "operation_phase": Phase,
    "operation_status": Status,
    "segment_status": SegmentStatus,
    "compaction_unit_status": UnitStatus,
}
CHECKED = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = %(name)s AND contype = 'c'"


@pytest.fixture
def empty(server: str, request: pytest.FixtureRequest) -> Database:
    """A database without the control schema."""
    name = f"empty_{abs(hash(request.node.name))}"
    run_sql(server, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)", f"CREATE DATABASE {name}")
    return Database(database_dsn(server, name))


def test_the_tables_take_the_values_that_the_code_has_and_no_others(database: Database) -> None:
    with database.transaction() as connection:
        for name, states in STATES.items():
            check = execute(connection, CHECKED, {"name": name}).scalar_one()
            assert re.findall(r"'(\w+)'", check) == [state.value for state in states], name


def test_down_leaves_nothing_and_up_works_again(empty: Database) -> None:
    install.init(empty)
    with empty.transaction() as connection:
        command.downgrade(install.alembic_config(connection), "base")
    with empty.transaction() as connection:
        left = execute(
            connection,
            "SELECT relname FROM pg_class WHERE relnamespace = 'roir'::regnamespace AND relname !~ '^schema_version' "
            "UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'roir'::regnamespace "
            "UNION ALL SELECT typname FROM pg_type WHERE typnamespace = 'roir'::regnamespace "
            "AND typname !~ '^_?schema_version' "
            "UNION ALL SELECT evtname FROM pg_event_trigger "
            "UNION ALL SELECT nspname FROM pg_namespace WHERE nspname = 'roir_data'",
        ).all()
    assert left == []
    assert install.init(empty) == schema.head()
    assert install.init(empty) == schema.head()  # again: nothing to do


def test_the_files_of_the_migrations_are_named_after_their_revisions_in_order() -> None:
    walked = ScriptDirectory.from_config(install.alembic_config()).walk_revisions()
    assert schema.revisions() == tuple(reversed([script.revision for script in walked]))


def test_an_entry_state_is_one_of_the_declared_ones(database: Database) -> None:
    with database.transaction() as connection:
        states = execute(connection, "SELECT unnest(enum_range(NULL::roir.entry_state))::text").scalars().all()
    assert states == [state.value for state in EntryState]


def test_a_missing_schema_is_said_with_the_remedy(empty: Database) -> None:
    with pytest.raises(SchemaVersionMismatch, match="roir init"):
        status(empty)


def test_a_newer_schema_is_refused(database: Database) -> None:
    with database.transaction() as connection:
        execute(connection, "UPDATE roir.schema_version SET version_num = '9999'")
    for call in (lambda: status(database), lambda: install.init(database)):
        with pytest.raises(SchemaVersionMismatch, match=r"newer than this code .+\. Upgrade"):
            call()


@pytest.mark.parametrize(
    "change",
    ["UPDATE roir.home SET made_by = 'another'", "ALTER TABLE roir.home DROP COLUMN made_by"],
)
def test_a_schema_of_the_same_version_by_other_sql_is_refused(database: Database, dsn: str, change: str) -> None:
    """Found: a migration was edited in place; init said that all is well, and the status missed a column."""
    run_sql(dsn, *TABLE)
    steps.finish_all(database, steps.begin(database)[1])
    run_sql(dsn, change)
    for call in (lambda: status(database), lambda: install.init(database), lambda: steps.begin(database)):
        with pytest.raises(SchemaVersionMismatch, match=r"another build of airflow-roir: its version is 0001.* init$"):
            call()
    found = {one.what: one for one in set_up.look(database)}["schema"]
    assert (found.verdict, "another build of airflow-roir" in found.says) == (set_up.PROBLEM, True)
    run_sql(dsn, "DROP SCHEMA roir, roir_data CASCADE")
    install.init(database)
    assert status(database) == []


def test_comments_and_blanks_make_no_other_build(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = schema.build_of_code()
    shutil.copytree(schema.migrations_folder(), tmp_path / "migrations")
    monkeypatch.setattr(schema, "migrations_folder", lambda: tmp_path / "migrations")
    home = tmp_path / "migrations" / "sql" / "home.sql"
    for added, same in (("\n-- A remark.\n\n", True), ("SELECT 1;\n", False)):
        home.write_text(home.read_text() + added)
        assert (schema.build_of_code.__wrapped__() == ours) is same


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize(
    ("revision", "lacks"),
    [
        ("0001", "DROP TABLE roir.home"),
        ("0001", "DROP TABLE roir.feed CASCADE"),
        ("0001", "DROP FUNCTION roir.options_in_effect(roir.operation) CASCADE"),
        ("0002", ""),
        ("0021", ""),
    ],
)
def test_a_schema_of_before_the_first_release_is_refused_and_can_be_removed(
    database: Database, dsn: str, revision: str, lacks: str
) -> None:
    """The remedy that the message names leaves the source as it was."""
    run_sql(dsn, "SELECT roir.guard()", *TABLE)
    steps.finish_all(database, steps.begin(database)[1])
    steps.begin(database, table=None, keys=None)
    run_sql(dsn, f"UPDATE roir.schema_version SET version_num = '{revision}'")
    if lacks:
        run_sql(dsn, lacks)
    for call in (lambda: status(database), lambda: install.init(database)):
        with pytest.raises(SchemaVersionMismatch, match=rf"version {revision}, from before 0\.1\.0.* init$") as told:
            call()
    (remedy,) = re.findall(r"DROP SCHEMA [a-z_, ]+ CASCADE", str(told.value))
    run_sql(dsn, remedy)
    assert install.init(database) == schema.head()
    run_sql(dsn, "UPDATE t SET k = 'x' WHERE id < 10", "DELETE FROM t WHERE id = 20", "ALTER TABLE t ADD COLUMN v int")
    steps.finish_all(database, steps.begin(database)[1])
    assert steps.assert_exact(database).rows == 29


def test_schemas_made_by_the_owner_are_enough(empty: Database) -> None:
    """A role that may not create schemas can fill those that were created for it."""
    with empty.transaction() as connection:
        execute(connection, "DROP ROLE IF EXISTS modest")
        execute(connection, "CREATE ROLE modest LOGIN")
        execute(connection, "CREATE SCHEMA roir AUTHORIZATION modest")
        execute(connection, "CREATE SCHEMA roir_data AUTHORIZATION modest")
    modest = Database(empty.dsn.replace("postgres:", "modest:", 1))
    assert install.init(modest) == schema.head()


def test_a_role_that_may_not_create_is_told_what_it_needs(empty: Database) -> None:
    with empty.transaction() as connection:
        execute(connection, "DROP ROLE IF EXISTS poor")
        execute(connection, "CREATE ROLE poor LOGIN")
    poor = Database(empty.dsn.replace("postgres:", "poor:", 1))
    with pytest.raises(InvalidInput, match="GRANT CREATE ON DATABASE"):
        install.init(poor)
