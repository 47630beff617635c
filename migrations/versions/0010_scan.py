"""Scans by blocks, of the source or of the index that is rebuilt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("scan_range", sa.Column("filenode", sa.BigInteger()), schema="roir")
    op.add_column("generation", sa.Column("scan", sa.Text(), nullable=False, server_default="key"), schema="roir")
    emptied = sa.Column("emptied", sa.Boolean(), nullable=False, server_default=sa.text("false"))
    op.add_column("generation", emptied, schema="roir")
    op.create_check_constraint("scan", "generation", "scan IN ('key', 'block', 'index')", schema="roir")


def downgrade() -> None:
    op.drop_column("generation", "emptied", schema="roir")
    op.drop_column("generation", "scan", schema="roir")
    op.drop_column("scan_range", "filenode", schema="roir")
