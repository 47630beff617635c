"""A compaction: an operation of kind `compact` over the generation that readers see, with a unit for each action.

It begins with what was chosen (`choosing.py`), ends when each unit is swapped in or left out, and is paused, resumed,
governed, taken over and aborted as any operation. What is swapped in stays, also after an abort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import QualifiedName, parse_name
from airflow_roir.engine.compact.action import Action
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.new_operation import adopt, begin_over_active, insert_over_active, refuse_ended
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog, replication
from airflow_roir.errors import InvalidInput, OperationRunning
from airflow_roir.operation import Kind, Phase
from airflow_roir.options import CompactOptions

# Ordinals are never given again: a statement that was planned for a segment must not meet another one of its name.
NEXT_ORDINAL = """
SELECT greatest((SELECT max(ordinal) FROM roir.segment WHERE generation_id = %(generation)s),
                (SELECT max(p) FROM roir.compaction_unit u CROSS JOIN unnest(u.parts) p
                  WHERE u.generation_id = %(generation)s)) + 1
"""
SEGMENT_BLOCKS = """
SELECT s.ordinal, CASE WHEN c.reltuples BETWEEN 0 AND 1e15 THEN c.reltuples ELSE 0 END AS rows,
       pg_relation_size(c.oid) / current_setting('block_size')::int AS blocks
  FROM roir.segment s
  JOIN pg_class c ON c.oid = to_regclass(format('roir_data.g%%s_s%%s', s.generation_id,
                                                lpad(s.ordinal::text, greatest(3, length(s.ordinal::text)), '0')))
 WHERE s.generation_id = %(generation)s
"""
# What was said of that when the generation was built.
IGNORES = """
SELECT coalesce(bool_or((options ->> 'ignore_publications')::boolean), false) FROM roir.operation
 WHERE generation_id = %(generation)s AND kind IN ('create', 'rebuild')
"""
UNITS = """
SELECT ordinal, action, segments, parts, status, bytes_before, bytes_after, bytes_expected, why, note, rows, seconds
  FROM roir.compaction_unit WHERE operation_id = %(operation)s ORDER BY ordinal
"""


@dataclass(frozen=True)
class BegunCompaction:
    """adopted: an unfinished compaction of the index was found, and continues with its own units."""

    operation_id: int
    index: str
    units: int
    adopted: bool


@dataclass(frozen=True)
class CompactionReport:
    """What a compaction has done. units: of each its action, segments, sizes in bytes, and what was left out, why."""

    operation_id: int
    index: str
    status: str
    units: tuple[dict[str, Any], ...]

    @property
    def bytes_before(self) -> int:
        """Of the segments that were replaced."""
        return sum(unit["bytes_before"] for unit in self.units if unit["status"] == "done")

    @property
    def bytes_after(self) -> int:
        """Of those that took their place."""
        return sum(unit["bytes_after"] or 0 for unit in self.units if unit["status"] == "done")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "operation_id": self.operation_id,
            "index": self.index,
            "status": self.status,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "units": list(self.units),
        }


def begin(
    database: Database,
    index: str,
    actions: Sequence[Action],
    options: CompactOptions,
    actor: str,
    report: Callable[[str], None] = lambda line: None,
) -> BegunCompaction:
    """Begin to compact the active generation of an index by these actions, in their order; start a run to do it.

    An unfinished compaction of the index is adopted with its own units; only live options change. Raises NotFound,
    InvalidInput (no actions, some that overlap, or a publication has the index's tables), OperationRunning (another
    operation of the index is unfinished), OperationFailed, LockNotAcquired.
    """

    def begun(connection: Connection) -> BegunCompaction:
        found = operations.find_index(connection, parse_name(index, "index"))
        name = operations.index_name(found)
        last = operations.newest_operation(connection, found.id)
        if last is not None and last.status in operations.LIVE:
            return _adopt(connection, last, name, options, actor)
        if not actions:
            raise InvalidInput(f"index {name}: nothing was chosen to compact")
        chosen = [ordinal for action in actions for ordinal in action.ordinals]
        if len(set(chosen)) < len(chosen):
            raise InvalidInput(f"index {name}: a segment is in two actions; each can be in one")
        generation = operations.active_generation(connection, found)
        # New segments are new tables, for a subscriber, too.
        replication.check_publications(
            connection, execute(connection, IGNORES, {"generation": generation.id}).scalar_one()
        )
        source = catalog.read_source_by_oid(connection, found.source_oid)
        operation_id = insert_over_active(
            connection,
            found,
            generation,
            Kind.COMPACT,
            Phase.COMPACT,
            options,
            source=source,
            actor=actor,
            batch_rows=database.limits.unit_rows,
        )
        rows = _write_units(connection, operation_id, generation.id, actions)
        execute(
            connection,
            "UPDATE roir.operation SET rows_estimate = %(rows)s WHERE id = %(operation)s",
            {"rows": rows, "operation": operation_id},
        )
        said = f"generation {generation.id}, {len(actions)} units"
        operations.record_event(connection, found.id, operation_id, actor, "compact", said)
        return BegunCompaction(operation_id, str(name), len(actions), adopted=False)

    return begin_over_active(database, index, "compact", begun, report)


def is_unfinished(database: Database, index: str) -> bool:
    """Whether an operation of the index is unfinished, which then is to be continued first. Raises NotFound."""
    with database.transaction() as connection:
        check_schema(connection)
        found = operations.find_index(connection, parse_name(index, "index"))
        last = operations.newest_operation(connection, found.id)
        return last is not None and last.status in operations.LIVE


def report_of(database: Database, operation_id: int) -> CompactionReport:
    """What a compaction has done until now. Raises NotFound."""
    with database.transaction() as connection:
        row = operations.read_operation(connection, operation_id)
        index = operations.read_index(connection, row.index_id)
        units = execute(connection, UNITS, {"operation": operation_id}).all()
        found = tuple({**unit._mapping, "seconds": float(unit.seconds)} for unit in units)
        return CompactionReport(operation_id, str(operations.index_name(index)), row.status, found)


WRITE_UNIT = """
INSERT INTO roir.compaction_unit (operation_id, generation_id, ordinal, action, segments, parts, blocks, bytes_before,
                                  bytes_expected, gain, why)
VALUES (%(operation)s, %(generation)s, %(ordinal)s, %(action)s, %(segments)s::int[], %(parts)s::int[], %(blocks)s,
        %(bytes_before)s, %(bytes_expected)s, %(gain)s, %(why)s)
"""


def _write_units(connection: Connection, operation_id: int, generation_id: int, actions: Sequence[Action]) -> int:
    """Write the units down; returns about how many entries they will copy."""
    asked = {"generation": generation_id}
    following = int(execute(connection, NEXT_ORDINAL, asked).scalar_one())
    known = {row.ordinal: row for row in execute(connection, SEGMENT_BLOCKS, asked)}
    rows = 0
    for number, action in enumerate(actions):
        parts = list(range(following, following + action.parts))
        following += action.parts
        segments = [known[ordinal] for ordinal in action.ordinals if ordinal in known]
        rows += sum(int(one.rows) for one in segments)
        values = {
            "operation": operation_id,
            "generation": generation_id,
            "ordinal": number,
            "action": action.kind.value,
            "segments": list(action.ordinals),
            "parts": parts,
            "blocks": sum(int(one.blocks) for one in segments),
            "bytes_before": action.bytes_now,
            "bytes_expected": action.bytes_after,
            "gain": action.gain,
            "why": action.why,
        }
        execute(connection, WRITE_UNIT, values)
    return rows


def _adopt(
    connection: Connection, row: operations.OperationRow, name: QualifiedName, options: CompactOptions, actor: str
) -> BegunCompaction:
    if row.kind != Kind.COMPACT:
        raise OperationRunning(
            f"index {name}: operation {row.id} ({row.kind}) is {row.status}. Compact the index once it has ended"
        )
    refuse_ended(row, name)
    adopt(connection, row, name, options, actor)
    units = execute(connection, UNITS, {"operation": row.id}).all()
    return BegunCompaction(row.id, str(name), len(units), adopted=True)
