"""Findings that no index lookup explains; a replica identity for every table of entries."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0014"
down_revision = "0012"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    _run((SQL / "damage.sql").read_text())
    _run((SQL / "replica_identity.sql").read_text())


def downgrade() -> None:
    # The tables' replica identity stays: code of the version before doesn't mind it.
    _run("DELETE FROM roir.discrepancy WHERE kind = 'damaged'")
    _run("DELETE FROM roir.verification_unit WHERE stage = 'whole' OR side IN ('both', 'reach')")
    _run(
        "ALTER TABLE roir.discrepancy DROP CONSTRAINT discrepancy_kind, DROP COLUMN detail, "
        "ADD CONSTRAINT discrepancy_kind CHECK (kind IN ('missing', 'extra', 'different', 'corrupt'))"
    )
    _run(
        "ALTER TABLE roir.verification_unit DROP CONSTRAINT verification_unit_stage, "
        "DROP CONSTRAINT verification_unit_side, "
        "ADD CONSTRAINT verification_unit_stage CHECK (stage IN ('total', 'sum', 'check')), "
        "ADD CONSTRAINT verification_unit_side CHECK (side IN ('source', 'heap', 'entry', 'delta', 'tree'))"
    )
    _run("ALTER TABLE roir.verification DROP COLUMN damaged")


def _run(sql: str) -> None:
    # Straight to the driver: a colon or a per cent sign in it is only that.
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
