"""Revert: readers see the replaced generation again, within its revert window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import QualifiedName, argument, parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.feeds import is_apart
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.readers import view
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog
from airflow_roir.errors import InvariantViolated, NotFound

ACTIVE = """
SELECT g.id, (o.options ->> 'revert_window_s')::int AS revert_window_s
  FROM roir.generation g JOIN roir.operation o ON o.generation_id = g.id AND o.kind IN ('create', 'rebuild')
 WHERE g.index_id = %(index)s AND g.status = 'active'
"""
REPLACED = """
SELECT * FROM roir.generation WHERE index_id = %(index)s AND status = 'retired' ORDER BY retired_at DESC LIMIT 1
"""
RETIRE = """
UPDATE roir.generation
   SET status = 'retired', retired_at = clock_timestamp(),
       drop_after = clock_timestamp() + make_interval(secs => %(revert_window_s)s)
 WHERE id = %(generation)s AND status = 'active'
"""
# mode_xid and published_at stay those of the publish: each younger snapshot has always seen all entries. A generation
# over shards has got entries by shipping since: its view is guarded until no snapshot is older than this revert.
ACTIVATE = """
UPDATE roir.generation
   SET status = 'active', retired_at = NULL, drop_after = NULL,
       mode_xid = CASE WHEN %(is_apart)s THEN pg_current_xact_id()::text ELSE mode_xid END,
       published_at = CASE WHEN %(is_apart)s THEN clock_timestamp() ELSE published_at END
 WHERE id = %(generation)s AND status = 'retired'
"""


@dataclass(frozen=True)
class Reverted:
    """The result of a revert. shown, retired: the ids of the generations that readers see now, and saw until now."""

    index: str
    shown: int
    retired: int


def revert(
    database: Database,
    index: str,
    actor: str,
    reason: str = "",
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> Reverted:
    """Point an index's view back to the generation that its last rebuild replaced; a second revert undoes this.

    Every write maintains both generations, so no row is lost, and this takes one short lock, like a publish. The
    generation that leaves the view is kept for the revert window that it was built with. An operation that is under way
    continues, and its publish replaces the generation that is then shown.
    reason: kept in the `event` table. patience_s: how long to try for the lock.
    Raises NotFound (no such index, or no replaced generation), LockNotAcquired. Doesn't check whether that generation
    is right: `roir verify` does.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        found = operations.find_index(connection, parse_name(index, "index"))
        source = catalog.source_if_there(connection, found.id)
    name = operations.index_name(found)
    if source is None:
        raise NotFound(f"index {name}: its table was dropped; drop the index too: roir drop {argument(name)}")

    def body(connection: Connection, lock: Callable[[], None]) -> Reverted:
        lock()
        view.hold(connection, found.id)
        shown = execute(connection, ACTIVE, {"index": found.id}).first()
        replaced = execute(connection, REPLACED, {"index": found.id}).first()
        if shown is None and operations.is_kept(connection, found.id):
            raise NotFound(operations.KEPT.format(index=name))
        if shown is None or replaced is None:
            raise NotFound(
                f"index {name} has no replaced generation to show: it is kept only for the rebuild's revert window"
            )
        view.show(connection, name, found.id, replaced.id)
        _change(connection, name, RETIRE, shown, revert_window_s=shown.revert_window_s)
        _change(connection, name, ACTIVATE, replaced, is_apart=is_apart(connection, replaced.id))
        said = "the replaced generation is shown again" + (f": {reason}" if reason else "")
        operations.record_event(connection, found.id, None, actor, "revert", said)
        return Reverted(str(name), replaced.id, shown.id)

    drain = Drain(
        database, source.sql, source.relations, database.limits.attempt_ms, patience_s, Waiter("revert", str(name))
    )
    with telling_of_names():
        return drain.run(body, report, [name.sql])


def _change(
    connection: Connection, name: QualifiedName, statement: str, generation: Row[Any], **values: object
) -> None:
    if execute(connection, statement, {"generation": generation.id, **values}).rowcount != 1:
        raise InvariantViolated(
            f"index {name}: generation {generation.id} was dropped or reverted meanwhile; nothing was reverted. "
            f"Try again: roir revert {argument(name)}"
        )
