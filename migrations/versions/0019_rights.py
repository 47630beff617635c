"""Statements of ours that alter others' tables run none of their code."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    # What a downgrade has left is there still.
    _run((SQL / "rights.sql").read_text().replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    # What is made anew has lost its settings.
    _run((SQL / "session_settings.sql").read_text())
    # Asked in each batch, in sessions of ours, of oids.
    for function in ("trusts(oid)", "standing(oid, oid[], text[], text)"):
        _run(f"ALTER FUNCTION roir.{function} RESET ALL")
        _run(f"ALTER FUNCTION roir.{function} SET search_path = pg_catalog, pg_temp")


def downgrade() -> None:
    """Nothing: code of the version before calls the same functions, which refuse more."""


def _run(sql: str) -> None:
    # Straight to the driver: a colon or a per cent sign in it is only that.
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
