"""Ends a driver and all that it has started, once the process that started it has died or has heard its end.

A process of its own in the driver's session, which no hung thread of the driver's holds up. Its standard input is a
pipe whose other end the starter alone has: it ends with that, whatever the starter dies of. It runs as a script, and
imports nothing of ours, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

# The number of the pipe, in the driver's environment.
STARTER = "ROIR_STARTER_PIPE"
# The time that a driver may take to pause its operation.
PATIENCE_S = 2.0
LOOK_EVERY_S = 0.05
# A killed process is gone at once, unless it is in an uninterruptible wait.
GONE_S = 10.0


def begin(environment: Mapping[str, str] = os.environ) -> None:
    """Starts it, in a driver whose starter has given it a pipe."""
    if STARTER not in environment:
        return
    pipe = int(os.environ.pop(STARTER))
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(pipe)


def members(session: int) -> set[int]:
    """The living processes of a session but this one; none without /proc."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    # A program's name may have spaces and parentheses.
                    state, _parent, _group, of, *_ = file.read().rpartition(b")")[2].split()
                    if int(of) == session and state not in (b"Z", b"X"):
                        found.add(int(name))
    return found - {os.getpid()}


def kill(session: int) -> None:
    """Kills all of a session, Python workers with groups of their own too. Its leader must not be reaped yet, or this
    process must be one of it: else its number may be somebody else's."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(0) != session:
            os.killpg(session, signal.SIGKILL)
    deadline = time.monotonic() + GONE_S
    # Some may have been forked since.
    while (left := members(session)) and time.monotonic() < deadline:
        for one in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def main(driver: int) -> None:
    """Waits for the end of the pipe, then let the driver pause what it drives, then kill what is left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    if driver in members(driver):
        with suppress(ProcessLookupError):
            os.kill(driver, signal.SIGHUP)
    deadline = time.monotonic() + PATIENCE_S
    while driver in members(driver) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    kill(driver)


if __name__ == "__main__":
    main(int(sys.argv[1]))
