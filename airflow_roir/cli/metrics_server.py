"""Serves the metrics to scrapes, by the library's own server. Scrapes at the same time share one session's look."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from airflow_roir.cli.app import say
from airflow_roir.engine.metrics.reading import metrics
from airflow_roir.errors import InvalidInput

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database


class OneLook(Collector):
    """Shares one look among requests: a request that comes during a look gets its result.

    look: returns the metrics, and why the database wasn't read. say: is called with each new reason, once. waiting: the
    number of requests that wait for the look under way.
    """

    def __init__(self, look: Callable[[], tuple[list[Metric], str | None]], say: Callable[[str], object] = say) -> None:
        self._look = look
        self._say = say
        self._lock = threading.Lock()
        self._running: Future[list[Metric]] | None = None
        self.waiting = 0
        self._problem: str | None = None

    def collect(self) -> Iterator[Metric]:
        """The metrics, as of now."""
        with self._lock:
            running = self._running
            if running is None:
                mine = self._running = Future()
                self.waiting = 0
            else:
                self.waiting += 1
        yield from self._found(mine) if running is None else running.result()

    def _found(self, mine: Future[list[Metric]]) -> list[Metric]:
        try:
            found, problem = self._look()
        except BaseException as error:
            with self._lock:
                self._running = None
            mine.set_exception(error)
            raise
        # Before its waiters get the result: a request from now on begins a new look.
        with self._lock:
            self._running = None
        mine.set_result(found)
        if problem != self._problem:
            self._say(problem if problem is not None else "the database is read again")
        self._problem = problem
        return found

    def describe(self) -> list[Metric]:
        """Returns nothing: the library would look only to know the names."""
        return []

    def restricted_registry(self, names: Iterable[str]) -> Collector:
        """The registry for a scrape of some names, of families or samples: `/metrics?name[]=roir_up&name[]=…`."""
        return _Some(self, frozenset(names))


class _Some(Collector):
    def __init__(self, whole: OneLook, names: frozenset[str]) -> None:
        self._whole, self._names = whole, names

    def collect(self) -> Iterator[Metric]:
        for family in self._whole.collect():
            some = Metric(family.name, family.documentation, family.type, family.unit)
            some.samples = [one for one in family.samples if {one.name, family.name} & self._names]
            if some.samples:
                yield some


@contextmanager
def serving(database: Database, address: str) -> Iterator[str]:
    """Serves at host:port while the block runs; yields the address. Port 0: any. Raises InvalidInput."""
    host, port = _split(address)
    try:
        server, thread = start_http_server(port, host, OneLook(lambda: metrics(database)))
    except (OSError, OverflowError) as error:
        raise InvalidInput(f"can't serve at {address}: {error}") from error
    try:
        yield f"{f'[{host}]' if ':' in host else host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit():
        raise InvalidInput(f"{address!r} is no host:port; give 127.0.0.1:9187 or the like, or 0.0.0.0:9187 for all")
    return host, int(port)
