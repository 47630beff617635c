"""A row that a savepoint wrote is ours however late in a transaction the savepoint began."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

SQL = Path(__file__).parent.parent / "sql"


def upgrade() -> None:
    for name in ("is_mine", "session_settings"):
        text = (SQL / f"{name}.sql").read_text()
        op.get_bind().exec_driver_sql(text, execution_options={"no_parameters": True})


def downgrade() -> None:
    text = (SQL / "is_mine.sql").read_text()
    before = text[text.index("CREATE OR REPLACE") :].replace("roir.is_in_progress(x.id::text::xid8)", "false")
    op.get_bind().exec_driver_sql(before, execution_options={"no_parameters": True})
    op.execute("DROP FUNCTION roir.is_in_progress(xid8)")
