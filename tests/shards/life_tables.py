"""The tables of a random life: writers, whose transactions stay open over steps, and DDL in the shards."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import psycopg2
import psycopg2.errors

from servers.shards import Shards, run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.shards import apart

IDS = 60
MOODS = "CREATE TYPE public.mood AS ENUM ('m0', 'm1')"
# The bounds of each leaf, attached from the beginning or later; the default partition is always there.
RANGES = {
    "p0": "FROM (0) TO (20)",
    "p1": "FROM (20) TO (40)",
    "p2": "FROM (40) TO (50)",
    "p3": "FROM (50) TO (MAXVALUE)",
}
LISTS = {"p0": "IN ('a')", "p1": "IN ('b', 'c')", "p2": "IN ('d''e')"}
COLUMNS = "id int, r text NOT NULL DEFAULT 'a', k {k}, v text, n int"


@dataclass(frozen=True)
class Kind:
    """A table. parts: its leaves' bounds; inside: SQL that a row is within, by leaf."""

    key: str
    by: str = ""
    parts: dict[str, str] = field(default_factory=dict)

    def made(self, k: str) -> list[str]:
        made = [
            "CREATE SCHEMA app",
            f"CREATE TABLE app.t ({COLUMNS.format(k=k)}, g int GENERATED ALWAYS AS (n % 5) STORED, "
            f"PRIMARY KEY ({self.key})) {self.by}",
        ]
        for leaf in list(self.parts)[:2]:
            made.append(f"CREATE TABLE app.{leaf} PARTITION OF app.t FOR VALUES {self.parts[leaf]}")
        return [*made, "CREATE TABLE app.rest PARTITION OF app.t DEFAULT"] if self.parts else made


KINDS = {
    "plain": Kind("id"),
    "ranges": Kind("id", "PARTITION BY RANGE (id)", RANGES),
    "lists": Kind("r, id", "PARTITION BY LIST (r)", LISTS),
}
WRITES = (
    "INSERT INTO {t} (id, r, k, v, n) VALUES ({i}, '{r}', {k}, 'v{j}', {j}) ON CONFLICT DO NOTHING",
    "INSERT INTO {t} (id, r, k, v, n) SELECT x, '{r}', {k}, 'many', x FROM generate_series({i}, {i} + 9) x "
    "ON CONFLICT ({key}) DO UPDATE SET k = excluded.k, v = {t}.v || '+'",
    "UPDATE {t} SET k = {k} WHERE id = {i}",
    "UPDATE {t} SET k = {k}, n = n + 1 WHERE id BETWEEN {i} AND {i} + 5",
    "UPDATE {t} SET v = left(repeat(md5('{j}'), 300), {j} * 150) WHERE id = {i}",
    # Primary keys move, within a leaf and between leaves.
    "UPDATE {t} SET id = {j} WHERE id = {i}",
    "UPDATE {t} SET id = -id WHERE id BETWEEN {i} AND {i} + 3",
    "UPDATE {t} SET r = '{r}' WHERE id = {i}",
    "DELETE FROM {t} WHERE id BETWEEN {i} AND {i} + 2",
    "WITH gone AS (DELETE FROM {t} WHERE id = {i} RETURNING *) "
    "INSERT INTO {t} (id, r, k, v, n) SELECT {j}, r, {k}, v, n FROM gone",
    "MERGE INTO {t} x USING (VALUES ({i}), ({j})) s (i) ON x.id = s.i WHEN MATCHED AND n > 5 THEN DELETE "
    "WHEN MATCHED THEN UPDATE SET k = {k}, n = n + 3 WHEN NOT MATCHED THEN INSERT (id, r, k) VALUES (s.i, '{r}', {k})",
    "SAVEPOINT s; DELETE FROM {t} WHERE id < {i}; INSERT INTO {t} (id, k) VALUES ({i}, {k}); ROLLBACK TO s; "
    "UPDATE {t} SET n = 0 WHERE id = {j}",
    "DO $$ BEGIN UPDATE {t} SET k = NULL WHERE id = {i}; RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN "
    "UPDATE {t} SET n = n + 1 WHERE id = {j}; END $$",
)
# Errors that a statement may meet and that have nothing to do with the index.
EXPECTED = (
    psycopg2.errors.UniqueViolation,
    psycopg2.errors.CheckViolation,
    psycopg2.errors.CardinalityViolation,
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.SerializationFailure,
    psycopg2.errors.DeadlockDetected,
    psycopg2.errors.FeatureNotSupported,
    psycopg2.errors.ObjectNotInPrerequisiteState,
    psycopg2.errors.ObjectInUse,
    psycopg2.errors.ProgramLimitExceeded,
)


@dataclass
class Place:
    """A shard's table: its name now, and the leaves that it has. added: columns of ours that no index has."""

    session: psycopg2.extensions.connection
    schema: str = "app"
    table: str = "t"
    leaves: set[str] = field(default_factory=set)
    out: set[str] = field(default_factory=set)
    added: list[str] = field(default_factory=list)
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"


class Tables:
    """The table of all shards. told: what was done; reached: how often."""

    def __init__(self, made: Shards, seed: int, kind: str, k: str, pg: int) -> None:
        self.made, self.chance, self.kind, self.k, self.pg = made, random.Random(seed), KINDS[kind], k, pg
        self.told = [f"seed {seed}, {kind}, k {k}"]
        self.reached: Counter[str] = Counter()
        made.ask(MOODS)
        made.run(MOODS, *self.kind.made(k))
        made.run(
            f"INSERT INTO app.t (id, r, k, v, n) SELECT i, 'a', ('m' || i % 2)::{k}, 'old', i "
            f"FROM generate_series(0, {IDS}) i"
        )
        apart.add_all(made)
        self.places = {name: self._place(name) for name in made.names}
        self.moods = ["m0", "m1"]

    def _place(self, name: str) -> Place:
        session = steps.session(self.made.dsns[name])
        sql(session, "SET lock_timeout = '300ms'")
        session.commit()
        return Place(session, leaves=set(list(self.kind.parts)[:2]))

    def say(self, what: str, more: str = "") -> None:
        self.reached[what] += 1
        self.told.append(f"{what} {more}".strip())

    def any_place(self) -> tuple[str, Place]:
        name = self.chance.choice(self.made.names)
        return name, self.places[name]

    def do(self, name: str, statement: str) -> bool:
        """In the shard's session, whose transaction may be open; False if it met something and was rolled back."""
        place = self.places[name]
        try:
            sql(place.session, statement)
        except EXPECTED as error:
            place.session.rollback()
            self.say("met", f"{name} {type(error).__name__}")
            return False
        return True

    # -- writers

    def write(self) -> None:
        name, place = self.any_place()
        chance = self.chance
        statement = chance.choice(WRITES)
        if chance.random() < 0.06:
            self.end_transactions()
            statement = f"TRUNCATE {chance.choice([place.name, *(f'{place.schema}.{one}' for one in place.leaves)])}"
        statement = (
            statement.replace("{t}", place.name)
            .replace("{key}", self.kind.key)
            .replace("{i}", str(chance.randrange(IDS)))
            .replace("{j}", str(chance.randrange(IDS)))
            .replace("{r}", chance.choice(["a", "b", "c", "d''e", "x"]))
            .replace("{k}", chance.choice([*(f"'{one}'" for one in self.moods), "NULL"]))
        )
        self.say("write", f"{name}: {statement}")
        if self.do(name, statement) and (chance.random() < 0.7 or "TRUNCATE" in statement):
            place.session.commit() if chance.random() < 0.85 else place.session.rollback()

    def end_transactions(self) -> None:
        for place in self.places.values():
            place.session.commit() if self.chance.random() < 0.7 else place.session.rollback()

    # -- DDL in the shards

    def alter(self) -> None:
        self.end_transactions()
        name, place = self.any_place()
        self.chance.choice(
            [self._column, self._rename, self._rename, self._rewrite, self._mood, self._expression]
            + [self._part] * (6 if self.kind.parts else 0)
        )(name, place)
        place.session.commit()

    def _column(self, name: str, place: Place) -> None:
        if place.added and self.chance.random() < 0.6:
            column = place.added.pop()
            if self.chance.random() < 0.5:
                self.say("drop column", name)
                self.do(name, f"ALTER TABLE {place.name} DROP COLUMN {column}")
                return
            place.number += 1
            place.added.append(f"more{place.number}")
            self.say("rename column", name)
            assert self.do(name, f"ALTER TABLE {place.name} RENAME {column} TO {place.added[-1]}")
            return
        place.number += 1
        place.added.append(f"more{place.number}")
        self.say("add column", name)
        assert self.do(name, f"ALTER TABLE {place.name} ADD {place.added[-1]} int DEFAULT 7")

    def _rename(self, name: str, place: Place) -> None:
        self.say("rename", name)
        if self.chance.random() < 0.5:
            other = "u" if place.table == "t" else "t"
            assert self.do(name, f"ALTER TABLE {place.name} RENAME TO {other}")
            place.table = other
        else:
            other = "elsewhere" if place.schema == "app" else "app"
            assert self.do(name, f"ALTER SCHEMA {place.schema} RENAME TO {other}")
            place.schema = other

    def _rewrite(self, name: str, place: Place) -> None:
        place.session.commit()
        self.say("rewrite", name)
        statement = self.chance.choice(["VACUUM FULL {t}", "REINDEX TABLE {t}", "VACUUM {t}", "ANALYZE {t}"])
        run_sql(self.made.dsns[name], statement.replace("{t}", place.name))

    def _mood(self, name: str, place: Place) -> None:
        if len(self.moods) < 5:
            self.say("a new mood")
            mood = f"m{len(self.moods)}"
            for dsn in (self.made.index, *self.made.dsns.values()):
                run_sql(dsn, f"ALTER TYPE public.mood ADD VALUE '{mood}'")
            self.moods.append(mood)

    def _expression(self, name: str, place: Place) -> None:
        if self.pg >= 17:
            self.say("another expression", name)
            self.do(name, f"ALTER TABLE {place.name} ALTER g SET EXPRESSION AS (n % {self.chance.randrange(2, 9)})")

    def _part(self, name: str, place: Place) -> None:
        there, out = sorted(place.leaves), sorted(place.out)
        absent = sorted(set(self.kind.parts) - place.leaves - place.out)
        chance = self.chance
        what = chance.choice([*["detach"] * bool(there), *["attach", "remove"] * bool(out), *["new"] * bool(absent)])
        if what == "new":
            leaf = chance.choice(absent)
            self._make_room(name, place, leaf)
            made = f"CREATE TABLE {place.schema}.{leaf} PARTITION OF {place.name} FOR VALUES {self.kind.parts[leaf]}"
            if self.do(name, made):
                self.say("new partition", f"{name} {leaf}")
                place.leaves.add(leaf)
        elif what == "detach":
            leaf = chance.choice(there)
            if self.do(name, f"ALTER TABLE {place.name} DETACH PARTITION {place.schema}.{leaf}"):
                self.say("detach", f"{name} {leaf}")
                place.leaves.discard(leaf)
                place.out.add(leaf)
                if chance.random() < 0.5:
                    self.do(name, f"UPDATE {place.schema}.{leaf} SET v = 'outside', k = NULL WHERE id % 2 = 0")
        elif what == "attach":
            leaf = chance.choice(out)
            self._make_room(name, place, leaf)
            # Columns were added and dropped meanwhile.
            if self._like(name, place, leaf) and self.do(
                name,
                f"ALTER TABLE {place.name} ATTACH PARTITION {place.schema}.{leaf} FOR VALUES {self.kind.parts[leaf]}",
            ):
                self.say("attach", f"{name} {leaf}")
                place.out.discard(leaf)
                place.leaves.add(leaf)
        else:
            leaf = chance.choice(out)
            self.say("drop partition", f"{name} {leaf}")
            place.out.discard(leaf)
            assert self.do(name, f"DROP TABLE {place.schema}.{leaf}")

    def _like(self, name: str, place: Place, leaf: str) -> bool:
        """Whether a table could be attached: it has the columns of now, and their expressions."""
        found = sql(
            place.session,
            "SELECT count(DISTINCT c) FROM ("
            "SELECT array_agg(concat(a.attname, pg_get_expr(d.adbin, d.adrelid)) ORDER BY a.attname) AS c "
            "FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum "
            "AND a.attgenerated <> '' WHERE a.attrelid IN (%s::regclass, %s::regclass) AND a.attnum > 0 "
            "AND NOT a.attisdropped GROUP BY a.attrelid) x",
            place.name,
            f"{place.schema}.{leaf}",
        )
        return bool(found == [(1,)])

    def _make_room(self, name: str, place: Place, leaf: str) -> None:
        """Rows of the default partition that would be within the new one's bounds go."""
        bound = self.kind.parts[leaf]
        within = f"r {bound}"
        if bound.startswith("FROM"):
            low, high = bound.removeprefix("FROM (").removesuffix(")").split(") TO (")
            within = f"id >= {low}" + ("" if high == "MAXVALUE" else f" AND id < {high}")
        self.do(name, f"DELETE FROM {place.schema}.rest WHERE {within}")
