"""Where `roir spark-server` listens, and who talks there: processes of one user, of the same code, on one machine."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import airflow_roir

SOCKET = "ROIR_SPARK_SOCKET"
# What the kernel takes, its end mark left out.
LONGEST_PATH = 107


def socket_path(environment: Mapping[str, str] = os.environ) -> Path:
    """$ROIR_SPARK_SOCKET, else a file in the user's own state."""
    if chosen := environment.get(SOCKET):
        return Path(chosen)
    state = environment.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path("~/.local/state").expanduser()) / "roir"
    # Machines may share a home.
    return folder / f"spark-{socket.gethostname()}.sock"


def fingerprint() -> str:
    """Of the code that this process runs: another version, another environment and an edited file have another one."""
    package = Path(airflow_roir.__file__).parent
    facts = [airflow_roir.__version__, sys.prefix, sys.version, str(package)]
    for path in sorted(package.rglob("*.py")):
        found = path.stat()
        facts.append(f"{path.relative_to(package)} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def is_trusted(connection: socket.socket) -> bool:
    """Whether who is at the other end could read this process's memory anyway: its user, or root."""
    if not hasattr(socket, "SO_PEERCRED"):
        # Then the rights of the socket's folder stand alone.
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return user in (0, os.getuid())
