"""A database that was restored from a dump has other oids; and the primary key's index may be rebuilt."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    for file in ("restore.sql", "fingerprint.sql"):
        op.get_bind().exec_driver_sql((SQL / file).read_text(), execution_options={"no_parameters": True})


def downgrade() -> None:
    for function in ("adopt_restored", "refuse_restored", "restored_sources"):
        op.execute(f"DROP FUNCTION roir.{function}")
