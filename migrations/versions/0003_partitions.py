"""Partitioned sources: which partitions a generation holds, and ranges that name the leaf they scan."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    op.create_table(
        "source_partition",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("generation_id", sa.BigInteger(), nullable=False),
        sa.Column("relation", sa.BigInteger(), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=False),
        sa.Column("leaf", sa.Boolean(), nullable=False),
        sa.Column("link", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("condition", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("watermark", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint("status IN ('present', 'leaving', 'joining')", name=op.f("source_partition_status")),
        sa.ForeignKeyConstraint(
            ["generation_id"], ["roir.generation.id"], name=op.f("source_partition_generation_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("source_partition_pkey")),
        schema="roir",
    )
    op.create_index(
        "source_partition_one",
        "source_partition",
        ["generation_id", "relation"],
        unique=True,
        schema="roir",
        postgresql_where=sa.text("status <> 'leaving'"),
    )
    op.create_index("source_partition_relation", "source_partition", ["relation"], unique=False, schema="roir")
    op.add_column("scan_range", sa.Column("relation", sa.BigInteger(), nullable=True), schema="roir")
    # Operations of the version before scan the source as a whole.
    op.execute(
        "UPDATE roir.scan_range r SET relation = i.source_oid FROM roir.operation o JOIN roir.index i "
        "ON i.id = o.index_id WHERE o.id = r.operation_id"
    )
    op.alter_column("scan_range", "relation", nullable=False, schema="roir")
    # Straight to the driver: a colon or a per cent sign in it is only that.
    op.get_bind().exec_driver_sql((SQL / "partitions.sql").read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    for function in (
        "forget_partition",
        "entry_condition",
        "adopt_partitions",
        "watch_truncate",
        "register_partitions",
        "partition_tree",
    ):
        op.execute(f"DROP FUNCTION roir.{function}")
    op.drop_column("scan_range", "relation", schema="roir")
    op.drop_index("source_partition_relation", table_name="source_partition", schema="roir")
    op.drop_index(
        "source_partition_one",
        table_name="source_partition",
        schema="roir",
        postgresql_where=sa.text("status <> 'leaving'"),
    )
    op.drop_table("source_partition", schema="roir")
