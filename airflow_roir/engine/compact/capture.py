"""The capture of a unit: triggers on its segments list the entries that any session touches.

The list has identities alone. The segment itself has the current entry, in the snapshot that reads the list. So neither
the order nor the content of the writes matters, as with an outbox (docs/architecture.md#compaction). Writers only
append to the list, which has no index: no writer ever waits there for another one, or for us.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.engine.capture.plpgsql import function
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.schema import rights

TRIGGER = "roir_touch"


def install(connection: Connection, claim: UnitClaim, entry: Entry, segments: Sequence[str]) -> None:
    """Captures the writes to these segments from now on. The caller has locked them against writers."""
    identity = entry.identity_positions
    columns = ", ".join(entry.physical(identity))
    execute(
        connection,
        f"CREATE TABLE {claim.touched} ({entry.definitions_of(identity)}) WITH (autovacuum_enabled = false)",
    )
    execute(connection, f"ALTER TABLE {claim.touched} REPLICA IDENTITY FULL")

    def note(record: str) -> str:
        values = ", ".join(entry.physical(identity, prefix=f"{record}."))
        return f"INSERT INTO {claim.touched} ({columns}) VALUES ({values});"

    old, new = (f"ROW({', '.join(entry.physical(identity, prefix=f'{r}.'))})::record" for r in ("OLD", "NEW"))
    body = "\n".join(
        [
            "BEGIN",
            "  IF TG_OP <> 'INSERT' THEN",
            f"    {note('OLD')}",
            f"    IF TG_OP = 'DELETE' OR {old} *= {new} THEN",
            "      RETURN NULL;",
            "    END IF;",
            "  END IF;",
            f"  {note('NEW')}",
            "  RETURN NULL;",
            "END",
        ]
    )
    execute(connection, function(claim.touch, body))
    rights.take_back(connection, [claim.touched], [f"{claim.touch}()"])
    for segment in segments:
        execute(
            connection,
            f"CREATE TRIGGER {TRIGGER} AFTER INSERT OR UPDATE OR DELETE ON {segment} "
            f"FOR EACH ROW EXECUTE FUNCTION {claim.touch}()",
        )
        # ALWAYS, so that the trigger fires for logical replication, too.
        execute(connection, f"ALTER TABLE {segment} ENABLE ALWAYS TRIGGER {TRIGGER}")
