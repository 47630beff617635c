"""What was gone or altered for a while, and looks as before, is told by its marks."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    # What a downgrade has left is there still.
    _run((SQL / "marks.sql").read_text().replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    # What is made anew has lost its settings.
    _run((SQL / "session_settings.sql").read_text())
    # Asked in each batch, in sessions of ours, of oids.
    for function in ("trusts(oid)", "standing(oid, oid[], text[], text)"):
        _run(f"ALTER FUNCTION roir.{function} RESET ALL")
        _run(f"ALTER FUNCTION roir.{function} SET search_path = pg_catalog, pg_temp")


def downgrade() -> None:
    _run("UPDATE roir.generation SET shape = shape - 'marks' - 'looked' WHERE shape ? 'marks'")
    for function in ("mark_changes(bigint)", "keep_marks(bigint, text[])", "follow_marks(bigint)", "marks(bigint)"):
        _run(f"DROP FUNCTION roir.{function}")
    _before("shape", "keep_shape")
    _before("shape", "shape_changes")
    _before("home", "adopt_upgraded")


def _before(file: str, function: str) -> None:
    """Make a function as the version before has it."""
    text = (SQL / f"{file}.sql").read_text()
    (made,) = (part for part in text.split("CREATE FUNCTION ") if part.startswith(f"roir.{function}("))
    _run(f"CREATE OR REPLACE FUNCTION {made}")


def _run(sql: str) -> None:
    # Straight to the driver: a colon or a per cent sign in it is only that.
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
