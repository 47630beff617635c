"""A unique index over shards beside writers in threads, of all isolation levels, and shippers that are killed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, closing, suppress
from typing import Any

import psycopg2
import pytest

from airflow_roir.errors import DuplicatesFound, RoirError
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from airflow_roir.shards.ship.shipping import Shipper
from airflow_roir.shards.unique import enforce, holders
from servers.shards import Shards
from tests.shards import apart
from tests.shards.announced import index_dsn
from tests.shards.conftest import Make

KEYS = tuple("abcdefghijklmnop")
ROWS = 8
# Each key that a transaction removes is logged with the transaction's id.
TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE DEFERRABLE INITIALLY IMMEDIATE, v int)",
    "CREATE TABLE log (k text, xid xid8 DEFAULT pg_current_xact_id())",
    "CREATE FUNCTION logs() RETURNS trigger LANGUAGE plpgsql AS "
    "'BEGIN INSERT INTO public.log (k) VALUES (OLD.k); RETURN NULL; END'",
    "CREATE TRIGGER logs AFTER DELETE OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION logs()",
)
# Refused, to be tried again, given up waiting, or killed: all of them end the transaction.
ALLOWED = {"23505", "40001", "40P01", "55P03", "57P01", "08006", "08003", "57014"}
STATEMENTS = (
    "INSERT INTO public.t SELECT i, %(k)s, 0 FROM generate_series(%(a)s, %(a)s) i "
    "WHERE NOT EXISTS (SELECT FROM public.t WHERE id = i)",
    "DELETE FROM public.t WHERE id = %(a)s",
    "DELETE FROM public.t WHERE k = %(k)s",
    "UPDATE public.t SET k = %(k)s WHERE id = %(a)s",
    "UPDATE public.t SET v = v + 1 WHERE id = %(a)s",
    "UPDATE public.t x SET k = y.k FROM public.t y WHERE (x.id, y.id) IN ((%(a)s, %(b)s), (%(b)s, %(a)s))",
    "UPDATE public.t SET id = %(b)s WHERE id = %(a)s AND NOT EXISTS (SELECT FROM public.t WHERE id = %(b)s)",
    "WITH d AS (DELETE FROM public.t WHERE id = %(a)s RETURNING k) UPDATE public.t SET v = 9 WHERE k IN (TABLE d)",
    "SET CONSTRAINTS ALL IMMEDIATE",
)


class Alive:
    """Runs writers, shippers and a killer until a test stops it; keeps the errors."""

    def __init__(self, made: Shards, generation_id: int, seed: int) -> None:
        self.made, self.generation_id, self.seed = made, generation_id, seed
        self.done = threading.Event()
        self.wrong: list[str] = []
        self.counts: defaultdict[str, int] = defaultdict(int)

    def write(self, shard: str, number: int) -> None:
        rng = random.Random(f"{self.seed} {shard} {number}")
        with ExitStack() as stack:
            looks = {name: stack.enter_context(closing(psycopg2.connect(dsn))) for name, dsn in self.made.dsns.items()}
            connection: Any = None
            while not self.done.is_set():
                if connection is None or connection.closed:
                    connection = stack.enter_context(closing(psycopg2.connect(self.made.dsns[shard])))
                # Room for a shipper: a key that is changed all the time is never settled.
                time.sleep(rng.random() * 0.03)
                try:
                    self._transaction(connection, looks, rng)
                    self.counts["committed"] += 1
                except psycopg2.Error as error:
                    self.counts[error.pgcode or "gone"] += 1
                    if error.pgcode is not None and error.pgcode not in ALLOWED:
                        self.wrong.append(f"{shard}: {error.pgcode} {error}")
                        self.done.set()
                    with suppress(psycopg2.Error):
                        connection.rollback()
                    if error.pgcode is None:
                        connection.close()

    def _transaction(self, connection: Any, looks: dict[str, Any], rng: random.Random) -> None:
        before = {name: _snapshot(one) for name, one in looks.items()}
        connection.set_session(isolation_level=rng.choice(("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")))
        with connection.cursor() as cursor:
            try:
                for _ in range(rng.randint(1, 4)):
                    values = {"k": rng.choice((*KEYS, None)), "a": rng.randint(1, ROWS), "b": rng.randint(1, ROWS)}
                    undone = rng.random() < 0.2
                    if undone:
                        cursor.execute("SAVEPOINT x")
                    cursor.execute(rng.choice(STATEMENTS), values)
                    if undone:
                        cursor.execute("ROLLBACK TO x")
                if rng.random() < 0.15:
                    connection.rollback()
                    return
                connection.commit()
            except psycopg2.errors.UniqueViolation as error:
                detail = error.diag.message_detail or ""
                if "already exists in shard" in detail:
                    self._check_refusal(detail, before)
                raise

    def _check_refusal(self, detail: str, before: dict[str, str]) -> None:
        """Another shard has the key, or had it since the transaction began."""
        self.counts["refused"] += 1
        key, other = detail.split(")=(")[1].split(")")[0], detail.rsplit(" ", 1)[1].rstrip(".")
        held = self.made.ask(
            "SELECT 1 FROM public.t WHERE k = %s "
            "UNION ALL SELECT 1 FROM public.log WHERE k = %s AND NOT pg_visible_in_snapshot(xid, %s::pg_snapshot)",
            key, key, before[other], shard=other,
        )  # fmt: skip
        if not held:
            self.wrong.append(f"{key} was refused, and {other} has not had it: {detail}")
            self.done.set()

    def watch(self) -> None:
        """All shards at one moment: while enforced no two of them have one key."""
        with ExitStack() as stack:
            there = [stack.enter_context(closing(psycopg2.connect(dsn))) for dsn in self.made.dsns.values()]
            while not self.done.is_set():
                enforced = self._enforced()
                seen: defaultdict[str, list[int]] = defaultdict(list)
                try:
                    for connection in there:
                        connection.cursor().execute(
                            "SET LOCAL lock_timeout = '200ms'; LOCK TABLE public.t IN SHARE MODE"
                        )
                    for number, connection in enumerate(there):
                        with connection.cursor() as cursor:
                            cursor.execute("SELECT k FROM public.t WHERE k IS NOT NULL")
                            for (key,) in cursor.fetchall():
                                seen[key].append(number)
                    self.counts["watched"] += enforced
                except psycopg2.Error:
                    continue
                finally:
                    for connection in there:
                        connection.rollback()
                doubles = {key: found for key, found in seen.items() if len(found) > 1}
                if doubles and enforced and self._enforced():
                    self.wrong.append(f"one key in two rows: {doubles}")
                    self.done.set()
                time.sleep(0.02)

    def _enforced(self) -> bool:
        return self.made.ask("SELECT roir.unique_problem(%s)", self.generation_id) == [(None,)]

    def kill(self) -> None:
        """Sessions of shippers, and of writers on the index server; enforcement ends and begins again."""
        rng = random.Random(f"{self.seed} kill")
        while not self.done.wait(rng.random()):
            names = rng.choice((["roir ship"], ["postgres_fdw"], ["roir ship", "postgres_fdw"]))
            self.made.ask(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = ANY (%s) AND random() < 0.3",
                names,
            )
            if rng.random() < 0.1:
                with self.made.database.transaction() as connection:
                    holders.end(connection, self.generation_id, "it is tried", "test")
            self.enforce()

    def enforce(self) -> None:
        """As long as there are duplicates, which may come while nothing is refused, they are taken away."""
        while not self._enforced():
            try:
                enforce.enforce_index(self.made.database, "public.ix")
                self.counts["enforced"] += 1
            except DuplicatesFound:
                self.counts["duplicates"] += 1
                self.heal()
            except RoirError as error:
                self.counts[type(error).__name__] += 1

    def heal(self) -> None:
        for shard, key in self.made.ask(
            "SELECT DISTINCT partition, key ->> 0 FROM roir.duplicate WHERE healed_at IS NULL AND partition <> 's0'"
        ):
            with suppress(psycopg2.Error):
                self.made.ask("DELETE FROM public.t WHERE k = %s", key, shard=shard)


def _snapshot(connection: Any) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_snapshot()::text")
        found: str = cursor.fetchone()[0]
    connection.rollback()
    return found


@pytest.mark.by_hand("sweeps")
@pytest.mark.usefixtures("deadlocks_meant")
def test_no_two_shards_have_a_key_whatever_happens(contrib_shards: Make) -> None:
    seed = int(os.environ.get("ROIR_SEED", random.randrange(1 << 30)))
    seconds = float(os.environ.get("ROIR_SECONDS", "8"))
    print(f"ROIR_SEED={seed}")
    made = contrib_shards(3, *TABLE)
    for name, dsn in made.dsns.items():
        registry.add(made.database, name, dsn, index_dsn=index_dsn(made))
    prepared, run = apart.begin(made, unique=True)
    apart.finish_all(made, run)
    announce.announce(made.database, "public.ix", "server")
    enforce.enforce_index(made.database, "public.ix")
    alive = Alive(made, prepared.generation_id, seed)
    shipper = Shipper(made.database.named("roir ship"), every_s=0.02)
    threads = [threading.Thread(target=alive.write, args=(name, n)) for name in made.names for n in (0, 1)]
    threads += [threading.Thread(target=alive.watch), threading.Thread(target=alive.kill)]
    with shipper.running():
        for thread in threads:
            thread.start()
        alive.done.wait(seconds)
        alive.done.set()
        for thread in threads:
            thread.join()
    print(dict(alive.counts))
    assert not alive.wrong, alive.wrong
    for _ in range(20):
        apart.ship_all(made, prepared.generation_id)
        made.ask(f"UPDATE roir_data.g{prepared.generation_id}_intent SET at = at - interval '5 s'")
        if made.ask(f"SELECT count(*) FROM roir_data.g{prepared.generation_id}_intent") == [(0,)]:
            break
    apart.assert_exact(made, prepared.generation_id)
    held = made.ask(f"SELECT c1, c2 FROM roir_data.g{prepared.generation_id}_holder ORDER BY 1, 2")
    keys = [
        (key, name) for name in made.names for (key,) in made.ask("SELECT k FROM t WHERE k IS NOT NULL", shard=name)
    ]
    assert held == sorted(keys)
