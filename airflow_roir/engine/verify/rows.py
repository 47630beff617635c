"""Compares the rows and entries of a unit one by one, and a segment's heap with its B-tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from psycopg2 import errors as pg_errors
from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.verify import damage, differences, hashes
from airflow_roir.engine.verify.hashes import of_source
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.engine.verify.reading import UnitReading
from airflow_roir.engine.verify.repairer import Repairer

# The check of one segment's B-trees, each entry included; the extension may be in any schema.
TREES = """
SELECT format('SELECT %%I.bt_index_check(%%s::regclass, true)', n.nspname, i.indexrelid)
  FROM pg_index i, pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
 WHERE i.indrelid = %(relation)s::oid AND i.indisunique AND e.extname = 'amcheck'
"""

Found = TypeVar("Found")


class UnitRows:
    """Compares the rows of units on a worker's session."""

    def __init__(self, reading: UnitReading) -> None:
        self.connection = reading.connection
        self.verify_job = reading.verify_job
        self.job = reading.job
        self.reading = reading

    def check(self, claim: UnitClaim, name: str) -> tuple[int, int]:
        """Compares the unit's rows one by one; returns how many it read, and how many discrepancies it wrote down."""
        job, with_delta = self.job, self.verify_job.with_delta
        values: dict[str, Any] = {}
        # Not "s": the condition whether an entry is shown uses that alias for the source.
        alias = "r" if claim.of_source else "x"
        where = self.reading.where(claim, values, alias)
        if claim.side != "source":
            where += f" AND {alias}.ctid >= '(0,0)'::tid"
        # Lookups use an index, however small the table is, as readers and the capture do.
        execute(self.connection, damage.BY_INDEX)
        if self.verify_job.suspicious is not None:
            read = of_source(job.entry, "r") if claim.of_source else job.entry.physical(prefix="x.")
            bucket = hashes.bucket(job.entry, read, self.verify_job.buckets)
            # A constant array: the server looks buckets up in it by hash.
            where += f" AND {bucket} = ANY ('{{{','.join(map(str, self.verify_job.suspicious))}}}'::int[])"
        if claim.side == "source":
            compared = differences.missing_or_different(
                job.source, job.entry, job.generation_id, name, where, with_delta, job.run.index
            )
        elif claim.side == "heap":
            compared = damage.unreachable_rows(job.source, job.entry, name, where)
        else:
            compared = self._extra(claim, name, where)
        row = self._compare(claim, compared, values, [name] if claim.of_source else None)
        return row.rows, row.found

    def _compare(
        self, claim: UnitClaim, compared: tuple[str, str], values: dict[str, Any], reads: list[str] | None = None
    ) -> Row[Any]:
        sql, around = compared
        for name, number in (("verification", self.verify_job.verification_id), ("unit", claim.id)):
            around = around.replace(f"%({name})s", str(int(number)))
        return self.reading.execute(claim, sql, values, differences.COMPARED, around, reads)

    def _extra(self, claim: UnitClaim, name: str, where: str) -> tuple[str, str]:
        job = self.job
        # Only entries of the base can be overridden by the delta.
        of_base = self.verify_job.with_delta and claim.side == "entry"
        itself = damage.itself(job.entry, physical.base(job.generation_id)) if claim.side != "delta" else None
        remedy = damage.remedy_of_entries(job.run.index)
        return differences.extra(job.source, job.entry, job.generation_id, name, where, of_base, itself, remedy)

    def count(self, claim: UnitClaim, name: str) -> None:
        """Counts a segment's entries by its heap and by its B-tree; if they differ, finds the entries that differ."""
        execute(self.connection, damage.BY_INDEX)
        counted = execute(self.connection, damage.COUNTS.format(segment=name)).one()
        if counted.heap != counted.tree:
            self._compare(claim, self._extra(claim, name, "x.ctid >= '(0,0)'::tid"), {})

    def check_tree(self, claim: UnitClaim, name: str) -> None:
        """Checks a segment's B-trees by amcheck. Raises the server's error if one is corrupt."""
        for check in execute(self.connection, TREES, {"relation": claim.relation}).scalars().all():
            execute(self.connection, check)

    def noting_corruption(self, claim: UnitClaim, name: str, look: Callable[[UnitClaim, str], Found]) -> Found | None:
        """Returns what `look` returns; if the server finds an index corrupt, writes that down and returns None."""
        try:
            with self.connection.begin_nested():
                return look(claim, name)
        except DBAPIError as error:
            if not isinstance(error.orig, pg_errors.DataCorrupted | pg_errors.IndexCorrupted):
                raise
            said = str(error.orig).split("\n", 1)[0]
            execute(
                self.connection,
                "INSERT INTO roir.discrepancy (verification_id, unit_id, kind, key, primary_key, entry_values) "
                "VALUES (%(verification)s, %(unit)s, 'corrupt', '[]', '[]', jsonb_build_array(%(name)s::text, "
                "%(said)s::text))",
                {
                    "verification": self.verify_job.verification_id,
                    "unit": claim.id,
                    "name": name,
                    "said": said,
                },
            )
            return None

    def look_again(self, which: str, values: dict[str, Any]) -> None:
        """Looks again at missing and extra entries, without indexes, and marks damage: see `damage.mistaken`."""
        found = execute(
            self.connection,
            f"SELECT id FROM roir.discrepancy WHERE {which} AND verification_id = %(verification)s "
            "AND kind IN ('missing', 'extra') AND outcome IS NULL",
            {**values, "verification": self.verify_job.verification_id},
        )
        Repairer(self.connection, self.job).look_again(list(found.scalars()))
