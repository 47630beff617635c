"""Gates hold an operation in the middle of a phase's transaction, on the server, without a change to the product.

A gate is a trigger on a control table that waits for an advisory lock which the test holds while the gate is shut.
"""

from __future__ import annotations

import time

import psycopg2
import psycopg2.extensions

# Gate: the event on a control table that it holds up, and what has been done in that transaction by then.
GATES = {
    # The capture is installed, the drain lock is held.
    "prepare": ("BEFORE INSERT ON roir.operation", "true"),
    # A batch is copied, but not committed; the first ranges have passed.
    "build": ("BEFORE UPDATE OF watermark ON roir.scan_range", "NEW.ordinal >= 3"),
    # A segment's index is built, but not committed; the default segment has passed.
    "seal": ("BEFORE UPDATE OF status ON roir.segment", "NEW.status = 'indexed' AND NEW.ordinal >= 1"),
    # The capture is in direct mode, the drain lock is held.
    "switch": ("BEFORE INSERT ON roir.event", "NEW.action = 'switch'"),
    # The delta is folded, the phase isn't over.
    "fold": ("BEFORE UPDATE OF phase ON roir.operation", "NEW.phase = 'publish'"),
    # The view shows the new generation, the drain lock is held.
    "publish": ("BEFORE UPDATE ON roir.generation", "NEW.status = 'active' AND OLD.status = 'building'"),
    # A unit of a verification is compared, but not committed; the first ones have passed.
    "compare": ("BEFORE UPDATE OF done ON roir.verification_unit", "NEW.done AND NEW.ordinal >= 3"),
    # Between seal and fold: nothing is inserted into the base but by the build so far, so its work can be counted.
    "sealed": ("BEFORE UPDATE OF phase ON roir.operation", "NEW.phase = 'fold' AND OLD.phase = 'seal'"),
    # The index is published, its asset event isn't sent yet.
    "announce": ("BEFORE INSERT ON roir.event", "NEW.action = 'announce'"),
}
KEYS = {name: number for number, name in enumerate(GATES, start=7_001)}
# Long beside anything that is waited for here, short beside a build host's patience.
PATIENCE_S = 300
WAITING = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class Gate:
    """One gate of one database, shut from its making until `open`. A server that dies opens it too."""

    def __init__(self, dsn: str, name: str) -> None:
        self.key = KEYS[name]
        self.name = name
        self._holder = psycopg2.connect(dsn, application_name="crash gate")
        self._holder.autocommit = True
        self._run("SELECT pg_advisory_lock(%s)", self.key)

    def waiting(self) -> list[int]:
        """The server processes that wait at the gate."""
        return [row[0] for row in self._run(WAITING, self.key)]

    def reached(self, at_least: int = 1) -> list[int]:
        """Waits until at least `at_least` processes wait at the gate; returns their pids."""
        deadline = time.monotonic() + PATIENCE_S
        while len(waiting := self.waiting()) < at_least:
            assert time.monotonic() < deadline, f"nobody came to gate {self.name}"
            time.sleep(0.02)
        return waiting

    def open(self) -> None:
        """Lets all processes pass from now on. Safe to call twice, and on a server that has died."""
        self._holder.close()

    def _run(self, statement: str, *values: int) -> list[tuple[int, ...]]:
        with self._holder.cursor() as cursor:
            cursor.execute(statement, values)
            return cursor.fetchall()


def install(dsn: str) -> None:
    """Puts the gates, all open, into a database that has the control schema."""
    connection = psycopg2.connect(dsn)
    with connection, connection.cursor() as cursor:
        for name, (event, condition) in GATES.items():
            # The wait is the test's, so no lock_timeout of the product's may end it.
            cursor.execute(
                f"CREATE FUNCTION gate_{name}() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$ BEGIN "
                f"PERFORM pg_catalog.pg_advisory_xact_lock_shared({KEYS[name]}); RETURN NEW; END $$"
            )
            cursor.execute(
                f"CREATE TRIGGER gate_{name} {event} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION gate_{name}()"
            )
    connection.close()
