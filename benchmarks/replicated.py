"""A server and its streaming standby, which is reached over a link of limited bandwidth."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2

from benchmarks.server import BenchServer
from benchmarks.slow_link import slow_link

# As the standby calls itself to the primary.
REPLICA = "replica"
# A checkpoint makes the next change of every page longer in the log. It would come in one of the sides, not in all.
NO_CHECKPOINT = "checkpoint_timeout = 1h\n"
STANDBY = """
port = {port}
listen_addresses = ''
unix_socket_directories = '{folder}'
wal_receiver_status_interval = 1
primary_slot_name = '{slot}'
primary_conninfo = 'host=127.0.0.1 port={upstream} user=postgres application_name={slot}'
"""


class Primary(BenchServer):
    """A server that others can follow."""

    def __init__(self, folder: Path, version: int, shared_buffers: str, settings: str = "") -> None:
        super().__init__(folder, version, shared_buffers)
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.write(NO_CHECKPOINT + settings)

    @contextmanager
    def standby(self, bytes_per_s: int) -> Iterator[str]:
        """The DSN of a hot standby (database bench), a copy of what there is now; what comes later has the link."""
        with (
            tempfile.TemporaryDirectory(prefix="roir-standby-") as name,
            slow_link(self.port, bytes_per_s) as upstream,
        ):
            folder = Path(name)
            folder.chmod(0o777)
            data = folder / "data"
            self._as_server(
                self._bin / "pg_basebackup", "-D", data, "-R", "-c", "fast", "-C", "-S", REPLICA, "-d", self.dsn()
            )
            with (data / "postgresql.conf").open("a") as configuration:
                configuration.write(STANDBY.format(port=self.port, folder=folder, upstream=upstream, slot=REPLICA))
            # The backup has written the way around the link there.
            (data / "postgresql.auto.conf").write_text("")
            control = (self._bin / "pg_ctl", "-D", data, "-l", data / "log")
            self._as_server(*control, "start", "-w")
            try:
                yield f"host={folder} port={self.port} user=postgres dbname=bench"
            finally:
                self._as_server(*control, "stop", "-m", "immediate")

    def _as_server(self, *command: str | Path) -> None:
        # No pipes: a server would inherit them.
        quiet = subprocess.DEVNULL
        subprocess.run(command, user=self._user, cwd="/", check=True, stdin=quiet, stdout=quiet, stderr=quiet)


def caught_up(primary: str, standby: str, patience_s: float) -> float:
    """Waits until the standby has replayed what the primary has written by now; returns the seconds that it took."""
    begun = time.monotonic()
    with psycopg2.connect(primary) as session, session.cursor() as cursor:
        cursor.execute("SELECT pg_current_wal_lsn()")
        (position,) = cursor.fetchone() or (None,)
    there = psycopg2.connect(standby)
    there.autocommit = True
    with there.cursor() as cursor:
        while True:
            cursor.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (position,))
            if (cursor.fetchone() or (False,))[0]:
                break
            if time.monotonic() - begun > patience_s:
                raise TimeoutError(f"the standby hasn't caught up within {patience_s:g} s")
            time.sleep(0.1)
    there.close()
    return time.monotonic() - begun
