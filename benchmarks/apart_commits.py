"""The cost of an index apart for a writer's commit: no index, an outbox, announced by the server or by the client."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from sqlalchemy import create_engine, text

from airflow_roir.announcing import announce
from benchmarks.apart import Apart, email, emails
from benchmarks.quantile import quantile

WARM_UP = 50
UPDATE = text("UPDATE orders SET email = :email WHERE id = :id")
# The shard that each way's table is in. An index apart is over the last three.
WAYS = {
    "no index": "s0",
    "eventual, bounded": "s1",
    "strict, announced by the server": "s2",
    "strict, announced by the client": "s3",
}


class Writer:
    """A session that changes the key of one row in each transaction."""

    def __init__(self, scene: Apart, way: str, seed: int) -> None:
        self._scene, self._chance = scene, random.Random(seed)
        shard = WAYS[way]
        self._place, self._step = list(scene.dsns).index(shard), len(scene.dsns)
        self._session = create_engine(scene.dsns[shard]).connect()
        self._index = create_engine(scene.index).connect() if "client" in way else None

    def transact(self) -> float:
        """The milliseconds of one, as its application feels it."""
        row = self._chance.randrange(self._scene.rows // self._step) * self._step + self._place + 1
        value = email(self._chance.randrange(emails(self._scene.rows)))
        begun = time.perf_counter()
        self._session.execute(UPDATE, {"email": value, "id": row})
        if self._index is not None:
            announce(self._session, self._index)
        self._session.commit()
        return (time.perf_counter() - begun) * 1000

    def close(self) -> None:
        """Ends the sessions."""
        self._session.close()
        if self._index is not None:
            self._index.close()


def measure(scene: Apart, rounds: int, commits: int) -> list[dict[str, Any]]:
    """Milliseconds of a transaction with one UPDATE, in turns of `commits` commits each; ratios are within a round."""
    writers = {way: Writer(scene, way, number) for number, way in enumerate(WAYS)}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    medians: dict[str, list[float]] = {way: [] for way in WAYS}
    for writer in writers.values():
        for _ in range(WARM_UP):
            writer.transact()
    for number in range(rounds):
        for way in random.Random(number).sample(list(WAYS), len(WAYS)):
            ms = [writers[way].transact() for _ in range(commits)]
            taken[way] += ms
            medians[way].append(statistics.median(ms))
    for writer in writers.values():
        writer.close()
    none = medians["no index"]
    return [
        {
            "way": way,
            "p50_ms": round(quantile(taken[way], 0.5), 3),
            "p99_ms": round(quantile(taken[way], 0.99), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(medians[way], none, strict=True)), 2),
            "added_ms": round(statistics.median(a - b for a, b in zip(medians[way], none, strict=True)), 3),
        }
        for way in WAYS
    ]
