"""A compaction: an operation of kind `compact` over the generation that readers see, with a unit for each action.

It begins with the chosen actions (`choosing.py`), and ends when each unit is swapped in or left out. It is paused,
resumed, governed, taken over and aborted as any operation. Segments that are swapped in stay, also after an abort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import parse_name
from airflow_roir.engine.compact.action import Action
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.new_operation import (
    BegunOperation,
    OverActive,
    begin_or_adopt,
    begin_over_active,
    unfinished,
)
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import replication
from airflow_roir.errors import InvalidInput
from airflow_roir.operation import Kind, Phase
from airflow_roir.options import CompactOptions
from airflow_roir.quantity import counted

# Ordinals are never used again: a statement that was planned for a segment must not meet another one of its name.
NEXT_ORDINAL = """
SELECT greatest((SELECT max(ordinal) FROM roir.segment WHERE generation_id = %(generation)s),
                (SELECT max(p) FROM roir.compaction_unit u CROSS JOIN unnest(u.parts) p
                  WHERE u.generation_id = %(generation)s)) + 1
"""
SEGMENT_BLOCKS = f"""
SELECT s.ordinal, CASE WHEN c.reltuples BETWEEN 0 AND 1e15 THEN c.reltuples ELSE 0 END AS rows,
       pg_relation_size(c.oid) / current_setting('block_size')::int AS blocks
  FROM roir.segment s
  JOIN pg_class c ON c.oid = to_regclass('roir_data.' || {physical.SEGMENT_NAME})
 WHERE s.generation_id = %(generation)s
"""
# Whether the build of the generation was allowed to ignore publications.
IGNORES = """
SELECT coalesce(bool_or((options ->> 'ignore_publications')::boolean), false) FROM roir.operation
 WHERE generation_id = %(generation)s AND kind IN ('create', 'rebuild')
"""
UNITS = """
SELECT ordinal, action, segments, parts, status, bytes_before, bytes_after, bytes_expected, why, note, rows, seconds
  FROM roir.compaction_unit WHERE operation_id = %(operation)s ORDER BY ordinal
"""


@dataclass(frozen=True)
class CompactionReport:
    """The results of a compaction. units: the action, segments and sizes in bytes of each; if it was left out, why."""

    operation_id: int
    index: str
    status: str
    units: tuple[dict[str, Any], ...]

    @property
    def bytes_before(self) -> int:
        """The bytes of the segments that were replaced."""
        return sum(unit["bytes_before"] for unit in self.units if unit["status"] == "done")

    @property
    def bytes_after(self) -> int:
        """The bytes of the segments that took their place."""
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
) -> BegunOperation:
    """Begins to compact the active generation of an index by these actions, in this order, and starts a run.

    If a compaction is unfinished, adopts it with its own units instead. Raises NotFound, InvalidInput (no actions,
    actions that overlap, or a publication with the index's tables), and all that `begin_or_adopt` raises.
    """
    name = parse_name(index, "index")

    def new(found: Row[Any] | None) -> BegunOperation:
        if not actions:
            raise InvalidInput(f"index {name}: nothing was chosen to compact")
        chosen = [ordinal for action in actions for ordinal in action.ordinals]
        if len(set(chosen)) < len(chosen):
            raise InvalidInput(f"index {name}: a segment is in two actions; each can be in one")
        return begin_over_active(database, found, Kind.COMPACT, Phase.COMPACT, options, actor, write, report)

    def write(connection: Connection, begun: OverActive) -> tuple[int, str]:
        generation = begun.generation.id
        # For a subscriber new segments are tables that it doesn't have.
        ignores = execute(connection, IGNORES, {"generation": generation}).scalar_one()
        replication.check_publications(connection, ignores)
        rows = _write_units(connection, begun.operation_id, generation, actions)
        return rows, counted(len(actions), "unit")

    return begin_or_adopt(
        database, lambda c: operations.find_index(c, name), [Kind.COMPACT], options, actor, new, report
    )


def is_unfinished(database: Database, index: str) -> bool:
    """True if the index has an unfinished operation, which must be continued first. Raises NotFound."""
    with database.transaction() as connection:
        check_schema(connection)
        return unfinished(connection, operations.find_index(connection, parse_name(index, "index"))) is not None


def report_of(database: Database, operation_id: int) -> CompactionReport:
    """The results of a compaction until now. Raises NotFound."""
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
    """Writes the units down; returns about how many entries they will copy."""
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
