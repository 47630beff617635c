"""Ends a driver and all its child processes once the driver's starter has died, or has learnt of the driver's end.

It is a process of its own in the driver's session, so no hung thread of the driver holds it up. Its standard input is a
pipe whose other end only the starter has: the pipe ends with the starter, in any case. It runs as a script and imports
nothing of ours, so that it starts at once.
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
    """Starts the guard, in a driver that has got a pipe from its starter."""
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
    """Kills all processes of a session, also Python workers with groups of their own. The session's leader must not be
    reaped yet, or this process must belong to it: otherwise another session may have its number."""
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
    """Waits for the end of the pipe, then lets the driver pause its operation, then kills the processes left."""
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
