"""A network of limited bandwidth, as to a replica far away: a TCP proxy in a process of its own.

`python -m benchmarks.slow_link PORT BYTES_PER_SECOND` prints the port that it listens on. It slows down the data that
the server at PORT sends, and not the data of its clients.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# The seconds of data that are sent at once: a link gives no bursts of a second, and a thread can't sleep for
# microseconds.
SLICE_S = 0.02
# Else the kernel takes megabytes at once, and the server believes them sent.
BUFFER = 256 << 10


@contextmanager
def slow_link(port: int, bytes_per_s: int) -> Iterator[int]:
    """The port of a link to the server at `port` of this machine."""
    link = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.slow_link", str(port), str(bytes_per_s)], stdout=subprocess.PIPE, text=True
    )
    assert link.stdout is not None
    try:
        yield int(link.stdout.readline())
    finally:
        link.kill()
        link.wait()


def _forward(source: socket.socket, sink: socket.socket, bytes_per_s: float | None) -> None:
    due = time.monotonic()
    piece = max(1024, int(bytes_per_s * SLICE_S)) if bytes_per_s else BUFFER
    with suppress(OSError):
        while data := source.recv(piece):
            if bytes_per_s:
                # Bandwidth that wasn't used is gone: a link doesn't save it up.
                due = max(due, time.monotonic() - SLICE_S) + len(data) / bytes_per_s
                time.sleep(max(0.0, due - time.monotonic()))
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Forward until killed."""
    port, bytes_per_s = int(sys.argv[1]), float(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.socket()
        for end in (client, server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        server.connect(("127.0.0.1", port))
        threading.Thread(target=_forward, args=(client, server, None), daemon=True).start()
        threading.Thread(target=_forward, args=(server, client, bytes_per_s), daemon=True).start()


if __name__ == "__main__":
    main()
