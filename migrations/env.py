"""Alembic's environment: runs on the connection that `airflow_roir.engine.schema.schema` hands over."""

from __future__ import annotations

from alembic import context

from airflow_roir.definition import DATA_SCHEMA, SCHEMA
from airflow_roir.engine.schema.schema import VERSION_TABLE

connection = context.config.attributes["connection"]
# Not IF NOT EXISTS, which asks for the right to create even where there is nothing to create.
for schema in (SCHEMA, DATA_SCHEMA):
    if connection.exec_driver_sql(f"SELECT to_regnamespace('{schema}')").scalar() is None:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
context.configure(
    connection=connection,
    version_table=VERSION_TABLE,
    version_table_schema=SCHEMA,
    include_schemas=True,
    transaction_per_migration=False,
)
context.run_migrations()
