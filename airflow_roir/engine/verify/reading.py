"""Reads the rows or entries of one unit, under locks that keep its relation in place."""

from __future__ import annotations

from typing import Any

from psycopg2 import errors as pg_errors
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.control.job import SourceCheck
from airflow_roir.engine.database import execute
from airflow_roir.engine.locks.table_lock import check_name, is_renamed, lock_table
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.verify.job import UnitClaim, VerifyJob
from airflow_roir.scan_range import ScanRange

# The name of the relation; no row if it is gone, or no longer a part of the source. Our own segments must only exist.
STILL_THERE = """
SELECT c.oid::regclass::text FROM pg_class c
 WHERE c.oid = %(relation)s::oid
   AND (%(ours)s OR c.oid = %(source)s OR EXISTS (
        SELECT FROM pg_partition_ancestors(c.oid::regclass) a WHERE a.relid = %(source)s::oid))
"""


class UnitReading:
    """A worker's session, as it reads the units that the worker claims."""

    def __init__(self, connection: Connection, verify_job: VerifyJob) -> None:
        self.connection = connection
        self.verify_job = verify_job
        self.job = verify_job.job
        self._source = SourceCheck(connection, self.job)
        # The source and its levels of partitions, without leaves: a table never becomes a level, nor a level a table.
        leaves = set(self.job.source.leaves) - {self.job.source.oid}
        self._levels = [relation for relation in self.job.source.relations if relation not in leaves]

    def hold(self, claim: UnitClaim) -> str | None:
        """Locks the source's levels and the unit's relation; returns the relation's name, None if it is gone.

        No partition can leave the source until the transaction ends. The source is locked before the entries, in the
        order of a TRUNCATE.
        """
        job = self.job
        path = ", ".join(["pg_catalog", *map(quote, job.source.operator_schemas), "pg_temp"])
        execute(
            self.connection,
            f"SET LOCAL lock_timeout = {limits_of(self.connection).table_lock_ms}; SET LOCAL search_path = {path}; "
            # Our workers are the requested parallelism.
            "SET LOCAL max_parallel_workers_per_gather = 0",
        )
        for level in execute(
            self.connection,
            "SELECT c.oid, c.oid::regclass::text AS name FROM pg_class c WHERE c.oid = ANY (%(levels)s::oid[]) "
            "ORDER BY c.oid <> %(source)s, c.oid",
            {"levels": self._levels, "source": job.source.oid},
        ).all():
            # A unit of the source reads one leaf, which is locked below; other units look up rows in any leaf.
            lock_table(self.connection, level.name, level.oid, "ACCESS SHARE", only=claim.of_source)
        # The comparison of the other side uses the source's name as of the run's beginning.
        check_name(self.connection, job.source.sql, job.source.oid)
        self._source.look(partitions=False)
        values = {"relation": claim.relation, "ours": not claim.of_source, "source": job.source.oid}
        name = execute(self.connection, STILL_THERE, values).scalar()
        while name is not None:
            locked = self.lock(name, claim.relation)
            before, name = name, execute(self.connection, STILL_THERE, values).scalar()
            # A locked relation can't be renamed any more. An old snapshot shows only its old name.
            if name == before:
                return str(name) if locked else None
        return None

    def check_names(self, claim: UnitClaim, name: str) -> None:
        """Checks that the names which were read by meant these tables: a lock keeps a table's name, not its schema's.

        Raises LockNotAcquired.
        """
        check_name(self.connection, self.job.source.sql, self.job.source.oid)
        if claim.of_source:
            check_name(self.connection, name, claim.relation)

    def lock(self, name: str, relation: int) -> bool:
        """Locks a relation by its name; False if it doesn't have that name any more."""
        try:
            with self.connection.begin_nested():
                execute(self.connection, f"LOCK TABLE {name} IN ACCESS SHARE MODE")
            return True
        except DBAPIError as error:
            if isinstance(error.orig, pg_errors.UndefinedTable | pg_errors.InvalidSchemaName):
                return False
            # Another role's table has the name.
            if isinstance(error.orig, pg_errors.InsufficientPrivilege) and is_renamed(self.connection, name, relation):
                return False
            raise

    def where(self, claim: UnitClaim, values: dict[str, Any], alias: str) -> str:
        """SQL for the condition that a row belongs to the unit; adds the values that it binds to `values`."""
        job = self.job
        if claim.side == "source":
            unit = ScanRange(claim.lower, claim.upper)
            return unit.condition(job.source.primary_key, job.source.comparands, None, values)
        terms = []
        for sign, bound in ((">=", claim.lower), ("<", claim.upper)):
            # Without bounds a unit of all blocks is a plain scan, which reads ahead.
            if bound is not None and bound != [0]:
                terms.append(f"{alias}.ctid {sign} '({int(bound[0])},0)'::tid")
        if claim.side == "delta":
            terms.append(f"{alias}.state = 'regular'")
        if claim.side != "heap":
            # Only entries that readers see: without those of partitions that are leaving or joining.
            shown = "SELECT coalesce(roir.is_shown(%(id)s, %(alias)s), 'true')"
            terms.append(execute(self.connection, shown, {"id": job.generation_id, "alias": alias}).scalar_one())
        # The condition is inserted last: a partition's bounds may have literals with a per cent sign.
        values["where"] = " AND ".join(terms) or "true"
        return "%(where)s"

    def execute(
        self,
        claim: UnitClaim,
        sql: str,
        values: dict[str, Any],
        columns: str,
        around: str,
        reads: list[str] | None = None,
    ) -> Row[Any]:
        """Sends the unit's query, within the statement `around`, which has it in FROM as `{compared}`.

        A unit by primary key binds its values; a unit by blocks, whose bounds are numbers, has them in the text.
        """
        if claim.side != "source":
            for name in sorted(values, key="where".__eq__):
                sql = sql.replace(f"%({name})s", str(values[name]))
            values = {}
        item, values = owner.relation(self.connection, self.job.source, sql, columns, values, reads)
        return execute(self.connection, around.replace("{compared}", item), values).one()
