"""Ends a command that drives an operation when a signal comes: in order if it can, otherwise within seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# By default these would end the command at once, without its end in order.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# The time in which the main thread hears a signal, unless it waits within a call of the database's library.
HEARD_S = 2.0
# The time for the end in order; Spark's driver, which pauses its operation, takes two seconds of it at most.
LIMIT_S = 4.0
_running = False


class Ended(SystemExit):
    """A signal asks for the end. The exit code is a shell's for a program that a signal has ended."""


@contextmanager
def ending(at_last: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise Ended in the main thread while the block runs, which ends the block.

    These, and a second Ctrl-C, end the command within `LIMIT_S`, even if something hangs. at_last: called then, from a
    thread, right before the process exits. A signal that the command's starter ignores (nohup) stays ignored. A block
    within the block changes nothing.
    """
    global _running
    if _running or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = threading.Event()
    read, write = os.pipe()
    os.set_blocking(write, False)

    def end(number: int, _frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            raise Ended(128 + number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    # The number of each signal is written there at once, also while the main thread hangs.
    woken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _running = True
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, end)
    threading.Thread(target=_watch, args=(read, heard, at_last), name="roir-ending", daemon=True).start()
    try:
        yield
    finally:
        _running = False
        if not heard.is_set():
            # If the block ends by a signal, the limit holds until the process is gone.
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)
            os.close(write)


def _watch(pipe: int, heard: threading.Event, at_last: Callable[[], None]) -> None:
    interrupts = 0
    with suppress(OSError):
        while said := os.read(pipe, 1):
            number = said[0]
            interrupts += number == signal.SIGINT
            if number in SIGNALS or interrupts == 2:
                break
        else:
            os.close(pipe)
            return
        begun = time.monotonic()
        if number not in SIGNALS or heard.wait(HEARD_S):
            time.sleep(max(0.0, begun + LIMIT_S - time.monotonic()))
        # The process ends even if this raises an error.
        with suppress(Exception):
            at_last()
        os._exit(128 + number)
