"""When a generation ends, only its enforcement ends: the keys that it held are free, no writer is refused or stuck.

Cases: abort, failure, clean-up, revert and the removal of a shard, each also while a shard is out of our reach. Its own
writers still reach it and continue to announce.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from psycopg2 import errors

from airflow_roir.engine import abort, clean_up, lifecycle, revert
from airflow_roir.engine.database import Database
from airflow_roir.errors import LockNotAcquired, NotStrict, OperationRunning, SourceChanged
from airflow_roir.shards import registry
from airflow_roir.shards.unique import holders
from airflow_roir.shards.unique.enforce import Enforcing
from servers.shards import Shards
from tests.engine import interposed
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.test_unique import enforced, problem

pytestmark = pytest.mark.sample(1)
TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE, v int)",
    "INSERT INTO t SELECT i, format('{shard}-%s', i), i FROM generate_series(1, 3) i",
)
# The first statement of each attempt to publish.
PUBLISHES = "SELECT (SELECT count(*) FROM roir.scan_range"
LEFT = """
SELECT relname::text FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace AND relname ~ %s UNION ALL
SELECT proname::text FROM pg_proc WHERE pronamespace = 'roir_data'::regnamespace AND proname ~ %s
"""
NOWHERE = "host=127.0.0.1 port=1 dbname=none user=none connect_timeout=1"


def modes(made: Shards) -> dict[int, str]:
    return dict(made.ask("SELECT id, unique_mode FROM roir.generation ORDER BY id"))


@contextmanager
def away(made: Shards, shard: str | None) -> Iterator[None]:
    """A shard that we can't reach; its writers reach the index server as before."""
    if shard is None:
        yield
        return
    made.ask("UPDATE roir.shard SET dsn = %s WHERE name = %s", NOWHERE, shard)
    yield
    made.ask(
        "UPDATE roir.shard SET dsn = %s, away_until = NULL, problem = NULL WHERE name = %s", made.dsns[shard], shard
    )


def rebuilt(made: Shards, shards: list[str] | None = None, window_s: int = 60) -> int:
    """A rebuild, published; its generation."""
    prepared, run = apart.begin(
        made, table=None, keys=None, include=None, shards=shards or made.names, revert_window_s=window_s
    )
    apart.finish_all(made, run)
    return prepared.generation_id


def enforced_and_not_published(made: Shards, ending: type[Exception] = LockNotAcquired) -> int:
    """A rebuild that is enforced already, and whose publish raises; its generation."""
    prepared, run = apart.begin(made, table=None, keys=None, include=None)
    apart.build_all(made, run)
    apart.seal_all(made, run)
    database = made.database

    def fails() -> None:
        assert problem(made, prepared.generation_id) is None
        raise ending("it is tried")

    with interposed.before(database, PUBLISHES, fails), pytest.raises(ending, match="it is tried"):
        lifecycle.finalize(database, "public.ix", "test", take_over=True)
    return prepared.generation_id


def assert_keys_move(made: Shards, generation_id: int, shards: list[str] | None = None) -> None:
    """Keys are refused as long as another shard has them, and free once it has given them up, which is shipped."""
    one, other, *_ = shards or made.names
    mine = made.ask("SELECT k FROM t ORDER BY id LIMIT 1", shard=one)[0][0]
    with pytest.raises((errors.UniqueViolation, errors.SerializationFailure)):
        made.run(f"INSERT INTO t VALUES (100, '{mine}', 0)", only=other)
    made.run(f"DELETE FROM t WHERE k = '{mine}'", only=one)
    settle(made, generation_id)
    made.run(f"INSERT INTO t VALUES (100, '{mine}', 0)", only=other)
    made.run("UPDATE t SET v = v + 1")
    settle(made, generation_id)
    apart.assert_exact(made, generation_id)
    made.run("DELETE FROM t WHERE id = 100", only=other)
    settle(made, generation_id)
    made.run(f"INSERT INTO t VALUES (1, '{mine}', 0)", only=one)
    settle(made, generation_id)


def settle(made: Shards, generation_id: int) -> None:
    """Ship one generation, those of transactions that were refused, too. No other one is shipped."""
    for _ in range(2):
        made.ask(f"UPDATE roir_data.g{generation_id}_intent SET at = at - interval '5 s'")
        apart.ship_all(made, generation_id)


def assert_nothing_is_left(made: Shards, generation_id: int) -> None:
    of = f"^g{generation_id}(_|$)"
    assert made.ask(LEFT, of, of) == []


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("shard", [None, "s1"])
def test_an_abort_ends_that_of_its_own_generation(contrib_shards: Make, shard: str | None) -> None:
    made = contrib_shards(2, *TABLE)
    first = enforced(made)
    second = enforced_and_not_published(made)
    assert modes(made) == {first: "refuse", second: "refuse"}
    with away(made, shard):
        said: list[str] = []
        abort.abort(made.database, "public.ix", "test", report=said.append)
        assert modes(made) == {first: "refuse", second: "off"}
        assert [line for line in said if "next clean-up" in line] == ([] if shard is None else said[-1:])
        # The second generation isn't shipped any more: the first one alone decides.
        made.run("UPDATE t SET v = v + 1")
    assert_keys_move(made, first)
    assert problem(made, first) is None
    clean_up.clean_up(made.database)
    assert_nothing_is_left(made, second)
    assert_keys_move(made, first)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("shard", [None, "s1"])
def test_a_failure_ends_that_of_its_own_generation(contrib_shards: Make, shard: str | None) -> None:
    made = contrib_shards(2, *TABLE)
    first = enforced(made)
    second = enforced_and_not_published(made, SourceChanged)
    assert made.ask("SELECT status FROM roir.operation WHERE generation_id = %s", second) == [("failed",)]
    assert modes(made) == {first: "refuse", second: "off"}
    assert_keys_move(made, first)
    # It can only be aborted, which changes nothing of that.
    with away(made, shard):
        abort.abort(made.database, "public.ix", "test")
        made.run("UPDATE t SET v = v + 1")
    assert modes(made) == {first: "refuse", second: "off"}
    assert_keys_move(made, first)
    clean_up.clean_up(made.database)
    assert_nothing_is_left(made, second)
    third = rebuilt(made)
    assert problem(made, third) is None


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("shard", [None, "s0"])
def test_a_clean_up_ends_that_of_what_it_drops(contrib_shards: Make, shard: str | None) -> None:
    made = contrib_shards(2, *TABLE)
    first = enforced(made)
    second = rebuilt(made, window_s=0)
    assert modes(made) == {first: "refuse", second: "refuse"}
    with away(made, shard):
        assert clean_up.clean_up(made.database).generations_dropped == 1
        assert modes(made) == {first: "off", second: "refuse"}
        made.run("UPDATE t SET v = v + 1")
    assert problem(made, second) is None
    assert_keys_move(made, second)
    clean_up.clean_up(made.database)
    assert_nothing_is_left(made, first)
    assert_keys_move(made, second)


@pytest.mark.by_hand("sweeps")
def test_a_revert_ends_none_and_the_clean_up_after_it_that_of_the_other(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    first = enforced(made)
    second = rebuilt(made)
    with away(made, "s1"):
        revert.revert(made.database, "public.ix", "test")
    assert modes(made) == {first: "refuse", second: "refuse"}
    # Both have the key, and both must have heard that it is free.
    made.run("DELETE FROM t WHERE k = 's0-1'", only="s0")
    settle(made, first)
    with pytest.raises(errors.SerializationFailure):
        made.run("INSERT INTO t VALUES (100, 's0-1', 0)", only="s1")
    settle(made, second)
    made.run("INSERT INTO t VALUES (100, 's0-1', 0)", only="s1")
    settle(made, first)
    settle(made, second)
    made.ask("UPDATE roir.generation SET drop_after = now() WHERE id = %s", second)
    clean_up.clean_up(made.database)
    assert modes(made) == {first: "refuse", second: "off"}
    made.run("DELETE FROM t WHERE id = 100", only="s1")
    settle(made, first)
    assert_keys_move(made, first)
    assert_nothing_is_left(made, second)


@pytest.mark.by_hand("sweeps")
def test_a_clean_up_that_a_revert_was_faster_than_ends_none(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    first = enforced(made)
    second = rebuilt(made, window_s=0)
    made.ask("UPDATE roir.generation SET drop_after = now() WHERE id = %s", first)
    database = made.database
    # After the clean-up's first look.
    with interposed.before(
        database, "SELECT o.id AS operation_id", lambda: revert.revert(made.database, "public.ix", "test")
    ):
        assert clean_up.clean_up(database).generations_dropped == 0
    assert made.ask("SELECT id FROM roir.generation WHERE status = 'active'") == [(first,)]
    assert modes(made) == {first: "refuse", second: "refuse"}
    assert problem(made, first) is None


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("force", [False, True])
def test_a_shard_that_is_removed_has_writers_as_before(contrib_shards: Make, force: bool) -> None:
    """The shard was out of reach when the generation over it was dropped."""
    made = contrib_shards(3, *TABLE)
    first = enforced(made)
    second = rebuilt(made, ["s0", "s1"], window_s=0)
    with away(made, "s2"):
        clean_up.clean_up(made.database)
        assert modes(made) == {first: "off", second: "refuse"}
        made.run("UPDATE t SET v = v + 1")
        with pytest.raises(OperationRunning, match='its capture in shard "s2" is left'):
            registry.remove(made.database, "s2")
    registry.remove(made.database, "s2", force)
    clean_up.clean_up(made.database)
    assert_nothing_is_left(made, first)
    # The shard is in no index any more: it may have any keys.
    made.run("UPDATE t SET v = v + 1")
    made.run("INSERT INTO t VALUES (100, 's0-1', 0); DELETE FROM t WHERE id = 100", only="s2")
    assert problem(made, second) is None
    assert_keys_move(made, second, ["s0", "s1"])


@pytest.mark.by_hand("sweeps")
def test_a_shard_whose_keys_are_enforced_is_not_removed(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    first = enforced(made)
    for force in (False, True):
        with pytest.raises(OperationRunning):
            registry.remove(made.database, "s1", force)
    assert problem(made, first) is None
    assert_keys_move(made, first)


def stepped(made: Shards, database: Database) -> Enforcing:
    """A rebuild's keys, looked over as far as to the switch."""
    second = enforced_and_not_published(made)
    with made.database.transaction() as connection:
        holders.end(connection, second, None, "test")
    enforcing = Enforcing(database, second)
    enforcing.begin()
    enforcing.fill()
    return enforcing


@pytest.mark.by_hand("sweeps")
def test_an_abort_in_the_middle_of_the_switch_is_not_undone(contrib_shards: Make) -> None:
    """The abort comes after the switch has checked that the keys are still being counted."""
    made = contrib_shards(2, *TABLE)
    first = enforced(made)
    database = made.database
    enforcing = stepped(made, database)

    def aborts() -> None:
        with made.database.transaction() as connection:
            holders.end(connection, enforcing.generation_id, None, "test")

    with (
        interposed.before(database, "WITH", aborts),
        suppress(NotStrict, errors.InternalError),
    ):
        enforcing.switch()
    assert modes(made) == {first: "refuse", enforcing.generation_id: "off"}
    made.run("INSERT INTO t VALUES (100, 'x', 0); DELETE FROM t WHERE id = 100", only="s0")
    settle(made, first)
    made.run("INSERT INTO t VALUES (100, 'x', 0)", only="s1")


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("status", ["failed", "aborting"])
@pytest.mark.parametrize("step", ["begin", "switch"])
def test_what_is_not_shipped_is_not_enforced(contrib_shards: Make, status: str, step: str) -> None:
    """A hung run continues after its operation has failed, or while the operation is being aborted and waits for a
    lock."""
    made = contrib_shards(2, *TABLE)
    first = enforced(made)
    enforcing = stepped(made, made.database)
    made.ask(
        "UPDATE roir.operation SET status = %s, error = 'x' WHERE generation_id = %s", status, enforcing.generation_id
    )
    with pytest.raises(NotStrict, match="operation"):
        getattr(enforcing, step)()
    assert modes(made)[first] == "refuse"
    assert modes(made)[enforcing.generation_id] != "refuse"
