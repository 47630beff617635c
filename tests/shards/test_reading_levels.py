"""Reads of an index apart: what each level promises, with writer, shipper and reader in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest
from sqlalchemy import text

from airflow_roir.errors import NotStrict
from airflow_roir.reading import candidates, sharded
from servers.shards import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.shards.conftest import Make
from tests.shards.reading import Ground, Item, T, ground, with_servers

pytestmark = pytest.mark.sample(6)

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i",
    "INSERT INTO t VALUES (10, 'a', 10)",
)
STRICT = 'SELECT id, k, v, shard FROM roir.strict(NULL::public.t_by_k, \'{"k": "a"}\')'
TENS = {(10, "a", 10, "s0"), (10, "a", 10, "s1")}
Reader = Callable[[Callable[[], object]], set[tuple[Any, ...]]]


@pytest.fixture
def two(shards: Make) -> Iterator[Ground]:
    """A ground that clients read and write."""
    with ground(shards(2, *TABLE)) as made:
        yield made


@pytest.fixture
def both(contrib_shards: Make) -> Iterator[Ground]:
    """A ground that clients and the server read."""
    with ground(contrib_shards(2, *TABLE)) as made:
        with_servers(made)
        yield made


def by_client(ground: Ground, monkeypatch: pytest.MonkeyPatch, level: str = "strict") -> Reader:
    """A reader who has the first snapshot of the index server, then comes what is given, then the shards are asked."""

    def read(between: Callable[[], object]) -> set[tuple[Any, ...]]:
        asked = sharded.ShardedIndex._ask
        done: list[bool] = []

        def ask(self: Any, *values: Any) -> Any:
            if not done:
                done.append(True)
                between()
            return asked(self, *values)

        with monkeypatch.context() as patch:
            patch.setattr(sharded.ShardedIndex, "_ask", ask)
            found = ground.index.rows(T, T.c.k == "a", level)  # type: ignore[arg-type]
        return {(*row, shard) for row, shard in found}

    return read


def by_server(ground: Ground) -> Reader:
    """The same: a cursor has the snapshot of its DECLARE, and asks the shards when rows are fetched."""

    def read(between: Callable[[], object]) -> set[tuple[Any, ...]]:
        user = steps.session(ground.made.index)
        sql(user, f"DECLARE c CURSOR FOR {STRICT}")
        between()
        found = set(sql(user, "FETCH ALL FROM c"))
        user.close()
        return found

    return read


def leave(ground: Ground) -> None:
    ground.write("s0", "UPDATE t SET k = 'b' WHERE id = 10")


def come(ground: Ground) -> None:
    ground.write("s0", "UPDATE t SET k = 'a' WHERE id = 1")


def touch(ground: Ground) -> None:
    ground.write("s0", "UPDATE t SET v = 11 WHERE id = 10")


def settled(change: Callable[[Ground], None]) -> Callable[[Ground], None]:
    def run(ground: Ground) -> None:
        change(ground)
        ground.ship()

    return run


def and_back(ground: Ground) -> None:
    leave(ground)
    ground.ship()
    ground.write("s0", "UPDATE t SET k = 'a' WHERE id = 10")


ALWAYS = {(10, "a", 10, "s1")}
# Changes between the reader's two looks, and the rows that must be found, and those that may be.
BETWEEN: dict[str, tuple[Callable[[Ground], None], set[tuple[Any, ...]], set[tuple[Any, ...]]]] = {
    "nothing": (lambda ground: None, TENS, TENS),
    "it leaves": (leave, ALWAYS, TENS),
    "it leaves and is shipped": (settled(leave), ALWAYS, TENS),
    "it leaves and comes back": (and_back, ALWAYS, TENS),
    "another comes": (come, TENS, TENS | {(1, "a", 1, "s0")}),
    "another comes and is shipped": (settled(come), TENS, TENS | {(1, "a", 1, "s0")}),
    "it is touched": (
        lambda g: g.write("s0", "UPDATE t SET v = 11 WHERE id = 10"),
        ALWAYS,
        TENS | {(10, "a", 11, "s0")},
    ),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("change", BETWEEN)
@pytest.mark.parametrize("pending", [False, True], ids=["settled", "pending"])
def test_what_was_there_before_and_after_is_found_and_nothing_that_never_was(
    both: Ground, monkeypatch: pytest.MonkeyPatch, change: str, pending: bool
) -> None:
    between, least, most = BETWEEN[change]
    for reader in (by_client(both, monkeypatch), by_server(both)):
        if pending:
            # Named by intents when the reader begins: of a commit, and of a transaction that is rolled back.
            both.write("s1", "UPDATE t SET v = v WHERE id = 10", "UPDATE t SET v = 10 WHERE id = 10")
            both.write("s0", "UPDATE t SET v = 99 WHERE id = 10", "UPDATE t SET v = 10 WHERE id = 10")
        found = reader(lambda: between(both))
        assert least <= found <= most
        both.write("s0", "UPDATE t SET k = 'a', v = 10 WHERE id = 10", "UPDATE t SET k = 'k1' WHERE id = 1")
        both.ship()


def test_a_transaction_that_announced_and_has_not_committed_hides_nothing_and_shows_nothing(both: Ground) -> None:
    with both.engines["s0"].connect() as writer:
        writer.execute(text("UPDATE t SET k = 'b' WHERE id = 10"))
        writer.execute(text("UPDATE t SET k = 'a' WHERE id = 1"))
        both.announce(writer)
        assert both.strict() == both.sql_strict() == TENS
        assert both.strict("b") == both.sql_strict("b") == set()
        writer.rollback()
    assert both.strict() == both.sql_strict() == TENS
    assert both.strict("k1") == both.sql_strict("k1") == {(i, "k1", i, s) for i in (1, 4) for s in ("s0", "s1")}


def test_what_is_committed_is_found_at_once_by_strict_reads_alone(both: Ground) -> None:
    both.write("s0", "INSERT INTO t VALUES (20, 'a', 20), (21, NULL, 21)", "DELETE FROM t WHERE id = 10")
    now = {(20, "a", 20, "s0"), (10, "a", 10, "s1")}
    assert both.strict() == both.sql_strict() == now
    # The view says what was shipped; rows by way of it are true, and lack what wasn't.
    assert set(both.made.ask("SELECT id, k, v, shard FROM public.t_by_k WHERE k = 'a'")) == TENS
    for level, values in (("eventual", {}), ("bounded", {"max_staleness": 60})):
        found = both.index.rows(T, T.c.k == "a", level, **values)  # type: ignore[arg-type]
        assert {(*row, shard) for row, shard in found} == ALWAYS
    assert both.strict(None) == {(21, None, 21, "s0")}
    assert both.made.ask("SELECT id, k, v, shard FROM roir.strict(NULL::public.t_by_k, '{\"k\": null}')") == [
        (21, None, 21, "s0")
    ]
    assert both.made.ask('SELECT id FROM roir.strict(NULL::public.t_by_k, \'{"k": "a", "id": 20}\')') == [(20,)]
    assert both.made.ask('SELECT id FROM roir.strict(NULL::public.t_by_k, \'{"shard": "s1", "k": "a"}\')') == [(10,)]


@pytest.mark.sample(0)
@pytest.mark.parametrize("by", ["server", "client"])
def test_the_grid_of_servers_and_clients(contrib_shards: Make, by: str) -> None:
    """All combinations: the server or clients announce writes, and the index server or clients ask the shards."""
    with ground(contrib_shards(2, *TABLE), by) as made:
        with_servers(made)
        made.write("s0", "UPDATE t SET k = 'b' WHERE id = 10", "UPDATE t SET k = 'a' WHERE id = 1")
        made.write("s1", "DELETE FROM t WHERE id = 10", "INSERT INTO t VALUES (10, 'a', 7)")
        now = {(1, "a", 1, "s0"), (10, "a", 7, "s1")}
        assert made.strict() == made.sql_strict() == now
        assert made.strict("b") == made.sql_strict("b") == {(10, "b", 10, "s0")}
        made.ship()
        assert made.strict() == made.sql_strict() == now


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_entries_and_intents_are_of_one_snapshot(two: Ground, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """A row whose intent is settled while the reader reads. broken: entries first, then intents."""
    two.write("s0", "UPDATE t SET k = 'a' WHERE id = 1")
    if broken:
        read = candidates.read

        def halves(connection: Any, wanted: Any) -> Any:
            found: dict[str, Any] = {}
            for number, half in enumerate(wanted.selects):
                if number:
                    two.ship()
                connection.rollback()
                for shard, one in read(connection, half).items():
                    found.setdefault(shard, one).keys.update(one.keys)
            return found

        monkeypatch.setattr(candidates, "read", halves)
        assert two.strict() == TENS, "the row is missed"
    else:
        assert two.strict() == TENS | {(1, "a", 1, "s0")}


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_a_row_that_moves_to_another_shard_is_found_in_one_of_them(
    two: Ground, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Inserted there before it is deleted here. broken: the reader doesn't look again when something has gone."""

    def move() -> None:
        two.write("s1", "INSERT INTO t VALUES (30, 'a', 30)")
        two.write("s0", "DELETE FROM t WHERE id = 30")

    two.write("s0", "INSERT INTO t VALUES (30, 'a', 30)")
    if broken:
        monkeypatch.setattr(sharded, "_has_gone", lambda *_: False)
    found = by_client(two, monkeypatch)(move)
    assert found - TENS == (set() if broken else {(30, "a", 30, "s1")})


def test_a_range_finds_a_row_once_while_its_key_moves_within_it(both: Ground) -> None:
    """One of its entries is settled, the other is still named."""
    both.write("s0", "UPDATE t SET k = 'b' WHERE id = 10")
    feed = both.scene.feed("s0")
    polled = both.scene.poll(feed, both.scene.look(feed, limit=0))
    polled.rows = [row for row in polled.rows if "b" in row[1]]
    both.scene.apply(feed, polled)
    assert len(both.scene.intents()) == 1
    found = both.index.rows(Item, Item.key.between("a", "c"), "strict")
    assert sorted((row.id, row.key, shard) for row, shard in found) == [(10, "a", "s1"), (10, "b", "s0")]
    assert both.made.ask('SELECT k FROM roir.strict(NULL::public.t_by_k, \'{"id": 10, "shard": "s0"}\')') == [("b",)]


@pytest.mark.parametrize("by", ["foreign table", "dblink"])
def test_a_foreign_table_would_be_older_than_the_question(both: Ground, by: str) -> None:
    """postgres_fdw keeps one snapshot of a shard for a transaction. foreign table: the broken variant."""
    index = both.made.index
    given = psycopg2.extensions.parse_dsn(both.made.dsns["s0"])
    run_sql(
        index,
        "CREATE EXTENSION postgres_fdw",
        "CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw "
        f"OPTIONS (host '{given['host']}', dbname '{given['dbname']}')",
        "CREATE USER MAPPING FOR CURRENT_USER SERVER far OPTIONS (user 'postgres', password_required 'false')",
        "CREATE FOREIGN TABLE far (id int, k text, v int) SERVER far OPTIONS (table_name 't')",
    )
    user = steps.session(index)
    named = "(SELECT a.id FROM roir_data.g1_announced a WHERE a.k = 'a' AND a.shard = 's0')"
    question = (
        f"SELECT f.id, f.k, f.v, 's0' FROM far f WHERE f.k = 'a' AND f.id IN {named}" if by != "dblink" else STRICT
    )
    sql(user, question)
    # Another question of the same transaction, which begins after this commit.
    both.write("s0", "UPDATE t SET k = 'a' WHERE id = 1")
    if by == "dblink":
        assert (1, "a", 1, "s0") in sql(user, question)
    else:
        sql(user, "SELECT count(*) FROM far")
        both.write("s0", "UPDATE t SET k = 'a' WHERE id = 4")
        assert set(sql(user, named)) == {(1,), (4,)}
        assert (4, "a", 4, "s0") not in sql(user, question), "the row is missed"


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_older_snapshot_of_the_index_is_refused_by_the_server(both: Ground, isolation: str) -> None:
    with pytest.raises(psycopg2.errors.FeatureNotSupported, match="strict reads need READ COMMITTED"):
        sql(steps.session(both.made.index, isolation), STRICT)


NOT_YET = {
    "not announced": "UPDATE roir.index SET announced_by = NULL",
    "not drained": "UPDATE roir.feed SET fresh_at = strict_from",
    "doubtful": "UPDATE roir.feed SET doubtful_at = now(), doubt = 'it lost commits'",
    "another history": "UPDATE roir.feed SET strict_history = 'another'",
}


@pytest.mark.parametrize("state", NOT_YET)
def test_strict_reads_are_refused_where_they_might_miss(both: Ground, state: str) -> None:
    run_sql(both.made.index, NOT_YET[state])
    with pytest.raises(NotStrict, match="t_by_k can't be read strictly now"):
        both.strict()
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="can't be read strictly now"):
        both.sql_strict()


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("{}", "InvalidParameterValue", "give at least one key column"),
        ("[]", "InvalidParameterValue", "give at least one key column"),
        ('{"v": 1}', "UndefinedColumn", "v isn't a column of its key or of the primary key"),
        ('{"k": "a", "x": 1}', "UndefinedColumn", "x isn't a column of its key or of the primary key: k, "),
        ('{"k": "a", "x": 1, "Y": 2}', "UndefinedColumn", '"Y", x isn.t a column'),
    ],
)
def test_conditions_that_intents_cannot_tell_are_refused_by_the_server(
    both: Ground, key: str, error: str, message: str
) -> None:
    with pytest.raises(getattr(psycopg2.errors, error), match=message):
        both.made.ask("SELECT * FROM roir.strict(NULL::public.t_by_k, %s)", key)


def test_what_answers_must_be_the_shard_as_the_index_knows_it(both: Ground) -> None:
    index = both.made.index
    both.write("s0", "UPDATE t SET v = 5 WHERE id = 10")
    refused = "shard s0: it has lost commits that the index has"
    run_sql(index, "UPDATE roir.feed SET tick = tick + 1000")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match=refused):
        both.sql_strict()
    with pytest.raises(NotStrict, match="it has lost commits that the index has"):
        both.strict()
    run_sql(index, "UPDATE roir.feed SET tick = 0", "UPDATE roir.shard SET home = gen_random_uuid()")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="shard s0: another database answers"):
        both.sql_strict()
    both.index._about = None
    with pytest.raises(NotStrict, match="another database answers"):
        both.strict()
    # An eventual read asks nothing of a shard, so a replica will do.
    assert {row.id for row in both.index.rows(T, T.c.k == "a").rows} == {10}


def test_a_server_reads_only_by_sessions_of_its_own(both: Ground) -> None:
    """A session of dblink that has a shard's name may be in a transaction with an old snapshot."""
    both.write("s0", "UPDATE t SET v = 5 WHERE id = 10")
    user = steps.session(both.made.index)
    sql(user, "SELECT dblink_connect('s0', 's0')")
    with pytest.raises(psycopg2.errors.ObjectInUse, match="a connection of dblink has the name of shard s0"):
        sql(user, STRICT)
    run_sql(both.made.index, "DROP SERVER s0 CASCADE")
    with pytest.raises(psycopg2.errors.UndefinedObject, match="there is no foreign server of that name"):
        both.sql_strict()


def test_a_shard_that_is_away_is_named_and_its_dsn_is_not(both: Ground) -> None:
    both.write("s0", "UPDATE t SET v = 5 WHERE id = 10")
    run_sql(both.made.index, "ALTER SERVER s0 OPTIONS (SET dbname 'nowhere_secret')")
    with pytest.raises(psycopg2.OperationalError, match="shard s0 can't be asked: no connection to it") as error:
        both.sql_strict()
    assert "nowhere_secret" not in str(error.value)
    # Only who is named is asked.
    assert both.sql_strict("k1")
