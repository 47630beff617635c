"""`roir status --watch`, on a pseudo-terminal and in a pipe, as real processes: what it draws, and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2.extensions
import pytest

from airflow_roir.engine import abort, drop
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import heartbeat
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(1)
COMMAND = (sys.executable, "-m", "airflow_roir.cli", "status", "--watch")
ENDED = "\x1b[?25h\x1b[?1049l"
NAME = 'public."a\x1b[2J\u202e漢"'
SHOWN = 'public."a\\x1b[2J\\u202e漢"'


def hear_ctrl_c() -> None:
    """Runs in a process that a test starts: a process that is started in the background inherits that SIGINT is
    ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A process on a terminal of its own, and all that it has written."""

    def __init__(self, dsn: str, columns: int, arguments: tuple[str, ...], **environment: str) -> None:
        self.written = ""
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        environment = {**kept, "ROIR_DSN": dsn, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
        os.close(slave)

    def until(self, text: str) -> str:
        """Reads until that is on the screen; returns what has been written since the start."""
        while text not in self.written:
            assert self._read(), (text, self.written[-2000:])
        return self.written

    def end(self) -> int:
        """Reads the rest, for a minute at most; returns the exit code."""
        late = time.monotonic() + 60
        while self._read():
            # A view that goes on draws for ever.
            assert time.monotonic() < late, self.written[-2000:]
        return self.process.wait(60)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 120)
        assert ready, self.written[-2000:]
        try:
            some = os.read(self._master, 65536)
        except OSError:
            return False
        self.written += some.decode("utf-8", "replace")
        return bool(some)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@contextmanager
def watching(dsn: str, columns: int = 80, *arguments: str, **environment: str) -> Iterator[Terminal]:
    terminal = Terminal(dsn, columns, arguments, **environment)
    try:
        yield terminal
    finally:
        terminal.close()


def lines_of(written: str) -> list[str]:
    """The lines of the last screen, without escape codes."""
    last = written.split("\x1b[H")[-1]
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).replace("\r", "").split("\n")


@pytest.fixture
def running(database: Database, dsn: str) -> Any:
    """An operation in its build, of a hostile name, that a run drives."""
    steps.make_table(dsn)
    _, run = steps.begin(database, NAME, ranges=4, batch_rows=10)
    return run


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_view_fits_the_terminal_and_leaves_it_as_it_was(
    database: Database, dsn: str, running: Any, columns: int
) -> None:
    """However long the command takes to begin, the run is alive."""
    with heartbeat(database, running), watching(dsn, columns) as terminal:
        written = terminal.until("Ctrl-C")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
        assert terminal.written.rstrip().endswith(ENDED)
    assert "\x1b[2J\u202e" not in written
    lines = lines_of(written)
    # Signs two cells wide count twice.
    assert max(len(line.rstrip()) + line.count("漢") for line in lines) <= columns
    text = " ".join(line.strip() for line in lines)
    assert SHOWN in text
    for said in ("first build 1, on public.t by k", "build", "0 of 4 ranges done", "0 %", "running, driven by test"):
        assert said in text


def test_without_colour_nothing_is_coloured(dsn: str, running: Any) -> None:
    with watching(dsn, 80, NO_COLOR="1") as terminal:
        written = terminal.until("Ctrl-C")
        terminal.process.terminate()
        assert terminal.end() == 128 + signal.SIGTERM
        assert ENDED in terminal.written
    assert not re.search(r"\x1b\[[0-9;]*(?:3[0-7]|9[0-7])m", written)


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_draw_gets_lines(database: Database, dsn: str, running: Any, term: str) -> None:
    with heartbeat(database, running), watching(dsn, 80, TERM=term) as terminal:
        written = terminal.until("running, driven by test")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
    assert "\x1b" not in written


def test_it_ends_by_itself_when_nothing_runs_and_leaves_the_last_state(
    database: Database, dsn: str, running: Any
) -> None:
    with watching(dsn) as terminal:
        with heartbeat(database, running):
            terminal.until("running, driven by test")
        requests.pause(database, NAME, "me", "lunch")
        run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = NULL")
        assert terminal.end() == 0
    after = terminal.written.split(ENDED)[-1]
    assert "indexes" in after
    assert "by me: lunch" in after


def test_a_pipe_gets_a_plain_line_per_change_until_the_index_is_dropped(
    database: Database, dsn: str, running: Any
) -> None:
    environment = {**os.environ, "ROIR_DSN": dsn, "COLUMNS": "20", "FORCE_COLOR": "1"}
    reader = subprocess.Popen([*COMMAND, NAME], env=environment, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    lines = [reader.stdout.readline()]
    assert " 0 of about " in lines[0]
    worker = steps.worker(database, running)
    with worker.connection:
        claim = worker.claim()
        worker.step(claim)  # type: ignore[arg-type]
    while " 10 of about " not in lines[-1]:
        lines.append(reader.stdout.readline())
        assert lines[-1], lines
    abort.abort(database, NAME, "me", "enough")
    lines += reader.stdout.readlines()
    assert reader.wait(60) == 0
    assert lines[-1] == f"index {SHOWN} is gone: it was dropped, or its first build was aborted\n"
    assert all("\x1b" not in line for line in lines)
    assert all(SHOWN in line for line in lines)


def test_json_is_an_object_per_line(database: Database, dsn: str, running: Any) -> None:
    environment = {**os.environ, "ROIR_DSN": dsn}
    reader = subprocess.Popen([*COMMAND, "--json"], env=environment, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert json.loads(reader.stdout.readline())["operations"][0]["status"] == "running"
    requests.pause(database, NAME, "me", "lunch")
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = NULL")
    seen = [json.loads(line) for line in reader.stdout]
    assert reader.wait(60) == 0
    assert seen[-1]["operations"][0]["status"] == "paused"


def test_a_server_that_does_not_answer_is_waited_for_and_said(database: Database, dsn: str, server: str) -> None:
    """The database takes no connections for a while, as while a server restarts."""
    name = psycopg2.extensions.parse_dsn(dsn)["dbname"]
    steps.make_table(dsn)
    _, run = steps.begin(database)
    with watching(dsn) as terminal:
        with heartbeat(database, run):
            terminal.until("running, driven by test")
        run_sql(server, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        try:
            terminal.until("no answer since")
        finally:
            run_sql(server, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        assert dsn not in terminal.written
        requests.pause(database, "ix", "me", "lunch")
        run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = NULL")
        assert terminal.end() == 0
    assert "by me: lunch" in terminal.written.split(ENDED)[-1]


def test_nothing_that_runs_is_shown_once(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.make_index(database)
    drop.drop_index(database, "ix", "test")
    with watching(dsn) as terminal:
        assert terminal.end() == 0
    assert terminal.written.startswith("no index yet")
    assert "\x1b" not in terminal.written
