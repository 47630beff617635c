"""Statements on a unique index, and on a twin that has PostgreSQL's own constraint: the same succeed and fail.

Where outcomes differ on purpose is said in docs/architecture.md#uniqueness, and held here.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.engine.steps import session, sql
from tests.engine.twins import LAYOUTS, PARTITIONED, Twins
from tests.engine.unique_keys import CASELESS, CITEXT, KINDS, Kind

EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
SEED = int(os.environ.get("ROIR_SEED") or (random.randrange(1_000_000) if EXAMPLES else 1))
LEVELS = ("READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
TRANSACTIONS = 60


def play(twins: Twins, transactions: int) -> None:
    """Random transactions in direct mode, with folds among them, and in active mode."""
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


@pytest.mark.sample(2, 14)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [*KINDS, CITEXT, CASELESS], ids=lambda kind: kind.name)
def test_the_same_statements_succeed_as_with_a_constraint(dsn: str, kind: Kind, layout: str) -> None:
    if not available(dsn, kind):
        pytest.skip("the server doesn't have what this key is made of")
    play(Twins(dsn, kind, layout, SEED), EXAMPLES or TRANSACTIONS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[5]], ids=lambda kind: kind.name)
def test_the_same_statements_succeed_where_the_primary_key_is_deferrable(dsn: str, kind: Kind) -> None:
    play(Twins(dsn, kind, PARTITIONED, SEED, deferrable=True), EXAMPLES or TRANSACTIONS)
