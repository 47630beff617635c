"""A network between shippers, applications and servers whose faults come by a seed."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import psycopg2

from servers.shards import Shards
from tests.crash.network import Proxy, reset

# The faults that a piece may meet in one direction, and how often in 1,000 pieces.
FAULTS = {"delay": 40, "cut": 4, "answer lost": 6, "half open": 1}


class FaultyProxy(Proxy):
    """Forwards, but delays some messages, cuts some connections before or after the server got what was sent, or leaves
    one half open: nothing comes through any more, and the server doesn't learn of it.

    share: the factor on the rates in FAULTS. happened: how often each fault happened. faulty: False at first.
    """

    def __init__(self, server: str, seed: int, share: float) -> None:
        self._share = share
        self._server = psycopg2.extensions.parse_dsn(server)
        self._random = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.faulty = False
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
        """Draws the fault of this piece, or "". A server has always done the work whose answer is lost."""
        if not self.faulty:
            return ""
        drawn = self._random.uniform(0, 1000)
        for name, often in FAULTS.items():
            share = often * self._share
            if drawn < share:
                if (name == "cut" and answers) or (name == "answer lost" and not answers):
                    return ""
                self.happened[name] += 1
                return name
            drawn -= share
        return ""


class Network:
    """Several ways to each server, each with a share of the faults once they are let loose. "" is the index server."""

    def __init__(self, made: Shards, seed: int, ways: Sequence[float]) -> None:
        self._dsns = {"": made.index, **made.dsns}
        self._proxies = {
            (name, way): FaultyProxy(dsn, seed * 1000 + len(ways) * place + way, share)
            for place, (name, dsn) in enumerate(self._dsns.items())
            for way, share in enumerate(ways)
        }

    def dsn(self, name: str, way: int) -> str:
        """The DSN of a server by one of the ways to it."""
        port = self._proxies[name, way].port
        return psycopg2.extensions.make_dsn(self._dsns[name], host="127.0.0.1", port=port, connect_timeout=5)

    def fail(self) -> None:
        """Lets the faults happen from now on."""
        for proxy in self._proxies.values():
            proxy.faulty = True

    def heal(self) -> Counter[str]:
        """Ends the faults; returns how often each has happened."""
        happened: Counter[str] = Counter()
        for proxy in self._proxies.values():
            proxy.faulty = False
            happened += proxy.happened
        return happened

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()
