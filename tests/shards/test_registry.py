"""Shards are added, listed and removed; what would make an index wrong is refused."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from airflow_roir.engine.database import execute
from airflow_roir.engine.sessions.limits import DEFAULT
from airflow_roir.errors import InvalidInput, NotFound, OperationRunning, RightMissing, SchemaVersionMismatch
from airflow_roir.shards import home, registry, shard
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import Shard
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(3)


def test_a_shard_is_added_listed_and_removed_and_nothing_stays(shards: Make) -> None:
    made = shards(2)
    before = made.ask("SELECT nspname FROM pg_namespace ORDER BY 1", shard="s0")
    for _ in range(2):
        for name in made.names:
            registry.add(made.database, name, made.dsns[name])
    assert [one.name for one in registry.listed(made.database)] == ["s0", "s1"]
    assert registry.probe(made.database, "s0") is None
    registry.remove(made.database, "s0")
    assert [one.name for one in registry.listed(made.database)] == ["s1"]
    assert made.ask("SELECT nspname FROM pg_namespace ORDER BY 1", shard="s0") == before
    with pytest.raises(NotFound):
        registry.remove(made.database, "s0")
    # Its name is free again.
    registry.add(made.database, "s0", made.dsns["s0"])


def test_one_database_is_no_two_shards_and_a_name_leads_to_one_database(shards: Make) -> None:
    made = shards(2)
    registry.add(made.database, "a", made.dsns["s0"])
    with pytest.raises(InvalidInput, match='is shard "a" already'):
        registry.add(made.database, "b", made.dsns["s0"])
    with pytest.raises(InvalidInput, match="leads to another database"):
        registry.add(made.database, "a", made.dsns["s1"])


def test_another_database_behind_the_dsn_is_not_worked_with(shards: Make) -> None:
    made = shards(1)
    added = registry.add(made.database, "a", made.dsns["s0"])
    made.run("UPDATE roir_shard.home SET token = gen_random_uuid()")
    there = added.database("test", made.database.limits)
    with there.transaction() as connection, pytest.raises(InvalidInput, match="another database answers"):
        home.check(connection, added)
    assert "another database answers" in str(registry.probe(made.database, "a"))


def test_other_versions_of_the_small_schema_are_told_with_the_remedy(shards: Make) -> None:
    made = shards(1)
    registry.add(made.database, "a", made.dsns["s0"])
    made.run(f"UPDATE roir_shard.home SET version = {home.VERSION + 1}")
    with pytest.raises(SchemaVersionMismatch, match="Upgrade airflow-provider-roir"):
        registry.add(made.database, "a", made.dsns["s0"])


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 64, "\x1b[1m", "a,b"])
def test_names_that_no_entry_should_carry_are_refused(shards: Make, name: str) -> None:
    made = shards(1)
    with pytest.raises(InvalidInput):
        registry.add(made.database, name, made.dsns["s0"])


def test_no_password_is_listed(shards: Make) -> None:
    made = shards(1)
    dsn = made.dsns["s0"] + ("&" if "?" in made.dsns["s0"] else "?") + "password=" + quote("hush hush")
    registry.add(made.database, "a", dsn, index_dsn="postgresql://u:hushhush@h/d")
    found = registry.listed(made.database)[0]
    assert "hush" not in str(found.as_dict()) + repr(found)
    with made.database.transaction() as connection:
        assert "hush" not in repr(shard.find(connection, "a"))


def test_the_schema_is_its_makers_alone(shards: Make) -> None:
    made = shards(1)
    registry.add(made.database, "a", made.dsns["s0"])
    role = made.ask("SELECT current_database()", shard="s0")[0][0] + "_other"
    made.run(f"CREATE ROLE {role} LOGIN SUPERUSER")
    try:
        owner = made.ask("SELECT session_user", shard="s0")[0][0]
        dsn = made.dsns["s0"].replace(f"//{owner}", f"//{role}")
        with pytest.raises(RightMissing, match="connect to the shard as that role"):
            registry.add(made.database, "b", dsn)
        usage = "SELECT has_schema_privilege('pg_monitor', 'roir_shard', 'USAGE')"
        assert made.ask(usage, shard="s0") == [(False,)]
    finally:
        made.run(f"DROP ROLE {role}")


def test_a_shard_that_an_index_is_over_stays(shards: Make) -> None:
    made = shards(1)
    added = registry.add(made.database, "a", made.dsns["s0"])
    with made.database.transaction() as connection:
        execute(
            connection,
            "INSERT INTO roir.index (schema_name, name, source_oid, key_columns, included_columns) "
            "VALUES ('public', 'i', 1, '[]', '[]'); "
            "INSERT INTO roir.generation (index_id, status, capture_mode, entry) SELECT id, 'active', 'active', '{}' "
            "FROM roir.index; "
            f"INSERT INTO roir.feed (generation_id, shard_id, outbox, source_oid) SELECT id, {added.id}, 'o_1', 1 "
            "FROM roir.generation",
        )
    with pytest.raises(OperationRunning, match=r"has entries in public\.i; rebuild"):
        registry.remove(made.database, "a")
    # Rebuilt without it: what was replaced is kept for a while, and only then it may go.
    made.ask(
        "UPDATE roir.generation SET status = 'retired', retired_at = now(), published_at = now(), "
        "drop_after = '2031-05-06 07:08Z'"
    )
    with pytest.raises(
        OperationRunning, match=r"only in replaced generations of public\.i \(kept until 2031-05-06 07:08"
    ):
        registry.remove(made.database, "a")
    assert outbox.table("o_1") == "roir_shard.o_1"


@pytest.mark.parametrize(
    ("dsn", "leads"),
    [
        ("host=db hostaddr=10.6.6.6", "hostaddr beside a host"),
        ("service=prod host=evil", "host beside a service"),
        ("service=prod hostaddr=10.6.6.6", "hostaddr beside a service"),
        ("service=prod port=6", "port beside a service"),
        ("service=prod dbname=d user=u", None),
        ("host=db port=6 sslmode=require", None),
        ("hostaddr=10.6.6.6", None),
        ("host=db hostaddr=10.6.6.6 password=x", None),
    ],
)
def test_a_row_leads_no_password_of_this_machine_elsewhere(dsn: str, leads: str | None) -> None:
    one = Shard(1, "s0", dsn)
    if leads is None:
        one.database("roir tests", DEFAULT)
        return
    with pytest.raises(InvalidInput, match=leads):
        one.database("roir tests", DEFAULT)
