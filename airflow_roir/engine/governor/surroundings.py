"""Settings of a run that no table keeps: DSNs of replicas, which are secrets, and the user's own query, which is code.

So a role that may change an operation's row can set limits, but can't run code as the role that builds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_roir.errors import InvalidInput

REPLICAS = "ROIR_REPLICAS"
QUERY = "ROIR_THROTTLE_QUERY"


@dataclass(frozen=True)
class Surroundings:
    """replicas: DSNs by the names that `replicas=` uses. query: returns a boolean, or a number: higher is worse."""

    replicas: Mapping[str, str] = field(default_factory=dict)
    query: str | None = None

    @classmethod
    def of_environment(cls) -> Surroundings:
        """From ROIR_REPLICAS, an object of names and DSNs in JSON, and ROIR_THROTTLE_QUERY. Raises InvalidInput."""
        try:
            replicas = json.loads(os.environ.get(REPLICAS) or "{}")
        except ValueError:
            replicas = None
        if not isinstance(replicas, dict) or not all(isinstance(dsn, str) for dsn in replicas.values()):
            # The error doesn't quote the text, which may contain passwords.
            raise InvalidInput(f'{REPLICAS} must be JSON as {{"r2": "host=… dbname=…"}}, names of replicas with DSNs')
        return cls(replicas, os.environ.get(QUERY) or None)

    def as_environment(self) -> dict[str, str]:
        """The variables for the environment of a driver's process."""
        found = {REPLICAS: json.dumps(dict(self.replicas))} if self.replicas else {}
        return found | ({QUERY: self.query} if self.query else {})
