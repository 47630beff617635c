"""A loaded table that becomes a partition, shown by the indexes in the moment of its attach."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    op.get_bind().exec_driver_sql((SQL / "attach.sql").read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    for function in ("cancel_attach", "finish_attach", "begin_attach", "release_table", "refuse_write"):
        op.execute(f"DROP FUNCTION roir.{function}")
