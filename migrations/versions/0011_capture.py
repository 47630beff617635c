"""The capture runs as the source's owner and reads by a view of the generation; TRUNCATE has a function of its own."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"


def upgrade() -> None:
    op.get_bind().exec_driver_sql((SQL / "capture.sql").read_text(), execution_options={"no_parameters": True})


# Older code doesn't know the functions that a TRUNCATE is told by.
IN_USE = "SELECT count(*) FROM roir.generation WHERE status <> 'dropped'"


def downgrade() -> None:
    if op.get_bind().execute(sa.text(IN_USE)).scalar():
        raise RuntimeError("indexes of this version can't be kept by the one before: drop them before the downgrade")
    for file in ("partitions", "fingerprint", "restore", "detach"):
        older = (SQL / f"{file}.sql").read_text().replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
        op.get_bind().exec_driver_sql(older, execution_options={"no_parameters": True})
    for function in ("forget_leaf", "may_truncate", "is_in_mode", "captures"):
        op.execute(f"DROP FUNCTION roir.{function}")
    op.execute("REVOKE USAGE ON SCHEMA roir, roir_data FROM PUBLIC")
