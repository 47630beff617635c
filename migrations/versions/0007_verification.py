"""Verifications: operations of their own, with their units, results and discrepancies."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    _run((SQL / "verification.sql").read_text())


def downgrade() -> None:
    for table in ("discrepancy", "verification_unit", "verification"):
        # Before the view, which looks at two of them.
        if table == "verification_unit":
            _run("DROP VIEW roir.resumable_operations")
            _run((SQL / "resumable_operations.sql").read_text())
        op.drop_table(table, schema="roir")
    # The version before knows no such operations.
    _run("DELETE FROM roir.event WHERE operation_id IN (SELECT id FROM roir.operation WHERE kind = 'verify')")
    _run("DELETE FROM roir.operation WHERE kind = 'verify'")
    _run("ALTER TABLE roir.operation DROP CONSTRAINT operation_kind, DROP CONSTRAINT operation_phase")
    _run(
        "ALTER TABLE roir.operation ADD CONSTRAINT operation_kind CHECK (kind IN ('create', 'rebuild')), "
        "ADD CONSTRAINT operation_phase CHECK (phase IN ('build', 'seal', 'fold', 'publish', 'done'))"
    )


def _run(sql: str) -> None:
    # Straight to the driver: a colon or a per cent sign in it is only that.
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
