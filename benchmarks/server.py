"""The server that is measured on: the same settings for every side, PostgreSQL's defaults but for two."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from servers.killable import Server
from servers.postgres import programs

SHOWN = (
    "server_version",
    "shared_buffers",
    "max_wal_size",
    "wal_level",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "maintenance_work_mem",
    "work_mem",
    "autovacuum",
)


class BenchServer(Server):
    """A server on the loopback interface, which JDBC and pg_repack need, that may lose its power: fsync is on."""

    def __init__(self, folder: Path, version: int, shared_buffers: str, settings: str = "") -> None:
        self.programs = programs(version)
        # Checkpoints come between the sides that are timed, not whenever 1 GB of WAL is full.
        settings = f"fsync = on\nshared_buffers = {shared_buffers}\nmax_wal_size = 8GB\n{settings}"
        super().__init__(folder, version, settings=settings)


@contextmanager
def bench_server(version: int, shared_buffers: str, settings: str = "") -> Iterator[BenchServer]:
    """A fresh server in a temporary folder, with an empty database `bench`. settings: more lines for its file."""
    with tempfile.TemporaryDirectory(prefix="roir-bench-") as folder:
        server = BenchServer(Path(folder), version, shared_buffers, settings)
        server.start()
        try:
            server.execute("CREATE DATABASE bench")
            yield server
        finally:
            server.close()


def facts(cursor: Any) -> dict[str, Any]:
    """The machine, the server and its settings, and when."""
    cursor.execute("SELECT name, current_setting(name) FROM unnest(%s) name", (list(SHOWN),))
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": {
            "cores": os.cpu_count(),
            "memory_gb": round(pages * size / 2**30, 1),
            "processor": _processor(),
            "system": platform.system() + " " + platform.machine(),
            "load_at_start": round(os.getloadavg()[0], 2),
        },
        "python": platform.python_version(),
        "settings": dict(cursor.fetchall()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def described(known: dict[str, Any]) -> str:
    """Facts in one line."""
    machine, settings = known["machine"], known["settings"]
    return (
        f"PostgreSQL {settings['server_version'].split()[0]}, {machine['cores']} cores, {machine['memory_gb']:g} GB, "
        f"{machine['processor']}; shared_buffers {settings['shared_buffers']}, max_wal_size "
        f"{settings['max_wal_size']}, wal_level {settings['wal_level']}, synchronous_commit "
        f"{settings['synchronous_commit']}, fsync {settings['fsync']}; {known['date']}"
    )
