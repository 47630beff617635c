"""Poolers between a client and the server: PgBouncer where it is installed, and a small one of our own everywhere."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
SETTINGS = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = {mode}
default_pool_size = {size}
server_round_robin = {in_turn}
query_wait_timeout = 5
logfile = {log}
"""


class PgBouncer:
    """A PgBouncer of its own. mode: session, transaction or statement."""

    def __init__(self, folder: Path, server: int, mode: str, size: int, in_turn: bool = False) -> None:
        assert PGBOUNCER is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        folder.chmod(0o777)
        users, settings, log = (folder / name for name in ("users", "pgbouncer.ini", "log"))
        users.write_text('"postgres" ""\n')
        settings.write_text(
            SETTINGS.format(
                server=server, port=self.port, users=users, mode=mode, size=size, in_turn=int(in_turn), log=log
            )
        )
        # It refuses to run as root.
        user = {"user": "nobody"} if os.getuid() == 0 else {}
        self._process = subprocess.Popen(
            [PGBOUNCER, "-q", settings], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **user
        )
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            assert time.monotonic() < deadline, f"PgBouncer doesn't come up: {log.read_text() if log.exists() else ''}"
            time.sleep(0.02)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


class SmallPool:
    """A pooler of a hundred lines for clients that send simple queries. mode: session or transaction.

    in_turn: clients get the sessions in turn, instead of the one that was used last. As poolers do, it gives clients
    another number than the server's. It leaves settings in the sessions, and a client that finds no session waits for
    ever.
    """

    def __init__(self, server: int, mode: str, size: int, in_turn: bool = False) -> None:
        self._server, self._keeps, self._size, self._in_turn = server, mode == "session", size, in_turn
        self._free: deque[_Session] = deque()
        self._all: list[_Session] = []
        self._clients: list[socket.socket] = []
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends it, and all that it connects."""
        for end in (self._listener, *self._clients, *(one.line for one in self._all)):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        session: _Session | None = None
        with client, suppress(OSError, EOFError):
            startup = _startup(client)
            session = self._take(startup)
            number = 2_000_000_000 + len(self._clients)
            client.sendall(session.greeting + _message(b"K", struct.pack("!ii", number, 1)) + _message(b"Z", b"I"))
            try:
                if not self._keeps:
                    session = self._give(session)
                while (asked := _read(client))[:1] != b"X":
                    session = session or self._take(startup)
                    session.line.sendall(asked)
                    while (answer := _read(session.line))[:1] != b"Z":
                        client.sendall(answer)
                    if not self._keeps and answer[5:] == b"I":
                        session = self._give(session)
                    client.sendall(answer)
            finally:
                if session is not None:
                    session.line.sendall(_message(b"Q", b"ROLLBACK\0") + _message(b"Q", b"DISCARD ALL\0"))
                    for _ in range(2):
                        while _read(session.line)[:1] != b"Z":
                            pass
                    self._give(session)

    def _take(self, startup: bytes) -> _Session:
        me = object()
        with self._changed:
            self._queue.append(me)
            while self._queue[0] is not me or (not self._free and len(self._all) == self._size):
                self._changed.wait()
            self._queue.popleft()
            self._changed.notify_all()
            if len(self._all) < self._size and (self._in_turn or not self._free):
                self._all.append(_Session(self._server, startup))
                return self._all[-1]
            return self._free.popleft() if self._in_turn else self._free.pop()

    def _give(self, session: _Session) -> None:
        with self._changed:
            self._free.append(session)
            self._changed.notify_all()


class _Session:
    """One in the server. greeting: what it said at its start, without its number."""

    def __init__(self, server: int, startup: bytes) -> None:
        self.line = socket.create_connection(("127.0.0.1", server))
        self.line.sendall(startup)
        self.greeting = b""
        while (said := _read(self.line))[:1] != b"Z":
            assert said[:1] != b"E", said
            if said[:1] != b"K":
                self.greeting += said


def _startup(client: socket.socket) -> bytes:
    """The client's first message, after those that ask for encryption, which there is none of."""
    while True:
        (length,) = struct.unpack("!i", head := _exactly(client, 4))
        body = _exactly(client, length - 4)
        match struct.unpack("!i", body[:4])[0]:
            case 80877103 | 80877104:
                client.sendall(b"N")
            case 80877102:
                # To cancel a statement takes a number that the server knows.
                raise EOFError
            case _:
                return head + body


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _read(line: socket.socket) -> bytes:
    head = _exactly(line, 5)
    return head + _exactly(line, struct.unpack("!i", head[1:])[0] - 4)


def _exactly(line: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        more = line.recv(length - len(found))
        if not more:
            raise EOFError
        found += more
    return found
