"""Statements on a unique index, and on a twin that has PostgreSQL's own constraint: the same succeed and fail.

docs/architecture.md#uniqueness names the outcomes that differ on purpose; they are checked here.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.engine.steps import session, sql
from tests.engine.twins import LAYOUTS, PARTITIONED, PLAIN, Twins
from tests.engine.unique_keys import CASELESS, CITEXT, COMPUTED, KINDS, OF_PARENTS, Kind

EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
SEED = int(os.environ.get("ROIR_SEED") or (random.randrange(1_000_000) if EXAMPLES else 1))
LEVELS = ("READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
TRANSACTIONS = 60


def play(twins: Twins, transactions: int) -> None:
    """Plays random transactions in direct mode, with folds among them, and in active mode."""
    try:
        for number in range(transactions):
            if number % 15 == 0:
                twins.mix()
                twins.check()
            twins.transaction(LEVELS)
        twins.publish()
        twins.check()
        for _ in range(transactions // 2):
            twins.transaction(LEVELS)
    finally:
        print(f"{twins.kind.name}, seed {SEED}: {twins.tally.told()}")
        twins.close()


def available(dsn: str, kind: Kind) -> bool:
    if kind is CITEXT:
        return bool(sql(session(dsn), "SELECT 1 FROM pg_available_extensions WHERE name = 'citext'"))
    if kind is CASELESS:
        return bool(sql(session(dsn), "SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'"))
    return True


@pytest.mark.sample(0)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [*KINDS, *COMPUTED, CITEXT, CASELESS], ids=lambda kind: kind.name)
def test_the_same_statements_succeed_as_with_a_constraint(dsn: str, kind: Kind, layout: str) -> None:
    if not available(dsn, kind):
        pytest.skip("the server doesn't have what this key is made of")
    play(Twins(dsn, kind, layout, SEED), EXAMPLES or TRANSACTIONS)


@pytest.mark.sample(0)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[5]], ids=lambda kind: kind.name)
def test_the_same_statements_succeed_where_the_primary_key_is_deferrable(dsn: str, kind: Kind) -> None:
    play(Twins(dsn, kind, PARTITIONED, SEED, deferrable=True), EXAMPLES or TRANSACTIONS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "SET DEFAULT"])
@pytest.mark.parametrize("nulls_not_distinct", [False, True])
def test_the_same_cascades_succeed(dsn: str, action: str, nulls_not_distinct: bool) -> None:
    """Foreign keys write to keys: two rows may come to share a key by that."""
    kind = Kind(
        "of a foreign key",
        "a int, b text",
        "coalesce(a, 0) * 4 + b::int",
        "(({e}) / 4), (({e}) % 4)::text",
        nulls_not_distinct=nulls_not_distinct,
    )
    ddl = (
        "CREATE TABLE p (n int PRIMARY KEY)",
        "INSERT INTO p SELECT generate_series(0, 30)",
        f"ALTER TABLE t ALTER a SET DEFAULT 0, ADD FOREIGN KEY (a) REFERENCES p ON UPDATE CASCADE ON DELETE {action}",
    )
    play(Twins(dsn, kind, PARTITIONED, SEED, ddl, more=OF_PARENTS), EXAMPLES or TRANSACTIONS)


# Triggers that change keys before they are stored, and others that change other columns afterwards, before the capture
# and after it.
TRIGGERS = (
    "CREATE FUNCTION before() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "IF NEW.v % 10 = 7 THEN NEW.k = NEW.k + 1; END IF; IF NEW.v % 10 = 8 THEN RETURN NULL; END IF; RETURN NEW; END $$",
    "CREATE FUNCTION after() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF pg_trigger_depth() < 2 THEN "
    "UPDATE t SET v = v + 10 WHERE id = NEW.id AND part = NEW.part; END IF; "
    "RETURN NULL; END $$",
    "CREATE TRIGGER b BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION before()",
    'CREATE TRIGGER "A" AFTER INSERT OR UPDATE ON t FOR EACH ROW WHEN (NEW.v % 10 = 5) EXECUTE FUNCTION after()',
    "CREATE TRIGGER a AFTER INSERT OR UPDATE ON t FOR EACH ROW WHEN (NEW.v % 10 = 4) EXECUTE FUNCTION after()",
    "CREATE TRIGGER z AFTER INSERT OR UPDATE ON t FOR EACH ROW WHEN (NEW.v % 10 = 3) EXECUTE FUNCTION after()",
)


@pytest.mark.by_hand("sweeps")
def test_the_same_statements_succeed_with_triggers(dsn: str) -> None:
    """Without partitions: a row that moves to another partition fires BEFORE triggers twice."""
    play(Twins(dsn, KINDS[0], PLAIN, SEED, TRIGGERS), EXAMPLES or TRANSACTIONS)
