"""Ways to remember the hashes of keys for the early detection of duplicates: filters of two libraries, or the hashes.

make bench-filters
make bench-filters ARGS="--keys 100000 --rounds 1"    # a quick look

Each side takes `--keys` random hashes, and is asked for as many others. Processor time of one thread, the least of some
rounds. `one by one` is the library's own way, a call per key; `in bulk` is one call for all: pyfusefilter's C functions
fill a filter from an array, and numpy probes its fingerprints. Sorted hashes are merged with the hashes that are asked
for.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyfusefilter
from pyfusefilter._xorfilter import ffi, lib
from rbloom import Bloom

from airflow_roir.engine.early.key_sets import Hashes, join

RESULTS = Path(__file__).parent / "results" / "filters.json"
# Into a processor's cache with what is computed of them.
CHUNK = 16_384
# As many as it takes to be sure of the time; a call per key is slow.
ONE_BY_ONE = 100_000


def seconds(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The least of some rounds, and what came out."""
    least, result = float("inf"), None
    for _ in range(rounds):
        begun = time.process_time()
        result = work()
        least = min(least, time.process_time() - begun)
    return least, result


class FuseInBulk:
    """A binary fuse filter of 8 or 16 bits, filled by the library's C function, probed by numpy."""

    def __init__(self, bits: int, keys: Hashes) -> None:
        name = f"binary_fuse{bits}"
        self._filter = ffi.gc(ffi.new(f"{name}_t *"), getattr(lib, f"{name}_free"))
        if not getattr(lib, f"{name}_allocate")(len(keys), self._filter):
            raise MemoryError
        values = ffi.cast("uint64_t *", ffi.from_buffer(keys))
        if not getattr(lib, f"{name}_populate")(values, len(keys), self._filter):
            raise ValueError("not filled")
        one = self._filter
        kind = {8: np.uint8, 16: np.uint16}[bits]
        self.fingerprints = np.frombuffer(ffi.buffer(one.Fingerprints, one.ArrayLength * bits // 8), dtype=kind)
        self._seed, self._mask = np.uint64(one.Seed), np.uint64(one.SegmentLengthMask)
        self._length, self._total = np.uint64(one.SegmentLength), np.uint64(one.SegmentCountLength)

    def probe(self, keys: Hashes) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The keys that it seems to have, as truths."""
        return np.concatenate([self._probe(keys[at : at + CHUNK]) for at in range(0, len(keys), CHUNK)])

    def _probe(self, keys: Hashes) -> np.ndarray[Any, np.dtype[np.bool_]]:
        half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
        with np.errstate(over="ignore"):
            h = keys + self._seed
            for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
                h ^= h >> np.uint64(33)
                h *= np.uint64(factor)
            h ^= h >> np.uint64(33)
            first = ((h >> half) * self._total + (((h & low) * self._total) >> half)) >> half
        second = (first + self._length) ^ ((h >> np.uint64(18)) & self._mask)
        third = (first + self._length + self._length) ^ (h & self._mask)
        found = self.fingerprints
        print_of = (h ^ (h >> half)).astype(found.dtype)
        return (
            found[first.astype(np.int64)] ^ found[second.astype(np.int64)] ^ found[third.astype(np.int64)]
        ) == print_of


def fuse_by_api(bits: int, keys: list[int], others: list[int], rounds: int) -> dict[str, float]:
    """As the library is documented: it hashes the text of each key."""
    kind = {8: pyfusefilter.Fuse8, 16: pyfusefilter.Fuse16}[bits]
    build, made = seconds(lambda: kind(keys), rounds)
    some = others[:ONE_BY_ONE]
    probe, hits = seconds(lambda: sum(map(made.contains, some)), rounds)
    return {
        "bytes": made.size_in_bytes() / len(keys),
        "build": build / len(keys),
        "one": probe / len(some),
        "false": hits / len(some),
    }


def fuse_in_bulk(bits: int, keys: Hashes, others: Hashes, rounds: int) -> dict[str, float]:
    build, made = seconds(lambda: FuseInBulk(bits, keys), rounds)
    assert made.probe(keys).all()
    probe, hits = seconds(lambda: int(made.probe(others).sum()), rounds)
    return {
        "bytes": made.fingerprints.nbytes / len(keys),
        "build": build / len(keys),
        "bulk": probe / len(others),
        "false": hits / len(others),
    }


def bloom(share: float, keys: list[int], others: list[int], rounds: int) -> dict[str, float]:
    def fill() -> Bloom:
        made = Bloom(len(keys), share)
        made.update(keys)
        return made

    build, made = seconds(fill, rounds)
    probe, hits = seconds(lambda: sum(map(made.__contains__, others)), rounds)
    return {
        "bytes": made.size_in_bits / 8 / len(keys),
        "build": build / len(keys),
        "one": probe / len(others),
        "false": hits / len(others),
    }


def hashes(keys: Hashes, others: Hashes, rounds: int) -> dict[str, float]:
    build, made = seconds(lambda: np.sort(keys), rounds)
    probe, (_, again) = seconds(lambda: join(made, others), rounds)
    return {
        "bytes": made.nbytes / len(keys),
        "build": build / len(keys),
        "bulk": probe / len(others),
        "false": len(again) / len(others),
    }


def measure(count: int, rounds: int) -> dict[str, dict[str, float]]:
    """All sides, with `count` keys."""
    chance = np.random.default_rng(count)
    keys, others = (chance.integers(0, 2**64, count, dtype=np.uint64) for _ in range(2))
    listed, asked = keys.tolist(), others.tolist()
    return {
        "pyfusefilter Fuse8": fuse_by_api(8, listed, asked, rounds),
        "pyfusefilter Fuse16": fuse_by_api(16, listed, asked, rounds),
        "pyfusefilter Fuse8, arrays": fuse_in_bulk(8, keys, others, rounds),
        "pyfusefilter Fuse16, arrays": fuse_in_bulk(16, keys, others, rounds),
        "rbloom at 0.4 %": bloom(1 / 256, listed, asked, rounds),
        "rbloom at 0.0015 %": bloom(1 / 65_536, listed, asked, rounds),
        "sorted hashes": hashes(keys, others, rounds),
    }


def table(found: dict[int, dict[str, dict[str, float]]]) -> str:
    """Markdown."""
    lines = ["| keys | of | bytes a key | build | probe one by one | in bulk | false positives |", "| --- " * 7 + "|"]
    for count, sides in found.items():
        for name, of in sides.items():
            times = [f"{of[what] * 1e9:,.0f} ns" if what in of else "" for what in ("build", "one", "bulk")]
            false = f"{of['false'] * 100:.2g} %" if of["false"] else "none"
            lines.append(f"| {count:,} | {name} | {of['bytes']:.2f} | {' | '.join(times)} | {false} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    found = {count: measure(count, chosen.rounds) for count in chosen.keys}
    known = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    RESULTS.write_text(json.dumps({**known, "sides": found}, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
