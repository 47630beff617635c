"""Random lives of an index over shards: its operations, shipping, writes and DDL in the shards, in any order.

Every step is made by one thread; sessions of writers stay open over steps. At rest each generation that is shipped to
is the union of the projections.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg2
import psycopg2.errors

from airflow_roir.definition import VerifyOptions
from airflow_roir.engine import abort, build, clean_up, drop, finalize, operations, revert, seal
from airflow_roir.engine.run import Run, start_run
from airflow_roir.engine.shards.lane_shipper import InShard, LaneShipper
from airflow_roir.engine.shards.lanes import to_ship
from airflow_roir.engine.shards.shipping import Shipper
from airflow_roir.engine.verify import compare
from airflow_roir.errors import Fenced, LockNotAcquired
from servers.shards import Shards, run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.shards import apart

IDS = 60
MOODS = "CREATE TYPE public.mood AS ENUM ('m0', 'm1')"
# Of each leaf what it is attached by, from the beginning on or later; the default partition is always there.
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
# What a statement may meet that has nothing to do with the index.
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
    """What a shard's table is called now, and which leaves it has. added: columns of ours that no index has."""

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


class Life:
    """One index, from its first build to its last drop. told: what was done; reached: how often."""

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
        self.run_: Run | None = None
        self.phase = "none"
        self.shippers: dict[int, LaneShipper] = {}

    def _place(self, name: str) -> Place:
        session = steps.session(self.made.dsns[name])
        sql(session, "SET lock_timeout = '300ms'")
        session.commit()
        return Place(session, leaves=set(list(self.kind.parts)[:2]))

    # -- a life

    def live(self, count: int) -> None:
        try:
            if self.chance.random() < 0.7:
                self.publish()
            for _ in range(count):
                self.step()
            self.rest()
            self.end()
        except BaseException as error:
            error.add_note("\n".join([self.told[0], *self.told[-60:]]))
            raise
        finally:
            for one in self.shippers.values():
                one.close()
            for place in self.places.values():
                place.session.close()

    def publish(self) -> None:
        """A whole build, with writes and DDL between its steps."""
        self._begin()
        for step in (self._build, self._seal, self._finish):
            before = self.phase
            while self.phase == before:
                self.write()
                self.alter()
                step()

    def step(self) -> None:
        draw = self.chance.random()
        if draw < 0.4:
            self.write()
        elif draw < 0.55:
            self.alter()
        elif draw < 0.85:
            self.ship()
        elif draw < 0.96:
            self.operate()
        else:
            self.rest()

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

    # -- shipping

    def ship(self) -> None:
        with self.made.database.transaction() as connection:
            lanes = [one.id for one in to_ship(connection)]
        if not lanes:
            return
        lane = self.chance.choice(lanes)
        shipper = self.shippers.get(lane)
        if shipper is not None and self.chance.random() < 0.15:
            self.say("a shipper dies", str(lane))
            self.shippers.pop(lane).close()
            return
        if shipper is None:
            self.say("claim", str(lane))
            most = self.chance.choice([2, 5, 20_000])
            shipper = self.shippers[lane] = LaneShipper(self.made.database, lane, f"test {len(self.told)}", most=most)
            if not shipper.claim(take_over=True):
                self.shippers.pop(lane).close()
                return
        try:
            if self.chance.random() < 0.3:
                self.say("ship a pass", str(lane))
                shipper.ship_pass()
            else:
                self.say("visit", str(lane))
                shipper.apply(shipper.visit())
        except Fenced:
            self.say("fenced", str(lane))
            self.shippers.pop(lane).close()
        except InShard as error:
            # A writer's DDL that is not committed holds it up.
            self.say("in shard", str(error))
            self.shippers.pop(lane).close()
            if not error.passes:
                raise

    def rest(self) -> None:
        """All is shipped: each generation is right, and nothing is in doubt."""
        self.say("rest")
        self.end_transactions()
        for one in self.shippers.values():
            one.close()
        self.shippers.clear()
        with self.made.database.transaction() as connection:
            lanes = [one.id for one in to_ship(connection)]
        for lane in lanes:
            shipper = LaneShipper(self.made.database, lane, "rest")
            assert shipper.claim(take_over=True)
            shipper.ship_pass()
            shipper.release()
        generations = self.made.ask(
            "SELECT DISTINCT generation_id FROM roir.lane WHERE id = ANY (%s) ORDER BY 1", lanes
        )
        for (generation,) in generations:
            apart.assert_exact(self.made, generation)
        assert self.made.ask("SELECT doubt FROM roir.lane WHERE doubt IS NOT NULL AND removed_at IS NULL") == []

    # -- operations of the index

    def operate(self) -> None:
        steps: dict[str, list[Callable[[], None]]] = {
            "none": [self._begin, self._revert, self._verify, self._clean_up, self._drop],
            "build": [self._build] * 9 + [self._pause, self._abort, self._clean_up],
            "seal": [self._seal] * 9 + [self._pause, self._abort],
            "finish": [self._finish] * 12 + [self._abort],
        }
        self.chance.choice(steps[self.phase])()

    def tidy(self) -> None:
        """What is found by its name has one name in all shards."""
        self.end_transactions()
        for name, place in self.places.items():
            if place.schema != "app":
                run_sql(self.made.dsns[name], f"ALTER SCHEMA {place.schema} RENAME TO app")
                place.schema = "app"
            if place.table != "t":
                run_sql(self.made.dsns[name], f"ALTER TABLE {place.name} RENAME TO t")
                place.table = "t"

    def is_there(self) -> bool:
        return bool(self.made.ask("SELECT count(*) FROM roir.index WHERE dropped_at IS NULL")[0][0])

    def _begin(self) -> None:
        self.tidy()
        count = self.chance.randint(1, len(self.made.names))
        shards = ",".join(sorted(self.chance.sample(self.made.names, count)))
        options = {"ranges": 4, "batch_rows": 10, "parallelism": 1, "verify": "none"}
        if self.is_there():
            self.say("rebuild", shards)
            named = self.chance.choice([shards, None])
            prepared, run = apart.begin(self.made, None, None, None, shards=named, **options)
        else:
            self.say("build", shards)
            prepared, run = apart.begin(self.made, "k", "v,g", "app.t", shards=shards, **options)
        del prepared
        self.run_, self.phase = run, "build"

    @property
    def run(self) -> Run:
        assert self.run_ is not None
        return self.run_

    def _build(self) -> None:
        with apart.worker(self.made, self.run) as worker:
            for _ in range(self.chance.choice([2, 50, 50])):
                claim = worker.claim()
                if not isinstance(claim, build.Claim):
                    if claim.reason == "done":
                        self.say("built")
                        self.end_transactions()
                        build.finish(self.made.database, self.run)
                        self.phase = "seal"
                    return
                self.say("batch")
                while claim is not None:
                    outcome = worker.batch(claim)
                    assert isinstance(outcome, build.Batch)
                    claim = outcome.claim
                    if claim is not None and self.chance.random() < 0.5:
                        self.write()

    def _seal(self) -> None:
        self.say("seal")
        for _ in seal.work(self.made.database, self.run, 0):
            if self.chance.random() < 0.3:
                self.write()
        self.end_transactions()
        seal.finish(self.made.database, self.run)
        self.phase = "finish"

    def _pause(self) -> None:
        self.say("pause and resume")
        operations.pause(self.made.database, "public.ix", "test")
        for _ in range(self.chance.randrange(4)):
            self.write()
        operations.resume(self.made.database, "public.ix", "test")
        self.run_ = start_run(self.made.database, "public.ix", "test", take_over=True)

    def _finish(self) -> None:
        self.say("finish")
        self.end_transactions()
        self.release()
        finalize.finalize_run(self.made.database, self.run)
        self.phase = "none"

    def release(self) -> None:
        for one in self.shippers.values():
            one.release()
        self.shippers.clear()

    def _abort(self) -> None:
        self.say("abort")
        self.end_transactions()
        abort.abort(self.made.database, "public.ix", "test")
        self.phase = "none"

    def _revert(self) -> None:
        found = self.made.ask("SELECT count(*) FILTER (WHERE status = 'retired') FROM roir.generation")
        if found[0][0] and self.is_there():
            self.say("revert")
            self.end_transactions()
            with suppress(LockNotAcquired):
                revert.revert(self.made.database, "public.ix", "test")

    def _verify(self) -> None:
        """Entries are damaged, found and repaired, while it is shipped."""
        found = self.made.ask("SELECT id FROM roir.generation WHERE status = 'active'")
        if not found:
            return
        self.say("verify")
        self.end_transactions()
        self.release()
        base, last = f"roir_data.g{found[0][0]}", f"c{5 + (self.kind.key != 'id')}"
        self.made.ask(f"DELETE FROM {base} WHERE c2 = '{self.chance.choice(self.made.names)}' AND random() < 0.1")
        self.made.ask(f"UPDATE {base} SET {last} = 99 WHERE random() < 0.1")
        shipper = Shipper(self.made.database, every_s=0.05)
        with shipper.running():
            compare.verify(self.made.database, "public.ix", VerifyOptions(repair=True), "test")
        shipper.end()

    def _clean_up(self) -> None:
        self.say("clean up")
        self.end_transactions()
        clean_up.clean_up(self.made.database)

    def _drop(self) -> None:
        if self.is_there() and self.chance.random() < 0.3:
            self.say("drop")
            self.end_transactions()
            self.release()
            drop.drop_index(self.made.database, "public.ix", "test")

    def end(self) -> None:
        """Nothing is left of it."""
        if self.phase != "none":
            self._abort()
        self.release()
        if self.is_there():
            drop.drop_index(self.made.database, "public.ix", "test")
        assert clean_up.clean_up(self.made.database).waiting == []
        for name in self.made.names:
            found = self.made.ask(
                "SELECT (SELECT count(*) FROM roir_shard.outbox), "
                "(SELECT count(*) FROM pg_trigger WHERE tgname ~ '^roir'), "
                "(SELECT count(*) FROM pg_class WHERE relnamespace = 'roir_shard'::regnamespace AND relname ~ '^o_'), "
                "(SELECT count(*) FROM pg_proc WHERE pronamespace = 'roir_shard'::regnamespace AND proname ~ '^o_')",
                shard=name,
            )
            assert found == [(0, 0, 0, 0)], name
