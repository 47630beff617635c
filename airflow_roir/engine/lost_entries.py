"""Schema roir_data was dropped: with it went the entries of all indexes, their views, and what captured the writes.

`roir init` makes the schema again, and the control tables say that those indexes are gone.
"""

from __future__ import annotations

import shlex

from sqlalchemy import Connection

from airflow_roir.definition import argument, quote
from airflow_roir.engine import abort, operations, remove_generations
from airflow_roir.engine.database import execute
from airflow_roir.operation import Status

INDEXES = """
SELECT i.id, i.schema_name, i.name, i.key_columns, i.included_columns, i.is_unique, i.nulls_not_distinct, i.shard_table,
       s.oid::regclass::text AS source
  FROM roir.index i LEFT JOIN pg_class s ON s.oid = i.source_oid::oid WHERE i.dropped_at IS NULL ORDER BY 2, 3
"""
UNFINISHED = "SELECT * FROM roir.operation WHERE index_id = %(index)s AND status = ANY (%(live)s)"


def give_up(connection: Connection, actor: str) -> list[str]:
    """Abort and drop in the control tables what was in the schema, which is there again, and empty.

    Returns a line for each index, with the command that builds it again. An index over shards is released by the next
    clean-up.
    """
    execute(connection, "GRANT USAGE ON SCHEMA roir_data TO PUBLIC")
    lines = []
    for index in execute(connection, INDEXES).all():
        name = str(operations.index_name(index))
        asked = {"index": index.id, "live": [status.value for status in operations.LIVE]}
        for row in execute(connection, UNFINISHED, asked).all():
            if row.status != Status.ABORTING:
                execute(connection, "SELECT roir.abort(%(index)s, 'schema roir_data was dropped', %(actor)s)",
                        {"index": name, "actor": actor})  # fmt: skip
            abort.conclude(connection, row, actor)
        remove_generations.retire_for_good(connection, remove_generations.generations_of(connection, index.id))
        operations.record_event(connection, index.id, None, actor, "drop", "schema roir_data was dropped")
        again = "its table was dropped, too"
        if index.source is not None:
            options = ["--table", index.source, "--keys", ",".join(map(quote, index.key_columns))]
            if index.included_columns:
                options += ["--include", ",".join(map(quote, index.included_columns))]
            options += ["--unique"] * index.is_unique + ["--nulls-not-distinct"] * index.nulls_not_distinct
            again = f"build it again: roir build {argument(name)} {shlex.join(options)}"
        if index.shard_table is None:
            remove_generations.forget_index(connection, index.id)
        else:
            again = "run roir clean-up, which releases its shards; then build it again"
        lines.append(f"index {name} was dropped with schema roir_data; {again}")
    return lines
