"""The objections to a build that can be found in a database without a control schema, before `roir init`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine import dry_run
from airflow_roir.engine.forecast import worth
from airflow_roir.engine.forecast.worth import Worth
from airflow_roir.engine.source import catalog, checks, replication
from airflow_roir.errors import NotFound, RoirError
from airflow_roir.options import BuildOptions

Check = Callable[[Callable[[], Any]], Any]


def look(
    connection: Connection,
    definition: IndexDefinition,
    options: BuildOptions,
    check: Check,
    add: Callable[[RoirError], None],
) -> Worth | None:
    """Runs the checks that need no control schema, and says whether the index will pay, if that can be known.

    check: calls a check, and notes the error that it raises; add: notes an error.
    """
    check(lambda: dry_run.check_options(definition, options, None))
    name = definition.source
    if name is None:
        add(NotFound(f"there is no index {definition.name} to rebuild; to create it, give the table and key columns"))
        return None
    source = None
    if definition.shards:
        check(lambda: replication.check_publications(connection, options.ignore_publications))
    else:
        source, problems = check(lambda: catalog.look(connection, name, alone=True)) or (None, [])
        for problem in problems:
            add(problem)
    found = None
    if source is not None:
        for one in dry_run.of_table(connection, source, options, definition.unique):
            check(one)
        for one in checks.of_definition(connection, source, definition, exists=False, alone=True):
            check(one)
        if definition.key and all(column in source.columns for column in definition.columns):
            found = worth.of_source(connection, source, definition)
    schema = definition.name.schema or (source.name.schema if source is not None else name.schema)
    if schema is not None:
        check(lambda: dry_run.check_name_is_free(connection, QualifiedName(schema, definition.name.name)))
    return found
