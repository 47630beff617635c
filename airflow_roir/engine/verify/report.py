"""The results of a verification, for the command and other callers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.health import capture_faults
from airflow_roir.engine.health.in_passing import looks_of_many
from airflow_roir.engine.source import catalog
from airflow_roir.engine.verify import record
from airflow_roir.engine.verify.counts import KINDS, Counts, counted_in
from airflow_roir.errors import NotFound
from airflow_roir.quantity import counted

# How many discrepancies the reports and the log name.
FIRST = 10

VERIFICATION = """
SELECT v.*, i.schema_name, i.name, g.entry
  FROM roir.verification v JOIN roir.index i ON i.id = v.index_id JOIN roir.generation g ON g.id = v.generation_id
 WHERE v.id = %(verification)s
"""
FIRST_FOUND = "SELECT * FROM roir.discrepancy WHERE verification_id = %(verification)s ORDER BY id LIMIT %(most)s"


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Counts):
    """The results of a verification. rows, entries: of source and index, that were read.

    repaired: discrepancies that were repaired, or that were right when the repair looked again. complete: False if a
    sample, a slice or a time limit left something out.
    warnings: why the capture misses writes now, so that the index becomes wrong again, each with its remedy.
    """

    index: str
    verification_id: int
    mode: str
    rows: int
    entries: int
    repaired: int
    complete: bool
    first: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if all that was read is right now."""
        return self.found == self.repaired

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the counts first."""
        facts = asdict(self)
        return {name: facts.pop(name) for name in (*KINDS, "repaired")} | facts

    def __str__(self) -> str:
        """The counts in one line."""
        found = f"missing {self.missing}, extra {self.extra}, different {self.different}"
        found += f", corrupt {self.corrupt}" if self.corrupt else ""
        found += f", damaged {self.damaged}" if self.damaged else ""
        found += f", duplicate {self.duplicate}" if self.duplicate else ""
        found += f"; repaired {self.repaired}" if self.repaired else ""
        return f"{counted(self.rows, 'row')}{'' if self.complete else ' of a part'}; {found}"


def report(database: Database, verification_id: int) -> VerifyReport:
    """The results of a verification that has ended. Raises NotFound."""
    with database.transaction() as connection:
        row = execute(connection, VERIFICATION, {"verification": verification_id}).first()
        if row is None:
            raise NotFound(f"there is no verification {verification_id}")
        first = execute(connection, FIRST_FOUND, {"verification": verification_id, "most": FIRST}).all()
        return VerifyReport(
            index=str(operations.index_name(row)),
            verification_id=row.id,
            mode=row.mode,
            rows=row.rows,
            entries=row.entries,
            **counted_in(row),
            repaired=row.repaired,
            complete=bool(row.complete),
            first=tuple(_named(one, Entry.from_json(row.entry)) for one in first),
            warnings=(),
        )


def report_of(database: Database, operation_id: int) -> VerifyReport:
    """The results of the newest verification of an operation, with the faults of the capture now. Raises NotFound."""
    with database.transaction() as connection:
        found = record.last(connection, operation_id)
        if found is None:
            raise NotFound(f"operation {operation_id} has no verification")
        none: list[str] = []
        now = looks_of_many(connection, {found.index_id: partial(_faults, index_id=found.index_id)}, none)
    return replace(report(database, found.id), warnings=tuple(now[found.index_id]))


def _faults(connection: Connection, index_id: int) -> list[str]:
    """The faults of an index's capture; none for an index over shards, which ships."""
    row = operations.read_index(connection, index_id)
    if row.shard_table is not None:
        return []
    source = catalog.source_if_there(connection, index_id)
    if source is None:
        return []
    return capture_faults.capture_problems(connection, str(operations.index_name(row)), source)


def described(one: dict[str, Any]) -> str:
    """A discrepancy of a report in one line."""
    if one["kind"] == "corrupt":
        return f"corrupt: {one['entry']}"
    if not one["key"]:
        # A view's discrepancy has no key.
        outcome = f" ({one['outcome']})" if one["outcome"] else ""
        return f"{one['kind']}: {one['detail']}{outcome}"
    where = ", ".join(f"{name} {value}" for name, value in {**one["key"], **one["primary_key"]}.items())
    outcome = f" ({one['outcome']})" if one["outcome"] else ""
    detail = f"; {one['detail']}" if one["detail"] else ""
    return f"{one['kind']}: {where}{outcome}{detail}"


def _named(row: Row[Any], entry: Entry) -> dict[str, Any]:
    """A discrepancy with the source's names for its columns."""
    columns = entry.columns
    key = [column.source for column in columns[: entry.key]]
    primary_key = [columns[i].source for i in entry.identity_positions if columns[i].primary_key]
    everything = [column.source for column in columns]
    # A discrepancy of a corrupt B-tree or of a view has no columns.
    named = row.kind != "corrupt" and bool(row.key)
    return {
        "kind": row.kind,
        "key": dict(zip(key, row.key, strict=True)) if named else row.key,
        "primary_key": dict(zip(primary_key, row.primary_key, strict=True)) if named else row.primary_key,
        "source": row.source_values and dict(zip(everything, row.source_values, strict=True)),
        "entry": row.entry_values and dict(zip(everything, row.entry_values, strict=True))
        if named
        else row.entry_values,
        "detail": row.detail,
        "outcome": row.outcome,
    }
