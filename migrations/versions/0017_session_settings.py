"""Functions that users call in sessions of their own don't depend on what those have set."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0017"
down_revision = "0015"
branch_labels = None
depends_on = None

SQL = Path(__file__).parent.parent / "sql" / "session_settings.sql"


def upgrade() -> None:
    op.get_bind().exec_driver_sql(SQL.read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    """Nothing: under fixed settings older code does as before."""
