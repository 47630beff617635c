"""The command `roir`, for users without Airflow and for scripts.

A command imports what it calls of the engine when it runs: `roir --help` needs none of it, `roir status` little.
"""

from __future__ import annotations

import gc
import sys

# Each module adds its commands to the application, in the order of the help text.
from airflow_roir.cli import build, change, dags, operations, partitions, role, status, verify  # noqa: F401
from airflow_roir.cli.app import EXIT_CODES, app, say
from airflow_roir.errors import RoirError

__all__ = ["EXIT_CODES", "app", "main"]


def main() -> None:
    """The entry point: turns the errors of this package and of the database into a line and an exit code."""
    # What an import makes stays: the collector would look through all of it again and again.
    gc.set_threshold(50_000)
    try:
        app()
    except RoirError as error:
        say(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        from sqlalchemy.exc import DBAPIError

        if not isinstance(error, DBAPIError):
            raise
        # The statement and its values stay out of it: only what the server said.
        say(str(error.orig).strip())
        sys.exit(1)
