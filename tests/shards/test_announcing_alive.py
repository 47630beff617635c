"""Writers, a shipper and strict readers at the same time, in threads; servers that are killed and promoted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg2
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from airflow_roir.announcing import announce as announce_by_client
from airflow_roir.engine.database import Database
from airflow_roir.shards.announce import announce
from servers import contrib as contribs
from servers.shards import shard_servers
from tests.shards.announced import INDEX, Scene, scene
from tests.shards.conftest import Make
from tests.shards.histories import History, Row, State

ROWS = 12
KEYS = ("k0", "k1", "k2")
TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    f"INSERT INTO t SELECT i, 'k' || i % 3, 0 FROM generate_series(1, {ROWS}) i",
)


class Alive:
    """Runs writers, a shipper and readers until a test stops it; keeps the first wrong answer."""

    def __init__(self, scene: Scene, by: str, seed: int) -> None:
        self.scene, self.by, self.seed = scene, by, seed
        self.histories: dict[Row, History] = {}
        for name in scene.made.names:
            for id_, k, v in scene.made.ask("SELECT id, k, v FROM t", shard=name):
                self.histories[(name, id_)] = History([((k, v), 0.0, 0.0)])
        self.done = threading.Event()
        self.wrong: list[str] = []
        self.reads = self.writes = 0

    def write(self, shard: str, number: int) -> None:
        rng = random.Random(f"{self.seed} {shard} {number}")
        mine = [i for i in range(1, ROWS + 1) if i % 2 == number]
        there = Database(self.scene.made.index)
        with Database(self.scene.made.dsns[shard]).connect() as here, there.connect() as index:
            while not self.done.is_set():
                changes: dict[int, State] = {}
                for id_ in rng.sample(mine, rng.randint(1, 3)):
                    before = self.histories[(shard, id_)].states[-1][0]
                    if before is None:
                        new: State = (rng.choice(KEYS), self.writes)
                        here.execute(
                            text("INSERT INTO public.t VALUES (:id, :k, :v)"), {"id": id_, "k": new[0], "v": new[1]}
                        )
                    elif rng.random() < 0.2:
                        new = None
                        here.execute(text("DELETE FROM public.t WHERE id = :id"), {"id": id_})
                    else:
                        new = (rng.choice(KEYS), self.writes)
                        here.execute(
                            text("UPDATE public.t SET k = :k, v = :v WHERE id = :id"),
                            {"id": id_, "k": new[0], "v": new[1]},
                        )
                    changes[id_] = new
                if self.by == "client":
                    announce_by_client(here, index)
                if rng.random() < 0.2:
                    here.rollback()
                    continue
                begun = time.monotonic()
                # From here on it may be seen, before we know it.
                for id_, state in changes.items():
                    self.histories[(shard, id_)].states.append((state, begun, float("inf")))
                here.commit()
                ended = time.monotonic()
                for id_, state in changes.items():
                    self.histories[(shard, id_)].states[-1] = (state, begun, ended)
                self.writes += 1

    def ship(self, shard: str) -> None:
        feed = self.scene.feed(shard)
        while not self.done.is_set():
            self.scene.ship(feed, 20)

    def read(self, number: int) -> None:
        rng = random.Random(f"{self.seed} reader {number}")
        connections = {name: Database(dsn).connect() for name, dsn in self.scene.made.dsns.items()}
        opened = {name: one.__enter__() for name, one in connections.items()}
        for connection in opened.values():
            connection.exec_driver_sql("SET search_path = public")
            connection.commit()
        try:
            with Database(self.scene.made.index).connect() as index:
                while not self.done.is_set():
                    key = rng.choice(KEYS)
                    since = time.monotonic()
                    entries, asked = self.scene.candidates(index, key)
                    index.rollback()
                    found = entries | self.scene.repaired(opened, asked, key)
                    self.judge(key, found, since, time.monotonic())
                    self.reads += 1
        finally:
            for one in connections.values():
                one.__exit__(None, None, None)

    def judge(self, key: str, found: set[Any], since: float, until: float) -> None:
        by_row = {(shard, id_): (k, v) for shard, id_, k, v in found}
        for row, history in self.histories.items():
            possible = history.possible(since, until)
            got = by_row.get(row)
            if got is not None and got not in possible:
                self.wrong.append(f"{row}: {got} was made up, of {possible}")
            if got is None and all(state is not None and state[0] == key for state in possible):
                self.wrong.append(f"{row}: missed one of {possible}")

    def run(self, seconds: float) -> None:
        work: list[Callable[[], None]] = [
            *(lambda n=n, i=i: self.write(n, i) for n in self.scene.made.names for i in range(2)),  # type: ignore[misc]
            *(lambda n=n: self.ship(n) for n in self.scene.made.names),  # type: ignore[misc]
            *(lambda i=i: self.read(i) for i in range(2)),  # type: ignore[misc]
        ]

        def kept(one: Callable[[], None]) -> None:
            try:
                one()
            except Exception as error:
                self.wrong.append(repr(error))
                self.done.set()

        threads = [threading.Thread(target=kept, args=(one,)) for one in work]
        for thread in threads:
            thread.start()
        self.done.wait(seconds)
        self.done.set()
        for thread in threads:
            thread.join()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("by", ["server", "client"])
def test_strict_reads_beside_writers_and_a_shipper(contrib_shards: Make, by: str) -> None:
    seed = random.randrange(10**6)
    found = scene(contrib_shards(2, *TABLE), by)
    alive = Alive(found, by, seed)
    alive.run(10)
    print(f"seed {seed}: {alive.reads} reads, {alive.writes} transactions")
    assert not alive.wrong, f"seed {seed}: {alive.wrong[:3]}"
    assert min(alive.reads, alive.writes) > 0
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()


@pytest.mark.by_hand("sweeps")
def test_servers_that_are_killed_lose_no_announcement(pg: int) -> None:
    with shard_servers(2, contribs.find(pg) or contribs.ensure(pg)) as made:
        made.run(*TABLE)
        found = scene(made, "server")
        made.run("UPDATE t SET k = 'n' WHERE id = 1")
        before = found.intents()
        assert len(before) == 4
        with closing(psycopg2.connect(made.dsns["s0"])) as writer, writer.cursor() as cursor:
            cursor.execute("UPDATE t SET k = 'm' WHERE id = 2")
            made.servers["index"].kill()
            with pytest.raises(psycopg2.Error, match="roir index server"):
                writer.commit()
            made.servers["index"].start()
            assert found.intents() == before
            # The session connects to the index server again.
            cursor.execute("UPDATE t SET k = 'm' WHERE id = 2")
            writer.commit()
        assert len(found.intents()) == 6
        # A shard that is killed between both commits: what it had announced is of a transaction that aborted.
        announce.announce(found.database, INDEX, "client")
        with Database(made.dsns["s1"]).connect() as here, Database(made.index).connect() as there:
            here.execute(text("UPDATE public.t SET k = 'gone' WHERE id = 3"))
            assert announce_by_client(here, there) == 2
            made.servers["s1"].kill()
            made.servers["s1"].start()
            with pytest.raises(DBAPIError):
                here.commit()
            here.invalidate()
        assert len(found.intents()) == 8
        found.rest()
        assert found.intents() == []
        assert found.stored() == found.truth()
        assert not [row for row in found.stored() if row[2] == "gone"]
