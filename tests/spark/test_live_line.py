"""`roir build` tells how far it is: on a terminal by a line that lives, else by a few lines."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from airflow_roir.engine.work.phase_log import LINES
from tests.engine import steps

BUILD = (sys.executable, "-m", "airflow_roir.cli", "build", "public.ix")
OF_RANGES = re.compile(r"build: .*\branges? .*done, ", re.MULTILINE)


def on_terminal(command: tuple[str, ...], dsn: str) -> str:
    """All that it writes to a terminal of 80 columns, without escape codes."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        env=environment | {"ROIR_DSN": dsn, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    written = b""
    try:
        while some := os.read(master, 65536):
            written += some
    except OSError:
        # No process holds the other end any more.
        pass
    finally:
        os.close(master)
    assert process.wait() == 0, written.decode("utf-8", "replace")[-2000:]
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode("utf-8", "replace"))


@pytest.mark.by_hand("sweeps")
def test_on_a_terminal_there_is_a_live_line_instead_of_a_line_per_range(database: Database, dsn: str) -> None:
    install.init(database)
    steps.make_table(dsn)
    said = on_terminal((*BUILD, "--table", "public.t", "--keys", "k", "--ranges", "30"), dsn)
    assert re.search(r"build: [\d,]+ of about [\d,]+ rows", said)
    assert "build: 2 workers" in said
    assert not OF_RANGES.search(said)
    rebuilt = subprocess.run(
        (*BUILD, "--ranges", "30"), env={**os.environ, "ROIR_DSN": dsn}, capture_output=True, text=True, check=True
    )
    assert 1 <= len(OF_RANGES.findall(rebuilt.stderr)) <= LINES
    assert "30 of 30 ranges done" in rebuilt.stderr
