"""A network whose faults come by a seed, and what works through it: two shippers of each lane, writers, a reader."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg2
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import generation as physical
from airflow_roir.engine.database import Database
from airflow_roir.engine.shards.lane_shipper import InShard, LaneShipper
from airflow_roir.errors import RoirError
from tests.crash.network import Proxy, reset
from tests.shards.laid import Laid

# What may happen to what is sent, in one direction, and how often in 1,000 times.
FAULTS = {"delay": 40, "cut": 4, "answer lost": 6, "half open": 1}


class FaultyProxy(Proxy):
    """Forwards, but delays some messages, cuts some connections before or after the server got what was sent, or
    leaves one half open: nothing comes through any more, and the server isn't told.

    happened: how often what did.
    """

    def __init__(self, server: str, seed: int) -> None:
        self._server = psycopg2.extensions.parse_dsn(server)
        self._random = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.faulty = True
        super().__init__(("", 0))

    def _upstream(self) -> socket.socket:
        host, port = self._server.get("host", "127.0.0.1"), int(self._server.get("port", "5432"))
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        upstream = socket.socket(socket.AF_UNIX)
        upstream.connect(f"{host}/.s.PGSQL.{port}")
        return upstream

    def _forward(self, client: socket.socket, upstream: socket.socket) -> None:
        # A thread for each direction, so that one is slow while the other isn't.
        threading.Thread(target=self._pump, args=(upstream, client, True), daemon=True).start()
        self._pump(client, upstream, False)

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(65_536):
                fault = self._fault(answers)
                if fault == "delay":
                    time.sleep(self._random.uniform(0, 0.03))
                elif fault in ("cut", "answer lost"):
                    break
                elif fault == "half open":
                    time.sleep(0.3)
                    break
                sink.sendall(data)
        for end in (source, sink):
            reset(end)

    def _fault(self, answers: bool) -> str:
        """What happens to this piece. An answer that is lost was of something that the server did."""
        if not self.faulty:
            return ""
        drawn = self._random.randrange(1000)
        for name, share in FAULTS.items():
            if drawn < share:
                if (name == "cut" and answers) or (name == "answer lost" and not answers):
                    return ""
                self.happened[name] += 1
                return name
            drawn -= share
        return ""


@dataclass
class Traffic:
    """Everything at once, until `stop`. wrong: what a reader saw that must not be. happened: what else did."""

    laid: Laid
    seed: int
    kills: bool = False
    wrong: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float) -> None:
        """Traffic for so long; then the network is whole, everything is shipped, and the index is looked at."""
        self._stop = threading.Event()
        dsns = {"": self.laid.shards.index, **self.laid.shards.dsns}
        self._proxies = {
            (name, n): FaultyProxy(dsn, self.seed * 100 + 2 * place + n)
            for place, (name, dsn) in enumerate(dsns.items())
            for n in range(2)
        }
        self._done: dict[str, list[tuple[float, int]]] = {name: [(0.0, 0)] for name in self.laid.shards.names}
        work = [(self._write, name, n) for name in self.laid.shards.names for n in range(2)]
        work += [(self._ship, name, n) for name in self.laid.shards.names for n in range(2)]
        work += [(self._read, "", 0)] + [(self._kill, "", 0)] * self.kills
        threads = [threading.Thread(target=self._guarded, args=one, daemon=True) for one in work]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        for proxy in self._proxies.values():
            self.happened += proxy.happened
            proxy.close()
        assert not self.wrong, self.wrong[:3]
        self.laid.ship()
        self.laid.assert_exact()
        doubts = self.laid.shards.ask("SELECT doubt FROM roir.lane WHERE doubt IS NOT NULL")
        assert not doubts, f"nothing was lost: {doubts}"

    def _guarded(self, what: object, name: str, number: int) -> None:
        try:
            what(name, number, random.Random(f"{self.seed} {name} {number} {what}"))  # type: ignore[operator]
        except BaseException as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
            raise

    def _write(self, name: str, number: int, chance: random.Random) -> None:
        """Transactions over few rows; the one with the id -1 counts them, and is known to be committed after it is."""
        connection = psycopg2.connect(self.laid.shards.dsns[name])
        count = 0
        while not self._stop.is_set():
            try:
                with connection.cursor() as cursor:
                    if number == 0:
                        count += 1
                        cursor.execute(
                            "INSERT INTO t VALUES (-1, 'count', %s) ON CONFLICT (id) DO UPDATE SET v = excluded.v",
                            (count,),
                        )
                    # In the order of ids, so that writers don't deadlock with each other: if one does, it is ours.
                    rows = sorted(chance.sample(range(12), chance.randrange(1, 4)))
                    for row in rows:
                        self._statement(cursor, chance, row, moves=rows == [row] and number > 0)
                if chance.random() < 0.2 and number:
                    connection.rollback()
                else:
                    connection.commit()
                    if number == 0:
                        self._done[name].append((time.time(), count))
            except (psycopg2.OperationalError, psycopg2.InterfaceError):
                # A deadlock, or a server that was killed: perhaps after the commit.
                connection.close()
                connection = self._again(name)
            self._stop.wait(chance.uniform(0, 0.02))
        connection.close()

    def _again(self, name: str) -> psycopg2.extensions.connection:
        until = time.monotonic() + 30
        while True:
            try:
                return psycopg2.connect(self.laid.shards.dsns[name])
            except psycopg2.OperationalError:
                assert time.monotonic() < until
                time.sleep(0.1)

    def _kill(self, name: str, number: int, chance: random.Random) -> None:
        """A server dies without a checkpoint, and comes back."""
        while not self._stop.wait(chance.uniform(1, 4)):
            who = chance.choice(sorted(self.laid.shards.servers))
            self.laid.shards.servers[who].kill()
            self.happened[f"{who} was killed"] += 1
            time.sleep(chance.uniform(0, 0.5))
            self.laid.shards.servers[who].start()

    @staticmethod
    def _statement(cursor: object, chance: random.Random, row: int, moves: bool) -> None:
        key, value = chance.choice("abc"), chance.randrange(5)
        statement = chance.choices(
            [
                f"INSERT INTO t VALUES ({row}, '{key}', {value}) ON CONFLICT (id) DO UPDATE SET k = excluded.k",
                f"UPDATE t SET k = '{key}', v = {value} WHERE id = {row}",
                f"UPDATE t SET v = v + 1 WHERE k = '{key}' AND id = {row}",
                f"DELETE FROM t WHERE id = {row}",
                f"UPDATE t SET id = {row} WHERE id = {max(row - 5, 0)} AND NOT EXISTS (SELECT FROM t WHERE id = {row})",
            ],
            [5, 5, 3, 3, 3 * moves],
        )[0]
        cursor.execute("SAVEPOINT a")  # type: ignore[attr-defined]
        try:
            cursor.execute(statement)  # type: ignore[attr-defined]
        except psycopg2.errors.UniqueViolation:
            cursor.execute("ROLLBACK TO SAVEPOINT a")  # type: ignore[attr-defined]

    def _through(self, dsn: str, proxy: FaultyProxy) -> Database:
        behind = psycopg2.extensions.make_dsn(dsn, host="127.0.0.1", port=proxy.port, connect_timeout=5)
        return Database(behind, "shipper", self.laid.database.limits)

    def _ship(self, name: str, number: int, chance: random.Random) -> None:
        """Claims, visits, applies, dies, comes back with an old visit, takes over."""
        index = self._through(self.laid.shards.index, self._proxies["", number])
        shard = self._through(self.laid.shards.dsns[name], self._proxies[name, number])
        shipper: LaneShipper | None = None
        while not self._stop.is_set():
            try:
                if shipper is None:
                    shipper = LaneShipper(index, self.laid.lane(name).id, f"{name} {number}", shard, most=4)
                    if not shipper.claim(take_over=chance.random() < 0.3):
                        self._stop.wait(0.1)
                        shipper.close()
                        shipper = None
                        continue
                if chance.random() < 0.3:
                    self.happened["pass"] += shipper.ship_pass(self._stop.is_set) > 0
                else:
                    found = shipper.visit()
                    if chance.random() < 0.2:
                        self._stop.wait(chance.uniform(0, 0.3))
                    shipper.apply(found)
                    self.happened["applied"] += 1
                self._stop.wait(chance.uniform(0, 0.05))
                dies = chance.random() < 0.01
            except (InShard, DBAPIError, RoirError) as error:
                self.happened[type(error).__name__] += 1
                self._stop.wait(0.02)
                # Some go on with what they remember, as the service does.
                dies = not isinstance(error, InShard) or chance.random() < 0.3
            if dies and shipper is not None:
                shipper.close()
                shipper = None
        if shipper is not None:
            shipper.close()

    def _read(self, name: str, number: int, chance: random.Random) -> None:
        """Bounded reads: what was committed before `fresh_at` is there."""
        base = physical.base(self.laid.generation)
        place = {one.source: f"c{n + 1}" for n, one in enumerate(self.laid.entry.columns)}
        while not self._stop.wait(0.01):
            with suppress(*(psycopg2.OperationalError, DBAPIError) * self.kills):
                self._look(base, place)

    def _look(self, base: str, place: dict[str, str]) -> None:
        found = self.laid.shards.ask(
            f"SELECT s.name, extract(epoch FROM l.fresh_at)::float8, (SELECT e.{place['v']} FROM {base} e "
            f"WHERE e.{place['shard']} = s.name AND e.{place['id']} = -1 AND e.{place['k']} = 'count') "
            "FROM roir.lane l JOIN roir.shard s ON s.id = l.shard_id WHERE l.fresh_at IS NOT NULL"
        )
        for shard, fresh, count in found:
            due = max(n for at, n in list(self._done[shard]) if at < fresh)
            if (count or 0) < due:
                self.wrong.append(f"{shard}: fresh at {fresh}, {due} was committed before, the entry says {count}")
            self.happened["bounded reads"] += due > 0
