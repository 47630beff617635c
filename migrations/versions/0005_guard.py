"""The guard against DDL that no capture sees: event triggers, where a superuser installs them."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    op.get_bind().exec_driver_sql((SQL / "guard.sql").read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    op.execute("SELECT roir.unguard()")
    for function in (
        "guard",
        "unguard",
        "refuse_ddl",
        "refuse_drop",
        "refuse_concurrent_detach",
        "detached_concurrently",
        "ddl_problem",
        "detach_problem",
        "is_mine",
        "partition_changes",
        "fingerprint",
    ):
        op.execute(f"DROP FUNCTION roir.{function}")
