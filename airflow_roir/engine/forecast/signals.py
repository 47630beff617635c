"""The signals that could hold a build back on this server: their present values, or why they can't be read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from airflow_roir.engine.database import Database
from airflow_roir.engine.governor.readings import SignalReader
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.signals import Reading

# Limits for signals that one look can read, without rates, which take several.
LOOKED_AT = {
    "replica_lag": 100 << 20,
    "replica_delay": 30.0,
    "slot_room": 1 << 30,
    "oldest_transaction": 3_600.0,
    "active_sessions": 16.0,
    "lock_waits": 4.0,
}
# Sensible on every server that others use.
COMMIT_MS = 20
# The time of one commit, which changes nothing: a message without a reader.
PROBED = {"commit_latency": COMMIT_MS / 1000}
OF_REPLICAS = "replica_lag=100MB"
OF_SLOTS = "slot_room=1GB"


@dataclass(frozen=True)
class Signals:
    """readings: the present values. sensible: a throttle to begin with."""

    readings: tuple[Reading, ...]
    sensible: str

    def line(self) -> str:
        """One line for the user."""
        parts = [f"{self.sensible} is something to begin with"]
        seen = [f"{_named(one)} {one.signal.shown(one.value)}" for one in self.readings if one.value is not None]
        parts += [f"now {', '.join(seen)}"] if seen else []
        parts += [f"{_named(one)} can't be read: {one.problem}" for one in self.readings if one.value is None]
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sensible_throttle": self.sensible,
            "signals": [
                {"signal": one.signal.name, "of": one.of, "value": one.value, "problem": one.problem or None}
                for one in self.readings
            ],
        }


def look(database: Database, surroundings: Surroundings) -> Signals:
    """Reads each signal once, in transactions of its own. Doesn't run a query that the user gave."""
    reader = SignalReader(database, Surroundings(surroundings.replicas))
    try:
        with database.connect() as connection:
            readings = tuple(reader.read(connection, LOOKED_AT))
            # On a standby, for example, nothing commits.
            readings += tuple(one for one in reader.read(connection, PROBED) if one.value is not None)
    finally:
        reader.close()
    names = {one.signal.name for one in readings}
    commit = next((one.value for one in readings if one.signal.name == "commit_latency"), None)
    wanted = [f"commit_latency={commit_limit(commit)}ms"]
    wanted += [OF_REPLICAS] if "replica_lag" in names else []
    wanted += [OF_SLOTS] if any(one.signal.name == "slot_room" and one.value is not None for one in readings) else []
    return Signals(readings, " ".join(wanted))


def commit_limit(seconds: float | None) -> int:
    """A limit of the time of a commit, in ms, that isn't passed already. seconds: of a commit now, if it is known."""
    twice = 2000 * (seconds or 0.0)
    step = 10 if twice < 100 else 50
    return max(COMMIT_MS, step * math.ceil(twice / step))


def _named(one: Reading) -> str:
    return f"{one.signal.name} of {one.of}" if one.of else one.signal.name
