"""The guard of an index's view: readers whose snapshot is older than the publish are refused."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    op.get_bind().exec_driver_sql((SQL / "published.sql").read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    # Fails where a view is still guarded: run roir clean-up, or drop the index, first.
    op.execute("DROP FUNCTION roir.published(bigint)")
