"""Fixtures: a server that can be killed, a scene of its own for each test."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest

from servers.killable import Server, running_server
from tests.conftest import with_template
from tests.crash.scene import Scene, a_scene

# `nohup` and a shell's background job ignore these, and every process that a test ends by one would, too.
for _number, _default in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


@pytest.fixture(scope="session")
def crash_server(pg: int) -> Iterator[Server]:
    """One server for the tests of a process; it's been killed and started again by some of them."""
    with running_server(pg) as server:
        with_template(server.dsn())
        yield server


@pytest.fixture
def scene(crash_server: Server) -> Iterator[Scene]:
    """A database with an application on it; a random one, by a printed seed."""
    with a_scene(crash_server, random.randrange(1_000_000)) as scene:
        yield scene
