"""Random QuerySets, with the indexes and on a twin without them: results, errors and effects are the same.

A script is a transaction of some calls (tests/client/zoo_django.py), or of calls on their own; its seed is printed if
anything differs. Broken variants of the client are found.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import Error, connections, transaction
from django.db.models import Model, QuerySet
from django.db.models.expressions import Col, Func
from django.db.models.sql.where import WhereNode

from roir_client.django import indexes, restriction, shape
from roir_client.django.restriction import Indexes
from tests.client import zoo, zoo_django
from tests.client.django_shop import databases
from tests.conftest import run_sql

ROOT = Path(__file__).parents[2]
EFFECTS = ("SELECT z::text FROM zoo z ORDER BY id, part", "SELECT p::text FROM pets p ORDER BY id")
# How many scripts a broken variant may need.
MOST_SCRIPTS = 300
ALIASES = ("default", "twin")


class Undone(Exception):
    """Takes a transaction back."""


class Twins:
    """Two databases with the same rows. The statements of the first one use the indexes."""

    def __init__(self, dsns: list[str], options: dict[str, Any]) -> None:
        self.dsns = dict(zip(ALIASES, dsns, strict=True))
        limits = {"least_partitions": 1, "most_rows": 1000, "refresh_s": 3600}
        databases.point(dsns[0], "default", roir=limits, **options)
        databases.point(dsns[1], "twin", engine=databases.PLAIN, **options)

    def difference(self, seed: int) -> str | None:
        """The first difference after a script, or None."""
        told = [self._played(seed, alias) for alias in ALIASES]
        for step, (with_, without) in enumerate(itertools.zip_longest(*told)):
            if with_ != without:
                level, steps, _ = zoo_django.script(seed)
                return f"seed {seed}, {level}, step {step} of {len(steps)}: {with_}\nwithout: {without}"
        return None

    def _played(self, seed: int, alias: str) -> list[Any]:
        level, steps, commits = zoo_django.script(seed)
        told: list[Any] = []
        run_sql(self.dsns[alias], zoo.REFILL)
        if level is None:
            for kind, step in steps:
                told.append(self._told(alias, kind, step))
        else:
            try:
                with transaction.atomic(using=alias):
                    with connections[alias].cursor() as cursor:
                        cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                    for kind, step in steps:
                        told.append(self._told(alias, kind, step))
                        if connections[alias].needs_rollback or told[-1][0] == "refused":
                            raise Undone
                    if not commits:
                        raise Undone
            except Undone:
                pass
            except Error as error:
                told.append(_refused(error))
        with connections[alias].cursor() as cursor:
            for effect in EFFECTS:
                cursor.execute(effect)
                told.append(cursor.fetchall())
        return told

    def _told(self, alias: str, kind: str, step: Any) -> Any:
        if kind == "other":
            run_sql(self.dsns[alias], step)
            return "other", step
        try:
            return "result", _shown(step(alias))
        except Error as error:
            return _refused(error)
        except Exception as error:
            return type(error).__name__, str(error)

    def close(self) -> None:
        for alias in ALIASES:
            databases.leave(alias)


def _shown(value: Any) -> Any:
    """A result that can be compared: rows in an order, objects by their columns and loaded rows."""
    if isinstance(value, Model):
        columns = [_shown(value.__dict__.get(field.attname)) for field in value._meta.concrete_fields]
        loaded = {name: _shown(one) for name, one in value._state.fields_cache.items()}
        several = {name: _shown(some) for name, some in getattr(value, "_prefetched_objects_cache", {}).items()}
        return type(value).__name__, columns, loaded, several
    if isinstance(value, (QuerySet, list)):
        return sorted(repr(_shown(one)) for one in value)
    if isinstance(value, tuple):
        return tuple(map(_shown, value))
    # psycopg2 gives each value of bytea another place in memory, which repr would tell.
    return repr(bytes(value) if isinstance(value, memoryview) else value)


def _refused(error: Error) -> tuple[str, Any]:
    return "refused", getattr(error.__cause__, "sqlstate", None) or getattr(error.__cause__, "pgcode", None)


@pytest.fixture
def twins(zoo_copy: Callable[[], str]) -> Iterator[Callable[..., Twins]]:
    """Makes twins, with options of the connections."""
    made: list[Twins] = []

    def make(**options: Any) -> Twins:
        made.append(Twins([zoo_copy(), zoo_copy()], options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("seeds", [range(n, n + 200) for n in range(0, 2000, 200)], ids=str)
@pytest.mark.parametrize("bound", [False, True], ids=["by the client", "by the server"])
@pytest.mark.sample(0)
@pytest.mark.usefixtures("deadlocks_meant")
def test_nothing_differs_from_a_twin_without_indexes(twins: Callable[..., Twins], bound: bool, seeds: range) -> None:
    two = twins(server_side_binding=bound)
    found = [difference for seed in seeds if (difference := two.difference(seed))]
    print(f"seeds {seeds}: {dict(indexes().counts)}")
    assert not found, f"{len(found)} scripts differ\n\n" + "\n\n".join(found[:3])
    assert indexes().counts["rewritten"] > len(seeds) / 4
    assert indexes().counts["error"] == 0


# Django takes psycopg 3 if there is one.
BY_PSYCOPG2 = """
import sys
sys.modules["psycopg"] = None
import tests.client.conftest
from django.db.backends.postgresql.psycopg_any import is_psycopg3
from tests.client.test_django_oracle import Twins, indexes
two = Twins(sys.argv[1:3], {})
seeds = range(*map(int, sys.argv[3:]))
found = [difference for seed in seeds if (difference := two.difference(seed))]
print(f"seeds {seeds}: {dict(indexes().counts)}")
assert not found, "\\n\\n".join(found[:3])
assert not is_psycopg3 and indexes().counts["rewritten"] > len(seeds) / 4 and not indexes().counts["error"]
"""


@pytest.mark.parametrize("seeds", [range(n, n + 200) for n in range(0, 2000, 200)], ids=str)
@pytest.mark.sample(0)
@pytest.mark.usefixtures("deadlocks_meant")
def test_nothing_differs_by_psycopg2(zoo_copy: Callable[[], str], seeds: range) -> None:
    arguments = [zoo_copy(), zoo_copy(), str(seeds.start), str(seeds.stop)]
    paths = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
    subprocess.run([sys.executable, "-c", BY_PSYCOPG2, *arguments], check=True, cwd=ROOT, env=paths)


# --- Broken variants.


def drops_the_condition(patch: pytest.MonkeyPatch) -> None:
    """Selects what was found, whatever the query says."""
    restricted = Indexes.restricted

    def broken(self: Any, compiler: Any) -> Any:
        new = restricted(self, compiler)
        if new is not None and not hasattr(new, "inner_query"):
            new.where.children = new.where.children[1:]
        return new

    patch.setattr(Indexes, "restricted", broken)


def keeps_entries_over_transactions(patch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    look_up = restriction._look_up

    def broken(connection: Any, target: Any, asked: Any, most: int) -> Any:
        key = str(target.index), repr([pin.kind for _, pin in target.pins]), repr(asked)
        if key not in kept:
            kept[key] = look_up(connection, target, asked, most)
        return kept[key]

    patch.setattr(restriction, "_look_up", broken)


def _leaves_if(patch: pytest.MonkeyPatch, opens: Callable[[Any], bool]) -> None:
    def broken(node: Any) -> Any:
        if type(node) is not WhereNode:
            yield node
        elif opens(node):
            for child in node.children:
                yield from broken(child)

    patch.setattr(shape, "_leaves", broken)


def takes_or_for_and(patch: pytest.MonkeyPatch) -> None:
    _leaves_if(patch, lambda node: not node.negated and node.connector in ("AND", "OR"))


def ignores_not(patch: pytest.MonkeyPatch) -> None:
    _leaves_if(patch, lambda node: node.connector == "AND" or len(node.children) == 1)


def takes_the_other_side_of_a_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shape, "_has_no_nulls_of_a_join", lambda table: True)


def ignores_a_function(patch: pytest.MonkeyPatch) -> None:
    conditions = shape._conditions

    def broken(leaf: Any) -> Any:
        left = getattr(leaf, "lhs", None)
        if isinstance(left, Func) and type(left.get_source_expressions()[0]) is Col:
            bare = leaf.copy()
            bare.lhs = left.get_source_expressions()[0]
            leaf = bare
        yield from conditions(leaf)

    patch.setattr(shape, "_conditions", broken)


def takes_lookups_of_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shape, "_KINDS", {**shape._KINDS, zoo_django.SameText: shape.EQUAL})


VARIANTS = [
    drops_the_condition,
    keeps_entries_over_transactions,
    takes_or_for_and,
    ignores_not,
    takes_the_other_side_of_a_join,
    ignores_a_function,
    takes_lookups_of_others,
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
@pytest.mark.slow
@pytest.mark.usefixtures("deadlocks_meant")
def test_a_broken_variant_is_found(twins: Callable[..., Twins], variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variant(monkeypatch)
    two = twins()
    found = next((seed for seed in range(MOST_SCRIPTS) if two.difference(seed)), None)
    print(f"{variant.__name__}: seed {found}")
    assert found is not None
