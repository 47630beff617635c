"""The control schema: indexes, generations, segments, operations, ranges, events, and the view of operations."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    op.create_table(
        "index",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("schema_name", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("source_oid", sa.BigInteger(), nullable=False),
        sa.Column("key_columns", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("included_columns", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("dropped_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("index_pkey")),
        schema="roir",
    )
    op.create_index(
        "index_live_name",
        "index",
        ["schema_name", "name"],
        unique=True,
        schema="roir",
        postgresql_where=sa.text("dropped_at IS NULL"),
    )
    op.create_table(
        "generation",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("index_id", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("capture_mode", sa.Text(), nullable=False),
        sa.Column("mode_xid", sa.Text(), nullable=True),
        sa.Column("entry", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("retired_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("drop_after", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ghosts", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint(
            "capture_mode IN ('capture', 'direct', 'active', 'none')", name=op.f("generation_capture_mode")
        ),
        sa.CheckConstraint("status <> 'active' OR capture_mode = 'active'", name=op.f("generation_active_is_exact")),
        sa.CheckConstraint("status <> 'retired' OR drop_after IS NOT NULL", name=op.f("generation_retired_ends")),
        sa.CheckConstraint("status IN ('building', 'active', 'retired', 'dropped')", name=op.f("generation_status")),
        sa.ForeignKeyConstraint(["index_id"], ["roir.index.id"], name=op.f("generation_index_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("generation_pkey")),
        schema="roir",
    )
    op.create_index(op.f("generation_index_id_idx"), "generation", ["index_id"], unique=False, schema="roir")
    op.create_index(
        "generation_one_active",
        "generation",
        ["index_id"],
        unique=True,
        schema="roir",
        postgresql_where=sa.text("status = 'active'"),
    )
    op.create_index(
        "generation_one_building",
        "generation",
        ["index_id"],
        unique=True,
        schema="roir",
        postgresql_where=sa.text("status = 'building'"),
    )
    op.create_table(
        "operation",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("index_id", sa.BigInteger(), nullable=False),
        sa.Column("generation_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("parallelism", sa.Integer(), nullable=False),
        sa.Column("batch_rows", sa.Integer(), nullable=False),
        sa.Column("max_rows_per_second", sa.Integer(), nullable=True),
        sa.Column("options", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("rows_estimate", sa.BigInteger(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("format_version", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("phase_seconds", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("ticked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("paused_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("pause_reason", sa.Text(), nullable=True),
        sa.Column("paused_by", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("notice", sa.Text(), nullable=True),
        sa.CheckConstraint("(status = 'completed') = (phase = 'done')", name=op.f("operation_completed_is_done")),
        sa.CheckConstraint(
            "(status IN ('completed', 'aborted')) = (finished_at IS NOT NULL)",
            name=op.f("operation_finished"),
        ),
        sa.CheckConstraint("kind IN ('create', 'rebuild')", name=op.f("operation_kind")),
        sa.CheckConstraint("phase IN ('build', 'seal', 'fold', 'publish', 'done')", name=op.f("operation_phase")),
        sa.CheckConstraint(
            "status IN ('running', 'paused', 'completed', 'failed', 'aborting', 'aborted')",
            name=op.f("operation_status"),
        ),
        sa.CheckConstraint("max_rows_per_second > 0", name=op.f("operation_rate")),
        sa.CheckConstraint("parallelism > 0 AND batch_rows > 0", name=op.f("operation_positive")),
        sa.ForeignKeyConstraint(["generation_id"], ["roir.generation.id"], name=op.f("operation_generation_id_fkey")),
        sa.ForeignKeyConstraint(["index_id"], ["roir.index.id"], name=op.f("operation_index_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("operation_pkey")),
        schema="roir",
    )
    op.create_index(
        "operation_one_live",
        "operation",
        ["index_id"],
        unique=True,
        schema="roir",
        postgresql_where=sa.text("status IN ('running', 'paused', 'failed', 'aborting')"),
    )
    op.create_table(
        "segment",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("generation_id", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("lower", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("upper", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("status", sa.Text(), server_default="loading", nullable=False),
        sa.Column("claim_epoch", sa.BigInteger(), nullable=True),
        sa.Column("claim_worker", sa.Integer(), nullable=True),
        sa.Column("claim_token", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("status IN ('loading', 'indexed', 'sealed')", name=op.f("segment_status")),
        sa.ForeignKeyConstraint(["generation_id"], ["roir.generation.id"], name=op.f("segment_generation_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("segment_pkey")),
        sa.UniqueConstraint("generation_id", "ordinal", name=op.f("segment_generation_id_ordinal_key")),
        schema="roir",
    )
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("index_id", sa.BigInteger(), nullable=False),
        sa.Column("operation_id", sa.BigInteger(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["index_id"], ["roir.index.id"], name=op.f("event_index_id_fkey")),
        sa.ForeignKeyConstraint(["operation_id"], ["roir.operation.id"], name=op.f("event_operation_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("event_pkey")),
        schema="roir",
    )
    op.create_index(op.f("event_index_id_idx"), "event", ["index_id"], unique=False, schema="roir")
    op.create_index(op.f("event_operation_id_idx"), "event", ["operation_id"], unique=False, schema="roir")
    op.create_table(
        "scan_range",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("operation_id", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("lower", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("upper", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("watermark", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("done", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("rows", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("batches", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("seconds", sa.Numeric(precision=14, scale=3), server_default="0", nullable=False),
        sa.Column("claim_epoch", sa.BigInteger(), nullable=True),
        sa.Column("claim_worker", sa.Integer(), nullable=True),
        sa.Column("claim_token", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("rows >= 0 AND batches >= 0", name=op.f("scan_range_counts")),
        sa.ForeignKeyConstraint(["operation_id"], ["roir.operation.id"], name=op.f("scan_range_operation_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("scan_range_pkey")),
        sa.UniqueConstraint("operation_id", "ordinal", name=op.f("scan_range_operation_id_ordinal_key")),
        schema="roir",
    )
    for name in ("resumable_operations", "control_functions"):
        # Straight to the driver: a colon or a per cent sign in it is only that.
        op.get_bind().exec_driver_sql((SQL / f"{name}.sql").read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    for function in ("pause", "resume", "abort", "tick", "latest_operation"):
        op.execute(f"DROP FUNCTION roir.{function}")
    op.execute("DROP VIEW roir.resumable_operations")
    op.drop_table("scan_range", schema="roir")
    op.drop_index(op.f("event_operation_id_idx"), table_name="event", schema="roir")
    op.drop_index(op.f("event_index_id_idx"), table_name="event", schema="roir")
    op.drop_table("event", schema="roir")
    op.drop_table("segment", schema="roir")
    op.drop_index(
        "operation_one_live",
        table_name="operation",
        schema="roir",
        postgresql_where=sa.text("status IN ('running', 'paused', 'failed', 'aborting')"),
    )
    op.drop_table("operation", schema="roir")
    op.drop_index(
        "generation_one_building",
        table_name="generation",
        schema="roir",
        postgresql_where=sa.text("status = 'building'"),
    )
    op.drop_index(
        "generation_one_active",
        table_name="generation",
        schema="roir",
        postgresql_where=sa.text("status = 'active'"),
    )
    op.drop_index(op.f("generation_index_id_idx"), table_name="generation", schema="roir")
    op.drop_table("generation", schema="roir")
    op.drop_index("index_live_name", table_name="index", schema="roir", postgresql_where=sa.text("dropped_at IS NULL"))
    op.drop_table("index", schema="roir")
    # Fails where generations are left: drop the indexes first.
    op.execute("DROP SCHEMA roir_data")
