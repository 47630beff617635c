"""Runs `roir status --watch`: looks once a second until no operation is running.

A thread looks, so that the view can show a server that doesn't answer, and Ctrl-C ends the command at once. On a
terminal the view is live (`live.py`); elsewhere each change is a line.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from sqlalchemy.exc import DBAPIError

from airflow_roir.cli.app import print_json_line, show
from airflow_roir.cli.cells import printable
from airflow_roir.cli.last_line import INTERRUPTED
from airflow_roir.cli.overview import operation_line, print_overview
from airflow_roir.cli.silence import Silence
from airflow_roir.engine.database import is_transient
from airflow_roir.engine.snapshot.overview import Overview, overview_of
from airflow_roir.errors import NotFound

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database
    from airflow_roir.engine.snapshot.operation import OperationStatus

EVERY_S = 1.0
# A look that takes longer is reported.
SLOW_S = 3.0
# Values of TERM by which rich draws nothing either.
DUMB = ("", "dumb", "unknown")


class View(Protocol):
    """A view that shows the looks."""

    def show(self, seen: Overview | None, silence: Silence | None) -> None:
        """Shows the last look, and whether the server has been silent since."""


def watch(database: Database, names: Sequence[str], as_json: bool) -> int:
    """Shows operations until none runs; returns the exit code. Raises the errors of the first look."""
    live = not as_json and sys.stdout.isatty() and os.environ.get("TERM", "") not in DUMB
    try:
        first = overview_of(database, names, deltas=True)
        if not first.moves:
            print_json_line(first.as_dict()) if as_json else print_overview(first, as_json=False)
            return 0
        with _ended_by_sigterm():
            if live:
                from airflow_roir.cli.live import LiveView

                with LiveView() as view:
                    last = _follow(database, names, first, view)
            else:
                last = _follow(database, names, first, Lines(as_json))
    except KeyboardInterrupt:
        return INTERRUPTED
    if last is None:
        # A program that reads JSON sees that no line follows.
        if not as_json:
            gone = ", ".join(map(printable, names))
            show(f"index {gone} is gone: it was dropped, or its first build was aborted")
    elif live:
        print_overview(last, as_json=False)
    return 0


def _follow(database: Database, names: Sequence[str], first: Overview, view: View) -> Overview | None:
    """Shows looks until no operation runs; returns the last one, None if the index is gone."""
    seen, looker = first, Looker(lambda: overview_of(database, names, deltas=True))
    view.show(seen, None)
    silence: Silence | None = None
    while seen.moves:
        begun = time.monotonic()
        looker.ask()
        found = looker.answer(EVERY_S)
        while found is None:
            # The server hangs, or the way to it does.
            if silence is not None or time.monotonic() - begun > SLOW_S:
                silence = silence or Silence(begun, "")
                view.show(seen, silence)
            found = looker.answer(EVERY_S)
        if isinstance(found, Overview):
            seen, silence = found, None
        elif isinstance(found, NotFound):
            return None
        elif isinstance(found, DBAPIError) and is_transient(found):
            silence = Silence(silence.since if silence else begun, _said(found))
        else:
            raise found
        view.show(seen, silence)
        time.sleep(max(0.0, EVERY_S - (time.monotonic() - begun)))
    return seen


def _said(error: DBAPIError) -> str:
    """The message of the server or the system, without the address that libpq puts before it."""
    lines = str(error.orig).strip().splitlines() or [""]
    return printable(lines[0].rsplit(" failed: ", 1)[-1].removeprefix("FATAL: ").strip())


class Looker:
    """A thread that looks whenever it is asked to."""

    def __init__(self, take: Callable[[], Overview]) -> None:
        self._take = take
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Overview | Exception] = queue.SimpleQueue()
        # A daemon: it may hang in the network for minutes, and must not keep the command from ending.
        threading.Thread(target=self._work, name="roir-look", daemon=True).start()

    def ask(self) -> None:
        """Makes it look."""
        self._asked.put(None)

    def answer(self, patience_s: float) -> Overview | Exception | None:
        """The result of the look, or the error; None if it is still looking after `patience_s`."""
        try:
            return self._found.get(timeout=patience_s)
        except queue.Empty:
            return None

    def _work(self) -> None:
        while True:
            self._asked.get()
            try:
                self._found.put(self._take())
            except Exception as error:
                self._found.put(error)


class Lines:
    """A line per change, for pipes and logs; JSON: one object per line."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: dict[object, str] = {}

    def show(self, seen: Overview | None, silence: Silence | None) -> None:
        """Prints the differences from the last time."""
        if silence is not None:
            # Once, with its reason, and not each second.
            self._line("server", silence.said or "silent", str(silence))
            return
        if self._shown.pop("server", None) is not None and not self._as_json:
            show(f"{_clock()} the server answers again")
        if seen is None:
            return
        if self._as_json:
            print_json_line(seen.as_dict())
            return
        for one in seen.operations:
            self._line(one.index, _facts(seen, one), operation_line(seen, one))
        for wait in seen.not_begun():
            line = printable(str(wait))
            self._line((wait.index, wait.waiter), line, line)

    def _line(self, key: object, what: str, line: str) -> None:
        if self._shown.get(key) == what:
            return
        self._shown[key] = what
        if not self._as_json:
            show(f"{_clock()} {line}")


def _facts(seen: Overview, one: OperationStatus) -> str:
    """The facts whose change gives another line; the passing of time alone gives none."""
    held = one.held_up.by if one.held_up is not None else None
    facts = (one.status, one.phase, one.percent_complete, one.rows, one.driven, one.owner, one.notice, held)
    waiters = [wait.waiter for wait in seen.waits_of(one.index)]
    return repr((one.operation_id, *facts, one.duplicate_keys, one.duplicate_rows, waiters))


def _clock() -> str:
    return time.strftime("%H:%M:%S")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the block as an error would, so that the terminal is restored."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
