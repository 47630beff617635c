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
    op.create_check_constraint("scan", "generation", "scan IN ('key', 'block', 'index')", schema="roir")
    op.create_table(
        "emptied",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), primary_key=True),
        sa.Column("generation_id", sa.BigInteger(), nullable=False),
        sa.Column("relation", sa.BigInteger(), nullable=False),
        schema="roir",
    )
    op.create_index("emptied_relation", "emptied", ["generation_id", "relation"], schema="roir")


# Older code would take their blocks for keys, and their capture functions write to a table that is gone.
UNFINISHED = "SELECT count(*) FROM roir.generation WHERE scan <> 'key' AND status = 'building'"


def downgrade() -> None:
    if op.get_bind().execute(sa.text(UNFINISHED)).scalar():
        raise RuntimeError(
            "an operation that scans by blocks is unfinished: finish it, or abort it, before the downgrade"
        )
    op.drop_table("emptied", schema="roir")
    op.drop_column("generation", "scan", schema="roir")
    op.drop_column("scan_range", "filenode", schema="roir")
