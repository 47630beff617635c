"""The control schema of the first release: its tables, its view of operations, and its functions, by topic."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"

# Each needs the ones before it: the server checks the body of an SQL function when it is created.
TOPICS = (
    "tables",
    "live_options",
    "trees",
    "verification",
    "compaction",
    "arrows",
    "progress",
    "governor",
    "status",
    "operations",
    "rights",
    "entries",
    "capture",
    "references",
    "on_conflict",
    "owners",
    "partitions",
    "view",
    "reading",
    "look_up",
    "rows_view",
    "shard_lag",
    "apart_reading",
    "announcing",
    "detach",
    "attach",
    "home",
    "marks",
    "shape",
    "fingerprint",
    "statements",
    "guard",
    "restore",
    "session_settings",
    "comments",
)

FUNCTIONS = """
SELECT string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc p WHERE p.pronamespace = 'roir'::regnamespace
"""
TABLES = """
SELECT string_agg(c.oid::regclass::text, ', ') FROM pg_class c
 WHERE c.relnamespace = 'roir'::regnamespace AND c.relkind = 'r' AND c.relname <> 'schema_version'
"""


def upgrade() -> None:
    for topic in TOPICS:
        # Straight to the driver, for which a colon or a per cent sign is nothing special.
        text = (SQL / f"{topic}.sql").read_text()
        op.get_bind().exec_driver_sql(text, execution_options={"no_parameters": True})


def downgrade() -> None:
    # Fails if generations are left: drop the indexes first.
    op.execute("DROP SCHEMA roir_data")
    op.execute("SELECT roir.unguard()")
    op.execute("DROP VIEW roir.resumable_operations, roir.shown_operation, roir.shard_lag")
    # With the triggers of the tables.
    op.execute("DROP FUNCTION roir.refuse_arrow(), roir.refuse_change(), roir.take_sample() CASCADE")
    # CASCADE: the remaining functions depend on no view but this one, and this view on one of the functions.
    op.execute("DROP VIEW roir.operation_work CASCADE")
    op.execute("DROP VIEW roir.verification_work")
    for kind, names in (("FUNCTION", FUNCTIONS), ("TABLE", TABLES)):
        op.execute(f"DROP {kind} {op.get_bind().exec_driver_sql(names).scalar_one()}")
    op.execute("DROP TYPE roir.entry_state")
