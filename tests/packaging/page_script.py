"""Runs what a page of the docs says, as one shell script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from servers.postgres import programs


def run_script(script: str, folder: Path, environment: dict[str, str], timeout: float, *options: str) -> str:
    """The output of a script that is run in a folder with our `roir` and the server's `psql`; it must end well.

    environment: beside that of the tests. timeout: seconds. options: of bash.
    """
    path = f"{Path(sys.executable).parent}:{programs(18)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", *options, "-c", script],
        env={**os.environ, "PATH": path, **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
