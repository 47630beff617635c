"""The signals that can hold an operation back, and their readings (docs/architecture.md#governor)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_roir.errors import InvalidInput
from airflow_roir.nearest import meant, nearest
from airflow_roir.quantity import duration, size

_NO_SIGNAL = re.compile(r"there is no signal ([a-z_]+); there are [a-z_, ]+")
_LIMIT = re.compile(r"([a-z_]+)=.+")


@dataclass(frozen=True)
class Signal:
    """A signal. unit: bytes, seconds or number. stops: it is a budget, whose limit holds all work. steers: the work
    itself soon changes it, so that less work helps. below: it is over its limit when it is below it. over: the text
    then.
    """

    name: str
    unit: str
    over: str
    stops: bool = False
    steers: bool = False
    below: bool = False
    per: str = ""

    def shown(self, value: float) -> str:
        """A value with its unit: `340 MB`, `20 ms`, `4`."""
        if self.unit == "bytes":
            return f"{size(value)}{self.per}"
        if self.unit == "seconds":
            return f"{value * 1000:.3g} ms" if value < 1 else duration(value)
        return f"{value:.4g}{self.per}"


SIGNALS = {
    signal.name: signal
    for signal in (
        Signal("replica_lag", "bytes", "replica {of} is {value} behind", stops=True, steers=True),
        Signal("replica_delay", "seconds", "replica {of} is {value} behind", stops=True, steers=True),
        Signal("slot_wal", "bytes", "replication slot {of} keeps {value} of WAL", stops=True),
        Signal("slot_room", "bytes", "replication slot {of} has room for {value} of WAL", stops=True, below=True),
        Signal("oldest_transaction", "seconds", "a transaction has been open for {value} ({of})", stops=True),
        Signal("free_space", "bytes", "{value} are free on {of}", stops=True, below=True),
        Signal("shard_lag", "seconds", "shard {of} is {value} behind", stops=True),
        Signal("outbox", "bytes", "the outbox of shard {of} holds {value}", stops=True),
        Signal("query", "number", "the throttle's query says {value}", stops=True),
        Signal("commit_latency", "seconds", "a commit takes {value}", steers=True),
        Signal("active_sessions", "number", "{value} sessions are active", steers=True),
        Signal("lock_waits", "number", "{value} sessions wait for locks", steers=True),
        Signal("wal_rate", "bytes", "the server writes {value} of WAL", steers=True, per="/s"),
        Signal(
            "checkpoints",
            "number",
            "the WAL until the next checkpoint takes {value} of max_wal_size",
            steers=True,
            per=" %",
        ),
    )
}


@dataclass(frozen=True)
class Reading:
    """A reading of a signal. value: None if it couldn't be read; problem: why. of: the replica or shard, if any."""

    signal: Signal
    limit: float
    value: float | None
    of: str = ""
    problem: str = ""

    @property
    def load(self) -> float:
        """The used share of the limit: 1 and more is over. Raises ValueError if the signal couldn't be read."""
        if self.value is None:
            raise ValueError(f"{self.signal.name} has no value")
        if self.signal.below:
            return self.limit / self.value if self.value > 0 else float("inf")
        # A query's limit may be 0: then any greater value is over.
        return self.value / self.limit if self.limit else 1.0 + self.value if self.value > 0 else 0.0

    @property
    def is_over(self) -> bool:
        """True if the reading of a budget forbids all work."""
        return self.value is not None and (self.value < self.limit if self.signal.below else self.value > self.limit)

    def __str__(self) -> str:
        """The reading as text: `replica r2 is 340 MB behind, limit 100 MB`."""
        if self.value is None:
            return f"{self.signal.name} can't be read: {self.problem}"
        said = self.signal.over.format(of=self.of, value=self.signal.shown(self.value))
        return f"{said}, limit {self.signal.shown(self.limit)}"

    def as_dict(self) -> dict[str, Any]:
        """The reading for JSON."""
        return {"limit": self.limit, "value": self.value, "of": self.of or None, "problem": self.problem or None}


def throttle_text(throttle: Mapping[str, Any]) -> str:
    """Limits as a user writes them, '' for none; as `roir.throttle_text`."""
    return " ".join(f"{name}={_limit(name, value)}" for name, value in sorted(throttle.items()))


def _limit(name: str, value: Any) -> str:
    if name == "replicas":
        return ",".join(value)
    unit = SIGNALS[name].unit if name in SIGNALS else "number"
    if unit == "bytes":
        for step, letter in ((1 << 40, "TB"), (1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB")):
            if value % step == 0:
                return f"{value // step}{letter}"
        return f"{value}B"
    if unit == "seconds":
        return f"{value * 1000:g}ms" if value < 1 else f"{value:g}s"
    return f"{value:g}"


def check_limits(text: str) -> None:
    """Looks at limits without a server, which reads their values.

    Raises InvalidInput for what is no limit of a signal.
    """
    for item in re.split(r"[\s;]+", text):
        found = _LIMIT.fullmatch(item)
        if item in ("", "off"):
            continue
        if found is None:
            raise InvalidInput(
                f"{item} is no limit; write name=value, for example: replica_lag=100MB commit_latency=20ms"
            )
        if found[1] not in (*SIGNALS, "replicas"):
            refusal = f"there is no signal {found[1]}; there are {', '.join(SIGNALS)}, and replicas"
            raise InvalidInput(with_nearest_signals(refusal))


def with_nearest_signals(refusal: str) -> str:
    """A refusal, also of the server, with the signal that the user probably meant after each list of signals."""
    return _NO_SIGNAL.sub(lambda found: f"{found[0]}{meant(nearest(found[1], SIGNALS))}", refusal)
