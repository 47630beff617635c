"""Repeats a call in a thread while a block runs: a run's heartbeat, a command's progress bar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(work: Callable[[], object], every_s: float, name: str, patience_s: float | None = None) -> Iterator[None]:
    """Call `work` every `every_s` seconds until the block ends, which waits for a call that is under way.

    name: the thread's. patience_s: the longest wait for that call; by default as long as it takes. An error of `work`
    ends the thread, not the block.
    """
    stop = threading.Event()

    def go_on() -> None:
        while not stop.wait(every_s):
            work()

    thread = threading.Thread(target=go_on, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(patience_s)
