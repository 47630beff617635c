"""Writers of a child beside writers of its parent, in all interleavings, at each isolation level, beside a twin.

In READ COMMITTED each statement ends as on the twin. With an older snapshot a statement may get 40001 instead: a row
that moves to another partition is deleted and inserted. No row of the child ever lacks its parent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from airflow_roir.engine.database import Database
from tests.conftest import COPIED, database_dsn, run_sql
from tests.engine import referring, steps
from tests.engine.isolation import (
    DEADLOCK,
    LEVELS,
    READ_COMMITTED,
    SERIALIZATION_FAILURE,
    Play,
    Schedule,
    Session,
    Transaction,
    Watcher,
    interleavings,
)
from tests.engine.referring import OURS, TWIN
from tests.engine.test_reference_twin import fresh

OF_CHILD = {
    "insert a child": "INSERT INTO {p} (id, order_id) VALUES (10, 5)",
    "insert two children": "INSERT INTO {p} (id, order_id) VALUES (10, 6), (11, 5)",
    "point a child": "UPDATE {p} SET order_id = 5 WHERE id = 1",
    "insert a child of a new parent": "INSERT INTO {p} (id, order_id) VALUES (10, 20)",
    "insert a parent and its child": "INSERT INTO {o} VALUES (20, '2024-02-02', 0); "
    "INSERT INTO {p} (id, order_id) VALUES (10, 20)",
    "delete a child": "DELETE FROM {p} WHERE id = 1",
    "touch a child": "UPDATE {p} SET v = 0 WHERE id = 1",
}
OF_PARENT = {
    "delete": "DELETE FROM {o} WHERE id = 5",
    "delete one with a child": "DELETE FROM {o} WHERE id = 1",
    "move": "UPDATE {o} SET created = '2023-02-02' WHERE id = 5",
    "move one with a child": "UPDATE {o} SET created = '2025-02-02' WHERE id = 1",
    "move twice": "UPDATE {o} SET created = '2023-02-02' WHERE id = 5; "
    "UPDATE {o} SET created = '2025-02-02' WHERE id = 5",
    "change the key": "UPDATE {o} SET id = 30 WHERE id = 5",
    "change the key of one with a child": "UPDATE {o} SET id = 30 WHERE id = 1",
    "insert": "INSERT INTO {o} VALUES (20, '2024-02-02', 0)",
    "touch": "UPDATE {o} SET v = 0 WHERE id = 5",
    "delete and put back": "DELETE FROM {o} WHERE id = 5; INSERT INTO {o} VALUES (5, '2023-02-02', 0)",
}
BACK = "delete and put back"
MENU = {**OF_CHILD, **OF_PARENT}
# on delete, on update.
SHAPES = {
    "no action": ("no-action", "no-action"),
    "cascade": ("cascade", "cascade"),
    "set null": ("set-null", "no-action"),
}
PAIRS = [(a, b) for a, b in itertools.combinations_with_replacement(MENU, 2) if a in OF_CHILD or b in OF_CHILD]


class Two:
    """A pair of tables with the sessions that play on each."""

    def __init__(self, dsn: str, stack: ExitStack) -> None:
        self.dsn = dsn
        self.watcher = Watcher(dsn)
        self.sessions = [stack.enter_context(closing(Session(dsn))) for _ in range(2)]
        stack.callback(self.watcher.connection.close)

    def play(self, schedule: Schedule, names: dict[str, str]) -> Play:
        """Plays a schedule on one of both."""
        play = Play(schedule, lambda name, _who, _turn: MENU[name].format(**names), self.sessions, self.watcher)
        play.go_on()
        return play


@pytest.fixture(scope="module")
def shaped(server: str) -> Iterator[dict[str, Two]]:
    """A database of each shape."""
    with ExitStack() as stack:
        made: dict[str, Two] = {}
        for number, (shape, (on_delete, on_update)) in enumerate(SHAPES.items()):
            name = f"reference_races_{number}"
            run_sql(server, f"CREATE DATABASE {name} TEMPLATE roir_template {COPIED}")
            stack.callback(run_sql, server, f"DROP DATABASE {name} WITH (FORCE)")
            dsn = database_dsn(server, name)
            referring.make_pair(Database(dsn, "roir tests"), dsn, on_delete=on_delete, on_update=on_update)
            made[shape] = Two(dsn, stack)
        yield made


def unexpected(two: Two, schedule: Schedule) -> str | None:
    """The difference that isn't allowed, if there is one."""
    fresh(two.dsn)
    play = two.play(schedule, OURS)
    if wrong := any(referring.wrong(two.dsn)):
        return f"{schedule}: rows without parents: {wrong}"
    if play.impossible:
        return None
    twin = two.play(schedule, TWIN)
    committed = all(one.isolation == READ_COMMITTED for one in schedule.transactions)
    for turn, mine in play.outcomes.items():
        theirs = twin.outcomes.get(turn)
        if twin.impossible or theirs is None or mine.error == theirs.error:
            continue
        if mine.error in (SERIALIZATION_FAILURE, DEADLOCK) and not committed:
            return None
        refused = [one.error for one in (*play.outcomes.values(), *twin.outcomes.values())]
        if SERIALIZATION_FAILURE in refused and not committed:
            return None
        # The twin's check doesn't look for another row once its wait is over.
        if BACK in schedule.transactions[1 - turn[0]].statements and not mine.error:
            return None
        return f"{schedule}: turn {turn}: {theirs} there, {mine} here"
    return None


@pytest.mark.sample(6, 60)
@pytest.mark.usefixtures("deadlocks_meant")
@pytest.mark.parametrize("pair", PAIRS, ids=", ".join)
@pytest.mark.parametrize("levels", list(itertools.product(LEVELS, repeat=2)), ids=", ".join)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pair_of_statements_ends_as_on_the_twin(
    shaped: dict[str, Two], shape: str, levels: tuple[str, str], pair: tuple[str, str]
) -> None:
    """Found: a change of a key was refused for a child that another transaction was deleting."""
    two = tuple(Transaction(level, (name,)) for level, name in zip(levels, pair, strict=True))
    found = (unexpected(shaped[shape], Schedule(two, turns)) for turns in interleavings(two))
    assert [said for said in found if said] == []


# Broken variants of the functions: a text, what stands for it, and a schedule that finds it.
VARIANTS = {
    "no lock of the parent": (
        "find",
        "    IF held THEN\n      RETURN;\n    END IF;\n    EXIT WHEN how = 'skip';",
        "    RETURN;",
        ("insert a child", "move"),
    ),
    "no second look": ("find", "IF one_snapshot THEN", "IF true THEN", ("insert a child", "move")),
    "no check": ("check", "  IF here IS NULL THEN", "  IF true THEN", ("insert a child of a new parent", "touch")),
    "no wait for a deleted child": (
        "children",
        " FOR KEY SHARE",
        "",
        ("delete a child", "change the key of one with a child"),
    ),
    "no watch of the parent": (
        "change",
        "IF roir_data.r1_children(",
        "IF false AND roir_data.r1_children(",
        ("touch a child", "change the key of one with a child"),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.usefixtures("deadlocks_meant")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_variant_is_found(shaped: dict[str, Two], variant: str) -> None:
    function, old, new, pair = VARIANTS[variant]
    two = tuple(Transaction(READ_COMMITTED, (name,)) for name in pair)
    on = shaped["no action"]
    query = f"SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = 'r1_{function}'"
    with closing(steps.session(on.dsn)) as session:
        text = steps.sql(session, query)[0][0]
    assert old in text
    run_sql(on.dsn, text.replace(old, new))
    try:
        assert any(unexpected(on, Schedule(two, turns)) for turns in interleavings(two))
    finally:
        run_sql(on.dsn, text)
