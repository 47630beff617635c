"""Writes are announced by the shard's server or by its clients; the errors of both, and what the status says."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import psycopg2
import pytest
from psycopg2 import errors
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from airflow_roir.announcing import announce as announce_by_client
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import InvalidInput
from airflow_roir.shards.announce import announce, intents
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.ship.feed import FeedShipper
from servers.shards import run_sql
from tests.shards.announced import (
    INDEX,
    Scene,
    add_feeds,
    add_generation,
    fresh,
    index_dsn,
    of_shard,
    scene,
)
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(3)
TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i",
)


def opened(scene: Scene, shard: str = "s0") -> Any:
    connection = psycopg2.connect(scene.made.dsns[shard])
    return closing(connection)


def run(connection: Any, *statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def announced(scene: Scene) -> list[tuple[Any, ...]]:
    """Key and id of each intent, sorted."""
    return sorted(row[1:4:2] for row in scene.intents())


def test_a_server_announces_before_the_commit(contrib_shards: Make) -> None:
    found = scene(contrib_shards(2, *TABLE), "server")
    assert found.intents() == []
    found.made.run("UPDATE t SET k = 'new' WHERE id = 1", only="s0")
    assert [row[1:4] for row in found.intents()] == [("k1", "s0", 1), ("new", "s0", 1)]
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()


# The statements of a transaction, and the entries (key, id) that it announces, each entry once.
TRANSACTIONS = {
    "insert": (["INSERT INTO t VALUES (7, 'n', 7)"], [("n", 7)]),
    "delete": (["DELETE FROM t WHERE id = 1"], [("k1", 1)]),
    "included": (["UPDATE t SET v = 9 WHERE id = 1"], [("k1", 1)]),
    "key": (["UPDATE t SET k = 'n' WHERE id = 1"], [("k1", 1), ("n", 1)]),
    "primary key": (["UPDATE t SET id = 11 WHERE id = 1"], [("k1", 1), ("k1", 11)]),
    "null": (["UPDATE t SET k = NULL WHERE id = 1"], [("k1", 1), (None, 1)]),
    "nothing": (["UPDATE t SET v = v"], []),
    "twice": (["UPDATE t SET v = 9 WHERE id = 1", "UPDATE t SET v = 10 WHERE id = 1"], [("k1", 1)]),
    "inserted and deleted": (["INSERT INTO t VALUES (7, 'n', 7)", "DELETE FROM t WHERE id = 7"], [("n", 7)]),
    "all rows": (["UPDATE t SET v = v + 1"], [(f"k{i % 3}", i) for i in range(1, 7)]),
    "savepoint kept": (
        ["UPDATE t SET v = 9 WHERE id = 1", "SAVEPOINT a", "UPDATE t SET v = 9 WHERE id = 2", "RELEASE a"],
        [("k1", 1), ("k2", 2)],
    ),
    "savepoint rolled back": (
        ["UPDATE t SET v = 9 WHERE id = 1", "SAVEPOINT a", "UPDATE t SET v = 8", "ROLLBACK TO a"],
        [("k1", 1)],
    ),
    "same row in a savepoint that is rolled back": (
        ["UPDATE t SET v = 9 WHERE id = 1", "SAVEPOINT a", "UPDATE t SET v = 8 WHERE id = 1", "ROLLBACK TO a"],
        [("k1", 1)],
    ),
    "immediate": (
        ["UPDATE t SET v = 9 WHERE id = 1", "SET CONSTRAINTS ALL IMMEDIATE", "UPDATE t SET v = 9 WHERE id = 2"],
        [("k1", 1), ("k2", 2)],
    ),
    "sent in a savepoint that is rolled back": (
        [
            "UPDATE t SET v = 9 WHERE id = 1",
            "SAVEPOINT a",
            "UPDATE t SET v = 9 WHERE id = 2",
            "SET CONSTRAINTS ALL IMMEDIATE",
            "ROLLBACK TO a",
            "UPDATE t SET v = 9 WHERE id = 3",
        ],
        [("k1", 1), ("k0", 3)],
    ),
    "sent before a savepoint, and again": (
        [
            "UPDATE t SET v = 9 WHERE id = 1",
            "SET CONSTRAINTS ALL IMMEDIATE",
            "SET CONSTRAINTS ALL DEFERRED",
            "SAVEPOINT a",
            "UPDATE t SET v = 10 WHERE id IN (1, 2)",
            "ROLLBACK TO a",
            "UPDATE t SET v = 11 WHERE id = 3",
        ],
        [("k1", 1), ("k0", 3)],
    ),
    "an exception that was caught": (
        [
            "UPDATE t SET v = 9 WHERE id = 1",
            "DO $$ BEGIN UPDATE t SET v = 9 WHERE id = 2; RAISE 'no'; EXCEPTION WHEN OTHERS THEN END $$",
            "DO $$ BEGIN UPDATE t SET v = 9 WHERE id = 3; EXCEPTION WHEN OTHERS THEN END $$",
        ],
        [("k1", 1), ("k0", 3)],
    ),
    "after sequences were forgotten": (["UPDATE t SET v = 9 WHERE id = 1", "DISCARD SEQUENCES"], [("k1", 1)]),
    "by a cursor that stays": (
        [
            "CREATE FUNCTION pg_temp.w() RETURNS int LANGUAGE sql AS 'UPDATE t SET v = 9 WHERE id = 2 RETURNING 1'",
            "UPDATE t SET v = 9 WHERE id = 1",
            "DECLARE c CURSOR WITH HOLD FOR SELECT pg_temp.w()",
        ],
        [("k1", 1), ("k2", 2)],
    ),
    "merge": (
        [
            "MERGE INTO t USING (VALUES (1), (7)) s (id) ON t.id = s.id "
            "WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'n', 7)"
        ],
        [("k1", 1), ("n", 7)],
    ),
    "after a reset": (["UPDATE t SET v = 9 WHERE id = 1", "RESET ALL"], [("k1", 1)]),
}


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("case", TRANSACTIONS)
def test_exactly_what_a_transaction_touched_is_announced(contrib_shards: Make, case: str, isolation: str) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    statements, expected = TRANSACTIONS[case]
    with opened(found) as writer:
        run(writer, f"SET TRANSACTION ISOLATION LEVEL {isolation}", *statements)
        writer.commit()
    rows = announced_keys(found)
    assert set(rows) == set(expected)
    if isolation != "SERIALIZABLE" and "again" not in case:
        assert max(Counter(rows).values(), default=1) == 1
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()


def announced_keys(scene: Scene) -> list[tuple[Any, ...]]:
    return [(row[1], row[3]) for row in scene.intents()]


def test_serializable_writers_do_not_disturb_each_other(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    with opened(found) as one, opened(found) as other:
        for number, writer in enumerate((one, other), 1):
            run(writer, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE", f"UPDATE t SET v = 0 WHERE id = {number}")
        one.commit()
        other.commit()
    assert sorted(announced_keys(found)) == [("k1", 1), ("k2", 2)]


def test_many_rows_go_in_few_statements(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    found.made.run("INSERT INTO t SELECT i, 'b', i FROM generate_series(100, 5099) i")
    assert len(found.intents()) == 5000
    # Sent by few statements: each has a moment of its own.
    assert found.intents("DISTINCT xid") == [(found.intents("xid")[0][0],)]


def test_a_transaction_cannot_be_prepared(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    with opened(found) as writer:
        run(writer, "UPDATE t SET v = 0 WHERE id = 1")
        with pytest.raises(
            errors.FeatureNotSupported, match="cannot PREPARE a transaction that has operated on postgres_fdw"
        ):
            run(writer, "PREPARE TRANSACTION 'p'")
    assert found.intents() == []


def test_a_write_fails_while_the_index_server_is_away(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    name = psycopg2.extensions.parse_dsn(found.made.index)["dbname"]
    away = f"ALTER DATABASE {name} ALLOW_CONNECTIONS "
    with opened(found) as writer:
        run_sql(found.made.dsns["s0"], away + "false")
        run(writer, "UPDATE t SET v = 0 WHERE id = 1")
        with pytest.raises(
            psycopg2.Error, match=r'could not connect to server "roir index server .* \(see roir announce\)"'
        ):
            writer.commit()
        run_sql(found.made.dsns["s0"], away + "true")
        run(writer, "UPDATE t SET v = 0 WHERE id = 1")
        writer.commit()
    assert announced_keys(found) == [("k1", 1)]


def test_a_truncate_is_refused(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    with pytest.raises(errors.FeatureNotSupported, match="a TRUNCATE cannot be announced"):
        found.made.run("TRUNCATE t")
    announce.announce(found.database, INDEX, None)
    found.made.run("TRUNCATE t")


def test_partitions_cannot_be_announced(shards: Make) -> None:
    found = scene(
        shards(
            1,
            "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
        )
    )
    with pytest.raises(InvalidInput, match="has partitions"):
        announce.announce(found.database, INDEX, "client")
    assert found.made.ask("SELECT announced_by FROM roir.index") == [(None,)]


def problem(scene: Scene) -> str | None:
    with scene.database.transaction() as connection:
        return announce.strict_problem(connection, scene.generation_id)


def test_strict_reads_begin_with_the_first_pass_after_the_last_shard(contrib_shards: Make) -> None:
    found = scene(contrib_shards(2, *TABLE))
    assert "writes are not announced" in str(problem(found))
    fresh(found)
    announce.announce(found.database, INDEX, "server")
    assert "not all that was written in shard s0" in str(problem(found))
    fresh(found)
    assert problem(found) is None
    found.made.ask(
        "UPDATE roir.feed SET doubtful_at = now(), doubt = 'lost commits' WHERE id = (SELECT min(id) FROM roir.feed)"
    )
    assert "may be wrong: lost commits" in str(problem(found))
    found.made.ask("UPDATE roir.feed SET doubtful_at = NULL, doubt = NULL")
    found.made.ask("UPDATE roir.feed SET strict_history = 'another/1'")
    assert "was promoted or recovered" in str(problem(found))
    announce.announce(found.database, INDEX, None)
    assert "writes are not announced" in str(problem(found))


def test_a_clock_that_was_set_back_makes_nothing_fresh(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE))
    found.made.ask("UPDATE roir.feed SET fresh_at = clock_timestamp() + interval '1 hour'")
    announce.announce(found.database, INDEX, "server")
    assert "not all that was written" in str(problem(found))


def test_writers_in_flight_end_before_the_announcing_begins(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE))
    with opened(found) as writer:
        run(writer, "UPDATE t SET v = 0 WHERE id = 1")
        waits: list[str] = []

        def report(line: str) -> None:
            waits.append(line)
            if len(waits) == 1:
                assert "blocked by" in line
                writer.commit()

        announce.announce(found.database, INDEX, "server", report)
    assert len(waits) > 1
    assert found.intents() == []


def test_whoever_switches_the_announcing_off_is_seen(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    [feed] = found.feeds
    asked = f"SELECT roir_shard.announcing_problem('{feed.outbox}')"
    assert found.made.ask(asked, shard="s0") == [(None,)]
    for broken, repaired in (
        (
            f"ALTER TABLE roir_shard.{feed.outbox} DISABLE TRIGGER roir_announce",
            f"ALTER TABLE roir_shard.{feed.outbox} ENABLE ALWAYS TRIGGER roir_announce",
        ),
        (
            f"ALTER TABLE t DISABLE TRIGGER roir_{feed.outbox}_w",
            f"ALTER TABLE t ENABLE ALWAYS TRIGGER roir_{feed.outbox}_w",
        ),
        (
            f"ALTER FUNCTION roir_shard.{feed.outbox}_announce() SECURITY INVOKER",
            f"ALTER FUNCTION roir_shard.{feed.outbox}_announce() SECURITY DEFINER",
        ),
        (f"ALTER FOREIGN TABLE roir_shard.{feed.outbox}_intent OPTIONS (SET table_name 'other')", None),
    ):
        found.made.run(broken)
        assert found.made.ask(asked, shard="s0") != [(None,)], broken
        if repaired:
            found.made.run(repaired)
            assert found.made.ask(asked, shard="s0") == [(None,)], repaired
    announce.announce(found.database, INDEX, "server")
    assert found.made.ask(asked, shard="s0") == [(None,)]


def test_a_rebuild_announces_before_it_is_published(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    with found.database.transaction() as connection:
        newer = add_generation(connection, found.index_id, found.entry, "building")
    add_feeds(found, newer)
    announce.keep_on(found.database, newer)
    found.made.run("UPDATE t SET k = 'n' WHERE id = 1")
    for generation in (found.generation_id, newer):
        rows = found.made.ask(f"SELECT c1, c3 FROM {intents.table(generation)} ORDER BY 1")
        assert rows == [("k1", 1), ("n", 1)]
    announce.keep_on(found.database, newer)
    with found.database.transaction() as connection:
        assert "not all that was written" in str(announce.strict_problem(connection, newer))


def test_an_index_server_that_cannot_be_reached_is_told_when_it_is_set_up(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE))
    for dsn, told in (
        (None, "has no address of the index server"),
        ("host=localhost", "must name at least user and dbname"),
        ("host=/nowhere user=postgres dbname=x", "can't write to the index server: could not connect"),
    ):
        found.made.ask("UPDATE roir.shard SET index_dsn = %s", dsn)
        with pytest.raises(InvalidInput, match=told):
            announce.announce(found.database, INDEX, "server")
    found.made.run("UPDATE t SET v = 0 WHERE id = 1")
    assert "don't announce" in str(problem(found)) or "aren't announced" in str(problem(found))


def test_an_index_dsn_that_leads_elsewhere_is_refused(contrib_shards: Make) -> None:
    """Even if the other database has a table of that name."""
    found, other = scene(contrib_shards(1, *TABLE)), scene(contrib_shards(1, *TABLE))
    found.made.ask("UPDATE roir.shard SET index_dsn = %s", index_dsn(other.made))
    with pytest.raises(InvalidInput, match="writes to another database than this index server's"):
        announce.announce(found.database, INDEX, "server")


def test_a_client_announces_to_each_index_server_its_own(shards: Make) -> None:
    found, other = scene(shards(1, *TABLE), "client"), scene(shards(1, *TABLE), "client")
    with Database(found.made.dsns["s0"]).connect() as here, Database(other.made.index).connect() as there:
        here.execute(text("UPDATE public.t SET v = 0 WHERE id = 1"))
        assert announce_by_client(here, there) == 0
        assert other.intents() == []
        with pytest.raises(DBAPIError, match="was not announced"):
            here.commit()
        here.rollback()


def test_the_role_of_the_shards_may_write_intents_and_nothing_else(contrib_shards: Make) -> None:
    made = contrib_shards(1, *TABLE)
    [(role,)] = made.ask("SELECT 'announcer_' || current_database()")
    run_sql(made.index, f"CREATE ROLE {role} LOGIN")
    try:
        found = scene(made)
        made.ask("UPDATE roir.shard SET index_dsn = regexp_replace(index_dsn, 'user=\\S+', 'user=' || %s)", role)
        announce.announce(found.database, INDEX, "server")
        made.run("UPDATE t SET v = 0 WHERE id = 1")
        assert announced_keys(found) == [("k1", 1)]
        with closing(psycopg2.connect(made.index.replace("//postgres:@", f"//{role}:@"))) as connection:
            for statement in ("SELECT * FROM {}", "DELETE FROM {}", "UPDATE {} SET put = true", "TRUNCATE {}"):
                with pytest.raises(errors.InsufficientPrivilege):
                    run(connection, statement.format(intents.table(found.generation_id)))
                connection.rollback()
        with found.database.transaction() as connection:
            newer = add_generation(connection, found.index_id, found.entry, "building")
        assert made.ask(f"SELECT has_table_privilege('{role}', '{intents.table(newer)}', 'INSERT')") == [(True,)]
    finally:
        run_sql(made.index, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


# By clients.


def test_a_client_announces_or_is_refused(shards: Make) -> None:
    found = scene(shards(2, *TABLE), "client")
    source, index = Database(found.made.dsns["s0"]), Database(found.made.index)
    with source.connect() as here, index.connect() as there:
        here.execute(text("UPDATE public.t SET k = 'n' WHERE id = 1"))
        with pytest.raises(DBAPIError, match="was not announced to the index server") as refused:
            here.commit()
        assert refused.value.orig.pgcode == "55000"  # type: ignore[union-attr]
        here.rollback()
        here.execute(text("UPDATE public.t SET k = 'n' WHERE id = 1"))
        assert announce_by_client(here, there) == 2
        assert sorted(announced_keys(found)) == [("k1", 1), ("n", 1)]
        assert announce_by_client(here, there) == 0
        here.execute(text("UPDATE public.t SET k = 'n' WHERE id = 2"))
        with pytest.raises(DBAPIError, match="was not announced"):
            here.commit()
        here.rollback()
        # The intents of a transaction that was rolled back go.
        found.rest()
        assert found.intents() == []
        here.execute(text("UPDATE public.t SET k = 'n' WHERE id = 1"))
        announce_by_client(here, there)
        here.execute(text("UPDATE public.t SET k = NULL WHERE id = 2"))
        assert announce_by_client(here, there) == 2
        here.commit()
    assert len(found.intents()) == 4
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()


def test_what_a_savepoint_took_back_was_not_announced(shards: Make) -> None:
    """The announcement within a savepoint goes with it, for the shard; on the index server it only costs a look."""
    found = scene(shards(1, *TABLE), "client")
    with Database(found.made.dsns["s0"]).connect() as here, Database(found.made.index).connect() as there:
        here.execute(text("UPDATE public.t SET v = 0 WHERE id = 1"))
        here.execute(text("SAVEPOINT a"))
        here.execute(text("UPDATE public.t SET v = 0 WHERE id = 2"))
        assert announce_by_client(here, there) == 2
        here.execute(text("ROLLBACK TO a"))
        with pytest.raises(DBAPIError, match="was not announced"):
            here.commit()
        here.rollback()


def test_a_client_needs_no_rights_but_to_write(shards: Make) -> None:
    made = shards(1, *TABLE)
    [(role,)] = made.ask("SELECT 'writer_' || current_database()")
    run_sql(made.index, f"CREATE ROLE {role} LOGIN")
    try:
        found = scene(made, "client")
        made.run(f"GRANT SELECT, UPDATE ON t TO {role}")
        made.ask(f"GRANT INSERT ON {intents.table(found.generation_id)} TO {role}")
        ours, theirs = (dsn.replace("//postgres:@", f"//{role}:@") for dsn in (made.dsns["s0"], made.index))
        with Database(ours).connect() as here, Database(theirs).connect() as there:
            here.execute(text("UPDATE public.t SET v = 0 WHERE id = 1"))
            assert announce_by_client(here, there) == 1
            here.commit()
        assert announced_keys(found) == [("k1", 1)]
    finally:
        for dsn in (made.index, made.dsns["s0"]):
            run_sql(dsn, f"DROP OWNED BY {role}")
        run_sql(made.index, f"DROP ROLE {role}")


def test_a_client_may_prepare_its_transaction(shards: Make) -> None:
    found = scene(shards(1, *TABLE), "client")
    [feed] = found.feeds
    with Database(found.made.dsns["s0"]).connect() as here, Database(found.made.index).connect() as there:
        here.execute(text("UPDATE public.t SET k = 'n' WHERE id = 1"))
        announce_by_client(here, there)
        here.execute(text("PREPARE TRANSACTION 'p'"))
    found.ship(feed)
    assert len(found.intents()) == 2
    run_sql(found.made.dsns["s0"], "COMMIT PREPARED 'p'")
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()


def test_the_index_connection_must_be_able_to_commit(shards: Make) -> None:
    found = scene(shards(1, *TABLE), "client")
    with Database(found.made.dsns["s0"]).connect() as here, Database(found.made.index).connect() as there:
        here.execute(text("UPDATE public.t SET k = 'n' WHERE id = 1"))
        there.execute(text("SELECT 1"))
        with pytest.raises(InvalidInput, match="is in a transaction"):
            announce_by_client(here, there)
        there.rollback()
        with (
            psycopg_engine(found.made.index, "").execution_options(isolation_level="AUTOCOMMIT") as alone,
            pytest.raises(InvalidInput, match="commits each statement"),
        ):
            announce_by_client(here, alone)


def test_values_of_any_type_are_announced_as_they_are(shards: Make) -> None:
    """By a client whose session writes and reads values in its own way."""
    key = "i interval, m money, b bytea, j jsonb, a text[], f float8, d timestamptz, n numeric"
    values = (
        "'-1 mons +2 days', '$1,234.50', '\\x00ff', '{\"a\": [1, null, \"x\"]}', '{a,NULL,\"b \"}', 0.1, "
        "'2020-02-01 03:04:05+00', 1.500"
    )
    made = shards(1, f"CREATE TABLE t (id int PRIMARY KEY, k text, v int, {key})")
    names = [column.split()[0] for column in key.split(", ")]
    found = scene(made, "client", tuple(names))
    strange = "-c DateStyle=SQL,DMY -c IntervalStyle=sql_standard -c bytea_output=escape -c TimeZone=Asia/Tokyo"
    with psycopg_engine(made.dsns["s0"], strange) as here, psycopg_engine(made.index, strange) as there:
        here.execute(text(f"INSERT INTO public.t VALUES (1, 'k', 1, {values})".replace(":", "\\:")))
        assert announce_by_client(here, there) == 1
        here.commit()
    columns = ", ".join(names)
    theirs = ", ".join(f"c{i + 1}" for i in range(len(names)))
    assert made.ask(f"SELECT ({columns})::text FROM t", shard="s0") == made.ask(
        f"SELECT ROW({theirs})::text FROM {intents.table(found.generation_id)}"
    )


def psycopg_engine(dsn: str, options: str) -> Any:
    from sqlalchemy import create_engine

    return create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(dsn, options=options)).connect()


def shipped(scene: Scene) -> None:
    """Ships by the engine's own shipper."""
    for feed in scene.feeds:
        with closing(FeedShipper(scene.database, feed.id, "test")) as shipper:
            assert shipper.claim(take_over=True)
            shipper.ship_pass()
            shipper.release()


def test_the_shipper_settles_what_is_announced(contrib_shards: Make) -> None:
    found = scene(contrib_shards(2, *TABLE), "server")
    found.made.run("UPDATE t SET k = 'n' WHERE id = 1", "UPDATE t SET k = NULL WHERE id = 2")
    columns = "(c1, c2, c3, xid, at) VALUES ('x', 's0', 9, %s, '2020-01-01')"
    put = f"INSERT INTO {intents.table(found.generation_id)} {columns}"
    found.made.ask(put, "3")
    found.made.ask(put, "9000000000")
    for _ in range(2):
        shipped(found)
    assert found.intents() == []
    assert found.stored() == found.truth()
    assert problem(found) is None


def test_a_poll_that_finds_no_announcing_ends_strict_reads(contrib_shards: Make) -> None:
    found = scene(contrib_shards(1, *TABLE), "server")
    [feed] = found.feeds
    found.made.run(f"ALTER TABLE roir_shard.{feed.outbox} DISABLE TRIGGER roir_announce")
    shipped(found)
    assert "writers of shard s0 don't announce" in str(problem(found))
    announce.announce(found.database, INDEX, "server")
    shipped(found)
    assert problem(found) is None
    # As after a restore of the shard from a backup that is older than the announcing.
    found.made.run("UPDATE roir_shard.outbox SET announced_by = NULL")
    shipped(found)
    assert "writers of shard s0 don't announce" in str(problem(found))


@pytest.mark.parametrize("by", ["server", "client"])
def test_a_repair_has_nothing_to_announce(contrib_shards: Make, by: str) -> None:
    found = scene(contrib_shards(1, *TABLE), by)
    [feed] = found.feeds
    with of_shard(found.made, "s0").transaction() as connection:
        entry = outbox.read_entry(connection, feed.outbox)
        assert entry is not None
        announce.nothing_to_announce(connection, feed.outbox)
        execute(connection, outbox.touch(feed.outbox, entry, "VALUES ('k1', 1)"))
    assert found.intents() == []
    if by == "server":
        found.made.run("UPDATE t SET v = 0 WHERE id = 1")
        assert len(found.intents()) == 1
