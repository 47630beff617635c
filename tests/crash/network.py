"""A network that can fail: a TCP proxy between a worker and the server."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards connections to a server until a test interferes.

    stall: nothing is forwarded in either direction any more, not even the end of a connection, until `heal`; so
    neither side can know. cut: connections end with a reset, and new ones are refused.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        self._closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Forward nothing from now on."""
        self._flowing.clear()

    def heal(self) -> None:
        """Forward again, what was held back too; accept again."""
        self._refusing = False
        self._flowing.set()

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._refusing = True
        for pair in self._pairs:
            for end in pair:
                reset(end)
        self._pairs.clear()

    def close(self) -> None:
        """Ends the proxy, and all connections with it."""
        self._closed = True
        self.cut()
        self._flowing.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                reset(client)
                continue
            try:
                upstream = self._upstream()
            except OSError:
                reset(client)
                continue
            self._pairs.append((client, upstream))
            threading.Thread(target=self._forward, args=(client, upstream), daemon=True).start()

    def _upstream(self) -> socket.socket:
        return socket.create_connection(self._target)

    def _forward(self, client: socket.socket, upstream: socket.socket) -> None:
        other = {client: upstream, upstream: client}
        with suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            for end in other:
                selector.register(end, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select(timeout=1.0):
                    self._flowing.wait()
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    data = source.recv(65_536)
                    if not data:
                        return self._end(client, upstream)
                    # Data that arrived while the network was stalled is held back, and delivered when it is healed.
                    self._flowing.wait()
                    other[source].sendall(data)
        return self._end(client, upstream)

    @staticmethod
    def _end(*ends: socket.socket) -> None:
        for end in ends:
            end.close()


def reset(end: socket.socket) -> None:
    """Ends a connection by a reset, so that the other side notices at once."""
    with suppress(OSError):
        # Lingering for no time means a reset instead of an orderly end.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        end.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        end.close()
