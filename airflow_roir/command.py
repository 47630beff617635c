"""Starts the command `roir`: a Ctrl-C during its imports ends it silently, as any program."""

from __future__ import annotations

import signal


def main() -> None:
    """Imports the command line and runs it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from airflow_roir.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()
