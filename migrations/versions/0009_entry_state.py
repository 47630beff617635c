"""An entry state is a type: a CHECK of the delta's column was evaluated by each captured write."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Deltas that are there already keep their text and their CHECK.
    op.execute("CREATE TYPE roir.entry_state AS ENUM ('regular', 'antimatter', 'ghost')")


def downgrade() -> None:
    op.execute("DROP TYPE roir.entry_state")
