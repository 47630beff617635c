"""The product, as `benchmarks.shards` uses it: shards are added, an index over them is made, commands are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from airflow_roir.definition import IndexDefinition
from airflow_roir.shards.announce.announce import announce
from benchmarks.apart import INCLUDE, KEY, Apart
from benchmarks.engine import build_index
from benchmarks.sides import UNVERIFIED

INDEX = "public.orders_by_email"
ROIR = Path(sys.executable).parent / "roir"


def roir(scene: Apart, *arguments: str) -> subprocess.Popen[bytes]:
    """A command, as a user starts it."""
    return subprocess.Popen([ROIR, *arguments], env={**os.environ, "ROIR_DSN": scene.index}, stdout=subprocess.DEVNULL)


def add_shards(scene: Apart) -> None:
    """The index server learns of all shards, and they of it."""
    for name, dsn in scene.dsns.items():
        if code := roir(scene, "shard", "add", name, "--dsn", dsn, "--index-dsn", scene.index).wait():
            raise RuntimeError(f"roir shard add has ended with {code}")


def definition(scene: Apart, index: str = INDEX, shards: Sequence[str] | None = None) -> IndexDefinition:
    """An index by e-mail over shards, by default all."""
    return IndexDefinition.parse(index, "orders", KEY, INCLUDE, shards=list(shards or scene.dsns))


def make_index(
    scene: Apart, index: str = INDEX, shards: Sequence[str] | None = None, announced_by: str | None = None
) -> None:
    """Builds the index, and lets the shards' server or the client announce writes, or neither."""
    build_index(scene.database, definition(scene, index, shards), parallelism=2, **UNVERIFIED)
    if announced_by is not None:
        announce(scene.database, index, announced_by)
