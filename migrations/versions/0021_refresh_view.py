"""An index's view is what shows its entries, whatever its name is; another view of that name isn't replaced."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    _run((SQL / "refresh_view.sql").read_text())
    # What is made anew has lost its settings; the others have theirs.
    pins = (SQL / "session_settings.sql").read_text()
    _run(pins.replace("AND p.prokind = 'f'", "AND p.prokind = 'f' AND p.proname = 'refresh_view'"))


def downgrade() -> None:
    """Nothing: code of the version before calls the same function."""


def _run(sql: str) -> None:
    # Straight to the driver: a colon or a per cent sign in it is only that.
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
