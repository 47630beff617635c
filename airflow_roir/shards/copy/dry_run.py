"""Runs a build over shards dry: its findings, and the locks that the build will take there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import Row

from airflow_roir.definition import IndexDefinition, QualifiedName, Scan
from airflow_roir.engine import dry_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast import locks
from airflow_roir.engine.forecast.locks import ACCESS_EXCLUSIVE, Lock
from airflow_roir.engine.generation import entry_size
from airflow_roir.engine.scan.choosing import Choice
from airflow_roir.engine.scan.findings import Also, DryRun
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.options import BuildOptions
from airflow_roir.shards.copy import survey as surveys
from airflow_roir.shards.shard import SHARD_PATIENCE_S


def run(
    database: Database,
    existing: Row[Any] | None,
    definition: IndexDefinition,
    options: BuildOptions,
    report: Callable[[str], None],
    also: Also,
) -> DryRun:
    """As `engine.dry_run.run`. A shape table, which is rolled back, gets a sample of all shards."""
    survey, _ = surveys.survey(database, definition, options, report)
    index = QualifiedName(definition.name.schema or survey.table.schema, definition.name.name)
    definition = replace(definition, name=index, source=survey.table, shard_column=survey.shard_column)
    with database.transaction() as connection:
        if existing is None:
            dry_run.check_name_is_free(connection, index)
        with surveys.sampled_shape(connection, database, survey, definition, options) as (shape, entry):
            if existing is not None:
                dry_run.check_shape(connection, existing, shape)
            found = surveys.whole_plan(connection, survey, shape, definition, options)
            entry = replace(entry, partition=found.partition)
            size = entry_size.measure(connection, index, shape, entry)
            choice = Choice(Scan.KEY, "shards are read by key")
            kind = "rebuild" if existing else "create"
            index_id = existing.id if existing else None
            dry = DryRun(index, shape, definition, entry, found, choice, kind, size, index_id, survey)
            also(connection, dry)
        if existing is not None:
            shape = catalog.read_source_by_oid(connection, existing.source_oid)
            surveys.check_shape(shape, survey, definition)
    return replace(dry, source=shape)


def foresee(source: Source, view: QualifiedName, kind: str, options: BuildOptions, limits: Limits) -> list[Lock]:
    """The locks of a build over shards. source: the table of one of them."""
    found = []
    for lock in locks.foresee(source, view, kind, options, limits):
        there = replace(lock, on=f"{lock.on} in each shard")
        match lock.of, lock.phase:
            case "view", _:
                found.append(lock)
            case _, "plan" | "build" | "verify":
                found.append(there)
            case _, "prepare":
                found.append(replace(there, patience_s=min(lock.patience_s, SHARD_PATIENCE_S)))
            case _, "clean-up":
                # The former capture has triggers of its own, which are dropped.
                held = "for a short transaction, which drops the former capture"
                found.append(replace(there, mode=ACCESS_EXCLUSIVE, held=held, holds_up="readers and writers"))
    return found
