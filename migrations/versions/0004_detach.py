"""Partitions that leave a source or join it, with their entries."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    op.get_bind().exec_driver_sql((SQL / "detach.sql").read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    # Fails where a view still hides entries: run roir clean-up, or drop the index, first.
    for function in ("detach_partition", "forget_gone", "refresh_view", "is_shown", "has_row"):
        op.execute(f"DROP FUNCTION roir.{function}")
