"""Everything at once over an index of shards, behind a failing network, and the oracle of it.

Writers that announce, by the server or by clients; shippers step by step, and `roir ship` as a process that is killed;
readers at each level; verifications, rebuilds, reverts; servers that die. At rest the index is the union of the shards'
projections; strict reads never miss, and never make up; bounded reads don't lie.

Each of these mistakes is found within one schedule: intents that are settled whatever the snapshot, an outbox that is
cleared before what was polled is committed, entries and intents that `roir.strict` reads in two snapshots, a pass that
is as fresh as its end.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psycopg2

from airflow_roir.engine.database import Database
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from servers.shards import Shards
from tests.shards import apart, fault_hands
from tests.shards.fault_readers import INDEX, BoundedReader, StrictReader
from tests.shards.fault_writers import KEYS, Contender, Keeper, ids_of
from tests.shards.faulty_network import Network
from tests.shards.histories import Histories
from tests.shards.reading import create_servers

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "CREATE TABLE done (writer int PRIMARY KEY, n int NOT NULL)",
    "INSERT INTO t SELECT i, 'old', i FROM generate_series(1000, 1099) i",
)
FEEDS = """
SELECT l.id, g.id, g.status = 'active' FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id
 WHERE g.status IN ('active', 'retired') AND l.captured_at IS NOT NULL AND l.removed_at IS NULL ORDER BY l.id
"""
SHOWN = """
SELECT s.name FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id JOIN roir.shard s ON s.id = l.shard_id
 WHERE g.status = 'active'
"""
# The shards that are part of every generation that a revert may show.
KEPT = """
SELECT s.name FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id JOIN roir.shard s ON s.id = l.shard_id
 WHERE g.status IN ('active', 'retired') GROUP BY s.name
HAVING count(DISTINCT g.id) = (SELECT count(*) FROM roir.generation WHERE status IN ('active', 'retired'))
"""


@dataclass
class Traffic:
    """made: with contrib's extensions where servers announce. by: who announces at first ("client" or "server"), None:
    neither.

    kills: servers die. hands: an operator verifies, rebuilds and so on. service: `roir ship` runs, too. wrong: what was
    seen that must not be. happened: what else was. said: what was refused, with its reason.
    """

    made: Shards
    seed: int
    by: str | None = "client"
    kills: bool = False
    hands: bool = False
    service: bool = False
    wrong: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    # The ways of the network: two for shippers, two for writers, those of others. A work of many steps never ends if
    # each step fails now and then.
    WRITERS, READERS, SERVICE, HANDS, SERVERS = 2, 4, 5, 6, 7
    NAMED = (SERVICE, HANDS)
    WAYS = (0.6, 0.2, 0.5, 0.5, 0.3, 0.1, 0.03, 0.3)

    def __post_init__(self) -> None:
        self.stopped = threading.Event()
        self.network = Network(self.made, self.seed, self.WAYS)
        self.done: dict[str, list[tuple[float, int]]] = {name: [(0.0, 0)] for name in self.made.names}
        self.histories = Histories((name, id_) for name in self.made.names for one in range(2) for id_ in ids_of(one))
        self.covered: set[str] = set(self.made.names)
        self.in_sql = self.by == announce.SERVER
        self.ways_to_announce = [announce.SERVER, announce.CLIENT] if self.in_sql else [announce.CLIENT]

    def run(self, seconds: float) -> None:
        """Runs for `seconds`; then the network is whole, all is shipped, and the index is looked at."""
        try:
            self.set_up()
            self.network.fail()
            threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in self._works()]
            for thread in threads:
                thread.start()
            self.stopped.wait(seconds)
            self.stopped.set()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), f"{thread} hangs"
            self.happened += self.network.heal()
            assert not self.wrong, "\n".join(self.wrong[:5])
            self.rest()
        finally:
            self.stopped.set()
            self.network.close()

    def set_up(self) -> None:
        """Builds the index, lets writers announce, and sends all of them through the network."""
        for name in self.made.names:
            # To dial a name takes a server of the other side's address, which a proxy has for everybody.
            index = self.network.dsn("", self.SERVERS) if self.by == announce.SERVER else None
            registry.add(self.made.database, name, self.made.dsns[name], index_dsn=index)
        _, run = apart.begin(self.made, index=INDEX, verify="none")
        apart.finish_all(self.made, run)
        if self.hands:
            # There is something to go back to from the beginning: behind this network few rebuilds come to their end.
            again: dict[str, None] = dict.fromkeys(("table", "keys", "include"))
            _, run = apart.begin(self.made, index=INDEX, verify="none", revert_window_s=3600, **again)
            apart.finish_all(self.made, run)
        if self.in_sql:
            create_servers(self.made, {name: self.network.dsn(name, self.READERS) for name in self.made.names})
        if self.by is not None:
            announce.announce(self.made.database, INDEX, self.by)
        # Strict reads begin now.
        self._ship()
        for name in self.made.names:
            registry.add(self.made.database, name, self.network.dsn(name, self.SERVICE))

    def _works(self) -> list[Callable[[], None]]:
        works: list[Callable[[], None]] = []
        for name in self.made.names:
            for number in range(2):
                works.append(Contender(self, name, number, self._chance(f"contender {name} {number}")).run)
                works.append(Keeper(self, name, number, self._chance(f"keeper {name} {number}")).run)
                works.append(fault_hands.Shipper(self, name, number, self._chance(f"shipper {name} {number}")).run)
        works.append(BoundedReader(self).run)
        if self.by is not None:
            works += [StrictReader(self, number, self._chance(f"reader {number}")).run for number in range(2)]
        if self.kills:
            works.append(fault_hands.Killer(self, self._chance("killer")).run)
        if self.service:
            works.append(fault_hands.Service(self, self._chance("service")).run)
        if self.hands:
            works.append(fault_hands.Hands(self, self._chance("hands")).run)
        return works

    def _chance(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {what}")

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
            self.stopped.set()
            raise

    def through(self, name: str, way: int) -> Database:
        """A server by one of the ways to it."""
        return Database(self.network.dsn(name, way), "roir tests", self.made.database.limits)

    def until_it_answers(self, work: Callable[[], None]) -> None:
        """Try it again while a server is away."""
        until = time.monotonic() + 60
        while True:
            try:
                return work()
            except psycopg2.OperationalError:
                assert time.monotonic() < until
                time.sleep(0.1)

    def shards_shown(self) -> set[str]:
        return self._shards(SHOWN)

    def shards_kept(self) -> set[str]:
        """The shards that are part of every generation that a revert may show."""
        return self._shards(KEPT)

    def _shards(self, query: str) -> set[str]:
        found: set[str] = set()
        self.until_it_answers(lambda: found.update(name for (name,) in self.made.ask(query)))
        return found

    def rest(self) -> None:
        """After the last write: aborts an unfinished operation, ships everything, and checks the index."""
        for name in self.made.names:
            registry.add(self.made.database, name, self.made.dsns[name])
        fault_hands.end(self)
        until = time.monotonic() + 30
        while (left := self._ship()) and time.monotonic() < until:
            time.sleep(0.2)
        assert not left, f"intents that stay: {left}"
        doubts = self.made.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL AND removed_at IS NULL")
        assert not doubts, f"nothing was lost: {doubts}"
        for _, generation, _ in self.made.ask(FEEDS):
            apart.assert_exact(self.made, generation)
        if self.by is not None:
            self._read()

    def _ship(self) -> Sequence[tuple[object, ...]]:
        """Ships everything; returns the intents that are left."""
        left: list[tuple[object, ...]] = []
        for generation in {row[1] for row in self.made.ask(FEEDS)}:
            apart.ship_all(self.made, generation)
            left += self.made.ask(f"SELECT * FROM roir_data.g{generation}_intent")
        return left

    def _read(self) -> None:
        """Strict reads are neither refused nor wrong at rest."""
        [(by,)] = self.made.ask("SELECT announced_by FROM roir.index")
        announce.announce(self.made.database, INDEX, by)
        self._ship()
        self.covered = self.shards_shown()
        for number in range(1 + self.in_sql):
            reader = StrictReader(self, number, self._chance("at rest"))
            before = self.happened.total()
            with reader.sharded:
                for key in KEYS:
                    reader.look(key)
            assert self.happened.total() == before + len(KEYS)
            assert self.happened["strict reads in SQL" if reader.in_sql else "strict reads"]
        assert not self.wrong, "\n".join(self.wrong[:5])
