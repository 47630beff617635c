"""An application at a steady pace: pgbench at a rate, and the latency of every transaction by the second."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.quantile import quantile

Seconds = dict[int, list[float]]


class PacedLoad:
    """pgbench's simple updates (`-N`) on a database that has its tables. clients: its sessions."""

    def __init__(self, program: Path, dsn: str, clients: int) -> None:
        self.dsn = dsn
        self._command = [program, "-n", "-N", "-M", "prepared", "-c", str(clients), "-j", "1"]

    def capacity(self, seconds: int) -> float:
        """Transactions per second at full speed."""
        said = subprocess.run(
            [*self._command, "-T", str(seconds), self.dsn], check=True, capture_output=True, text=True
        ).stdout
        found = re.search(r"^tps = ([0-9.]+)", said, re.MULTILINE)
        assert found is not None, said
        return float(found[1])

    @contextmanager
    def running(self, rate: float) -> Iterator[PacedLog]:
        """Runs the load at `rate` transactions per second, for as long as the block lasts."""
        with tempfile.TemporaryDirectory(prefix="roir-load-") as folder:
            process = subprocess.Popen(
                [*self._command, "-R", f"{rate:.1f}", "-T", "36000", "-l", "--log-prefix", f"{folder}/log", self.dsn],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                yield PacedLog(Path(folder))
                if process.poll() is not None:
                    raise RuntimeError(f"pgbench has ended with {process.returncode}")
            finally:
                process.kill()
                process.wait()


class PacedLog:
    """pgbench's log so far. pgbench writes when its buffer is full, so the last second may lack some transactions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def by_second(self) -> Seconds:
        """Milliseconds of the transactions that ended in each second of the epoch.

        From the moment at which a transaction was due: one that waits for a free session has begun.
        """
        found: Seconds = defaultdict(list)
        for log in self._folder.glob("log*"):
            # Client, number, microseconds, script, when it ended, …
            for line in log.read_text().splitlines()[:-1]:
                fields = line.split()
                if fields[2].isdigit():
                    found[int(fields[4])].append(int(fields[2]) / 1000)
        return found


def over(seconds: Seconds, begin: float, end: float) -> dict[str, float]:
    """Figures of the whole seconds between two moments: transactions per second, median and p99 in milliseconds."""
    taken = [one for second, ones in seconds.items() if begin <= second and second + 1 <= end for one in ones]
    whole = sum(1 for second in seconds if begin <= second and second + 1 <= end)
    if not taken:
        return {}
    return {
        "tps": round(len(taken) / whole, 1),
        "p50_ms": round(quantile(taken, 0.5), 2),
        "p99_ms": round(quantile(taken, 0.99), 2),
    }
