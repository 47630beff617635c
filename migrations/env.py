"""Alembic's environment: runs on the connection that `airflow_roir.engine.schema` hands over."""

from __future__ import annotations

from alembic import context

from airflow_roir.engine.schema import VERSION_TABLE
from airflow_roir.engine.tables import SCHEMA, metadata

connection = context.config.attributes["connection"]
connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
context.configure(
    connection=connection,
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    version_table_schema=SCHEMA,
    include_schemas=True,
    transaction_per_migration=False,
)
context.run_migrations()
