"""An entry state is a type: a CHECK of the delta's column was evaluated by each captured write."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    # Deltas that are there already keep their text and its CHECK.
    op.execute((SQL / "entry_state.sql").read_text())


def downgrade() -> None:
    op.execute("DROP TYPE roir.entry_state")
