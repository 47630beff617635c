"""The control schema knows its own oids: a restored database, an upgraded one and a replaced source differ."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

SQL = Path(__file__).parents[1] / "sql"

# What older code would have told: a restored database; and one that pg_upgrade made, by links that all are others.
MOVED_BEFORE = """
SELECT EXISTS (SELECT FROM roir.restored_sources()) AS restored,
       count(*) > 0 AND bool_and(p.link IS DISTINCT FROM t.link) AS upgraded
  FROM roir.source_partition p
  JOIN roir.generation g ON g.id = p.generation_id AND g.status IN ('building', 'active', 'retired')
  JOIN roir.index i ON i.id = g.index_id AND i.dropped_at IS NULL
 CROSS JOIN LATERAL roir.partition_tree(i.source_oid::oid) t
 WHERE p.status = 'present' AND t.relation = p.relation::oid
"""


def upgrade() -> None:
    op.create_table(
        "home",
        sa.Column("id", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("tables", JSONB(), nullable=False),
        sa.Column("schema_oid", sa.BigInteger(), nullable=False),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.CheckConstraint("id = 1", name="home_one"),
        schema="roir",
    )
    moved = op.get_bind().execute(sa.text(MOVED_BEFORE)).one()
    op.get_bind().exec_driver_sql((SQL / "home.sql").read_text(), execution_options={"no_parameters": True})
    op.execute("SELECT roir.settle()")
    if moved.restored:
        op.execute("""UPDATE roir.home SET tables = '{"index": 0}'""")
    elif moved.upgraded:
        op.execute("UPDATE roir.home SET schema_oid = 0")


def downgrade() -> None:
    for function in (
        "adopt_upgraded()",
        "upgraded_sources()",
        "link_again(oid)",
        "replaced_sources()",
        "settle()",
    ):
        op.execute(f"DROP FUNCTION roir.{function}")
    # As it was before: the rest of restore.sql is called by names that haven't changed.
    text = (SQL / "restore.sql").read_text().replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
    op.get_bind().exec_driver_sql(text, execution_options={"no_parameters": True})
    op.execute("DROP FUNCTION roir.sources_by_trigger()")
    op.execute("DROP FUNCTION roir.moved()")
    op.drop_table("home", schema="roir")
