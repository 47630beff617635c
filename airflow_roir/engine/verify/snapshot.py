"""A snapshot that the workers of a verification share for a while, also between processes.

Sums of both sides in one snapshot differ only if something is wrong, even under writers. One worker holds the snapshot,
in a session of its own, for at most a minute (I7); the next worker that needs one then takes a new one. Sums from
several snapshots only make more rows suspicious.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

# Half of the time after which the server ends an idle transaction of ours.
LONGEST_S = 30.0

FIND = """
SELECT snapshot, snapshot IS NOT NULL AND clock_timestamp() < snapshot_at + make_interval(secs => %(longest)s) AS fresh
  FROM roir.verification WHERE id = %(id)s
"""
OFFER = """
UPDATE roir.verification SET snapshot = %(snapshot)s, snapshot_at = clock_timestamp()
 WHERE id = %(id)s AND snapshot IS NOT DISTINCT FROM %(old)s
"""


class SharedSnapshot:
    """One worker's access to the shared snapshot."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._holding: Connection | None = None
        self._until = 0.0

    def share(self, verification_id: int, gone: str | None = None) -> str:
        """The name of the snapshot to import: another worker's, or one that this worker holds from now on.

        gone: the name of a snapshot that couldn't be imported. The returned one can vanish before its import, too.
        """
        if self._holding is not None and time.monotonic() > self._until:
            self.close()
        while True:
            with self.connection.begin():
                row = execute(self.connection, FIND, {"id": verification_id, "longest": LONGEST_S}).one()
            if row.fresh and row.snapshot != gone:
                return str(row.snapshot)
            self.close()
            holding = self.connection.engine.connect().execution_options(isolation_level="REPEATABLE READ")
            name = str(execute(holding, "SELECT pg_export_snapshot()").scalar_one())
            self._holding, self._until = holding, time.monotonic() + LONGEST_S
            with self.connection.begin():
                values = {"id": verification_id, "old": row.snapshot, "snapshot": name}
                if execute(self.connection, OFFER, values).rowcount:
                    return name
            # Another worker was faster.

    def close(self) -> None:
        """Ends the snapshot, if this worker holds it."""
        if self._holding is not None:
            self._holding.close()
            self._holding = None
