"""What entries depend on in their source's definition is kept; fingerprints hold no name and no oid that changes."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    op.add_column(
        "generation",
        sa.Column("shape", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        schema="roir",
    )
    for file in ("shape", "ddl"):
        _run((SQL / f"{file}.sql").read_text())


# Fingerprints of the version before can't be taken by this one.
UNFINISHED = "SELECT count(*) FROM roir.operation WHERE status IN ('running', 'paused')"


def downgrade() -> None:
    if op.get_bind().execute(sa.text(UNFINISHED)).scalar():
        raise RuntimeError("an operation is unfinished: finish it, or abort it, before the downgrade")
    _run("SELECT roir.unguard()")
    for function in (
        "guard()",
        "refuse_ddl()",
        "refuse_concurrent_detach()",
        "ddl_problem(oid[])",
        "adopt_partitions(bigint, oid, oid[], boolean)",
        "fingerprint(oid, text[])",
        "stamp(oid)",
        "is_own_ddl()",
        "relation_in_path(text, text, name)",
        "outer_role()",
        "detached_in_two(text)",
        "plain_identifier(text, text)",
        "first_tokens(text, integer)",
        "build_faults(oid)",
        "table_faults(bigint)",
        "view_faults(bigint)",
        "shape_changes(bigint)",
        "keep_shape(bigint)",
        "entry_columns(jsonb)",
        "source_shape(oid, text[])",
        "type_tree(oid)",
    ):
        _run(f"DROP FUNCTION roir.{function}")
    op.drop_column("generation", "shape", schema="roir")
    _before("fingerprint", "fingerprint")
    _before("partitions", "adopt_partitions")
    for function in ("ddl_problem", "refuse_ddl", "refuse_concurrent_detach", "guard"):
        _before("guard", function)


def _before(file: str, function: str) -> None:
    """Create a function as the version before has it."""
    text = (SQL / f"{file}.sql").read_text()
    parts = text.replace("CREATE OR REPLACE", "CREATE").split("CREATE FUNCTION ")
    (made,) = [part for part in parts if part.startswith(f"roir.{function}(")]
    _run(f"CREATE FUNCTION {made}")


def _run(sql: str) -> None:
    # Straight to the driver: a colon or a per cent sign in it is only that.
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
