"""How long a change takes from a shard's commit to the index server, under writes at a steady rate."""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.apart import Apart, connect, emails
from benchmarks.apart_index import INDEX, roir
from benchmarks.quantile import quantile
from benchmarks.writers import pgbench

# The pace at which an application looks that waits for its own write.
LOOK_EVERY_S = 0.005
# At random: a probe that follows the last one would always fall into the same moment of the shipper's rest.
PROBE_EVERY_S = (0.05, 0.35)
PATIENCE_S = 60.0
WARM_UP_S = 3.0
PGBENCH = ("-n", "-M", "prepared", "-c", "4", "-T", "36000", "-P", "1")

# A row of this shard gets another e-mail, so an entry goes and another one comes.
WRITE = """
\\set place random(0, {last})
\\set n random(0, {emails})
UPDATE orders SET email = 'user' || :n || '@example.org' WHERE id = :place * {step} + {first};
"""


@contextmanager
def shipping(scene: Apart, every_s: float = 1.0) -> Iterator[subprocess.Popen[bytes]]:
    """`roir ship` beside the block."""
    process = roir(scene, "ship", "--every", f"{every_s * 1000:.0f}ms")
    try:
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"roir ship has ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


@contextmanager
def writing(scene: Apart, version: int, per_second: int, told: dict[str, float]) -> Iterator[None]:
    """Writes at this rate over all shards during the block; afterwards `told` has the real rate as
    `written_per_second`."""
    program, share = pgbench(version), per_second / len(scene.dsns)
    with tempfile.TemporaryDirectory(prefix="roir-load-") as folder, ExitStack() as stack:
        loads = []
        for number, dsn in enumerate(scene.dsns.values()):
            script = Path(folder) / f"{number}.sql"
            last = scene.rows // len(scene.dsns) - 1
            script.write_text(
                WRITE.format(last=last, emails=emails(scene.rows) - 1, step=len(scene.dsns), first=number + 1)
            )
            load = stack.enter_context(
                subprocess.Popen(
                    [program, *PGBENCH, "-R", f"{share:g}", "-f", script, dsn],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            loads.append(load)
            stack.callback(load.kill)
        yield
        rate = 0.0
        for load in loads:
            if load.poll() is not None:
                raise RuntimeError(f"pgbench has ended with {load.returncode}")
            load.kill()
            _, said = load.communicate()
            seconds = [float(found) for found in re.findall(r"^progress: .*?, ([0-9.]+) tps", said, re.MULTILINE)]
            rate += sum(seconds[1:]) / max(len(seconds) - 1, 1)
        told["written_per_second"] = round(rate)


def measure(scene: Apart, version: int, per_second: int, every_s: float, seconds: float) -> dict[str, Any]:
    """Milliseconds from a commit in a shard until a lookup on the index server finds it."""
    told: dict[str, float] = {}
    with shipping(scene, every_s), writing(scene, version, per_second, told):
        time.sleep(WARM_UP_S)
        lags = _probe(scene, seconds)
    return {
        "every_s": every_s,
        "wanted_per_second": per_second,
        **told,
        "probes": len(lags),
        "p50_ms": round(quantile(lags, 0.5) * 1000, 1),
        "p99_ms": round(quantile(lags, 0.99) * 1000, 1),
        "max_ms": round(max(lags) * 1000, 1),
    }


def _probe(scene: Apart, seconds: float) -> list[float]:
    """The lags of rows that only the probe writes, one shard after the other."""
    shards, index = [connect(dsn) for dsn in scene.dsns.values()], connect(scene.index)
    lags: list[float] = []
    chance = random.Random(7)
    begun = time.monotonic()
    number = time.time_ns()
    while time.monotonic() < begun + seconds:
        number += 1
        with shards[len(lags) % len(shards)].cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s, %s, now())", (number, f"probe{number}"))
        committed = time.perf_counter()
        with index.cursor() as cursor:
            while True:
                cursor.execute(f"SELECT 1 FROM {INDEX} WHERE email = %s", (f"probe{number}",))
                if cursor.fetchone():
                    break
                if time.perf_counter() > committed + PATIENCE_S:
                    raise TimeoutError(f"nothing was shipped within {PATIENCE_S:g} s")
                time.sleep(LOOK_EVERY_S)
        lags.append(time.perf_counter() - committed)
        time.sleep(chance.uniform(*PROBE_EVERY_S))
    for session in (*shards, index):
        session.close()
    return lags
