"""Prepare over shards: feeds on the index server first, then capture in each shard (docs/architecture-shards.md)."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition, quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.stored_definition import stored_definition
from airflow_roir.engine.database import Database, execute, to_json
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.retry.trouble import reason_of, trouble_of
from airflow_roir.engine.scan.findings import DryRun
from airflow_roir.engine.source import catalog
from airflow_roir.errors import LockNotAcquired
from airflow_roir.options import BuildOptions
from airflow_roir.shards import home
from airflow_roir.shards.announce import announce, intents
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.copy import shape_table
from airflow_roir.shards.copy.survey import Survey
from airflow_roir.shards.shard import SHARD_PATIENCE_S, SHARD_SCHEMA, Feed, feeds_of, set_away, set_reached
from airflow_roir.shards.ship.feeds import held
from airflow_roir.shards.unique import holders

EVIDENCE = f"SELECT {SHARD_SCHEMA}.evidence(%(name)s)"
DUE = """
SELECT l.captured_at IS NULL AND l.removed_at IS NULL AND g.status <> 'dropped' AS due
  FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id WHERE l.id = %(feed)s
"""


CREATE_FEED = """
INSERT INTO roir.feed (generation_id, shard_id, outbox, source_oid)
VALUES (%(generation)s, %(shard)s, %(outbox)s, %(source)s)
"""
MISSING = """
SELECT id FROM roir.feed WHERE generation_id = %(generation)s AND captured_at IS NULL AND removed_at IS NULL
"""
CAPTURED = """
UPDATE roir.feed SET captured_at = clock_timestamp(), evidence = %(evidence)s
 WHERE id = %(feed)s AND captured_at IS NULL
"""
INDEX = """
SELECT i.* FROM roir.index i JOIN roir.generation g ON g.index_id = i.id WHERE g.id = %(generation)s
"""


def with_source(connection: Connection, dry: DryRun) -> DryRun:
    """Creates the shape table of a new index, in the transaction of its prepare: so it is never left without one."""
    assert isinstance(dry.survey, Survey)
    name = shape_table.create(connection, dry.survey.any_source, dry.definition, dry.survey.shard_column)
    return replace(dry, source=catalog.read_source(connection, name))


def write_down(connection: Connection, generation_id: int, dry: DryRun, entry: Entry) -> None:
    """Records the feeds, before anything is created in the shards, and creates their tables on this server."""
    assert isinstance(dry.survey, Survey)
    for one in dry.survey.shards:
        values = {"generation": generation_id, "shard": one.shard.id, "source": one.source.oid}
        execute(connection, CREATE_FEED, {**values, "outbox": f"o_{secrets.token_hex(8)}"})
    intents.create(connection, generation_id, entry)
    if dry.definition.unique:
        holders.create(connection, generation_id)


def capture_all(
    database: Database, generation_id: int, options: BuildOptions, report: Callable[[str], None] = lambda line: None
) -> None:
    """Begins to capture in every shard that doesn't yet. Safe to call again, and by several processes at once.

    A shard that can't be reached, or whose lock isn't free in time, is reported and left to the build's workers. Raises
    errors that won't pass, such as RightMissing and SourceChanged.
    """
    patience_s = min(options.lock_patience_s, SHARD_PATIENCE_S)
    for feed in missing(database, generation_id):
        try:
            capture(database, feed, options.lock_timeout_ms, patience_s, report)
        except (DBAPIError, LockNotAcquired) as error:
            if isinstance(error, DBAPIError) and trouble_of(error) is None:
                raise
            problem = reason_of(error)
            with database.transaction() as connection:
                set_away(connection, feed.shard.id, problem)
            report(f"shard {quote(feed.shard.name)} isn't captured yet: {problem}; the build continues without it")


def missing(database: Database, generation_id: int) -> list[Feed]:
    """The feeds of a generation that aren't captured yet."""
    with database.transaction() as connection:
        wanted = set(execute(connection, MISSING, {"generation": generation_id}).scalars())
        return [one for one in feeds_of(connection, generation_id) if one.id in wanted]


def capture(
    database: Database,
    feed: Feed,
    timeout_ms: int,
    patience_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Begins to capture in one shard, and records that. database: the index server's.

    Raises LockNotAcquired, also if another process does the same; DBAPIError of either side.
    """
    with held(database, feed.id):
        with database.transaction() as connection:
            if not execute(connection, DUE, {"feed": feed.id}).scalar_one():
                return
            definition = definition_of(connection, feed.generation_id)
            server = home.server_of(connection)
        there = feed.shard.database(database.application_name, database.limits)
        outbox.install(there, feed, definition, server, timeout_ms, patience_s, report)
        with there.transaction() as connection:
            found = execute(connection, EVIDENCE, {"name": feed.outbox}).scalar_one()
        with database.transaction() as connection:
            execute(connection, CAPTURED, {"feed": feed.id, "evidence": to_json(found)})
            set_reached(connection, feed.shard.id)
    # Writes are announced for the new generation before readers see it.
    announce.keep_on(database, feed.generation_id, report)


def definition_of(connection: Connection, generation_id: int) -> IndexDefinition:
    """The definition of a generation's index."""
    row = execute(connection, INDEX, {"generation": generation_id}).one()
    return stored_definition(connection, row, IndexDefinition(operations.index_name(row)))
