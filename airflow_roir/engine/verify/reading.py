"""Reads what a unit compares: under locks that keep it what it is, and only the unit's part of it."""

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

# NULL where the relation is gone, or no part of the source any more; of our own segments only whether they are there.
STILL_THERE = """
SELECT c.oid::regclass::text FROM pg_class c
 WHERE c.oid = %(relation)s::oid
   AND (%(ours)s OR c.oid = %(source)s OR EXISTS (
        SELECT FROM pg_partition_ancestors(c.oid::regclass) a WHERE a.relid = %(source)s::oid))
"""


class UnitReading:
    """What a worker's session reads of the units that it claims."""

    def __init__(self, connection: Connection, verify_job: VerifyJob) -> None:
        self.connection = connection
        self.verify_job = verify_job
        self.job = verify_job.job
        self._source = SourceCheck(connection, self.job)
        # What isn't a leaf: no table becomes a level of partitions, nor the other way round.
        leaves = set(self.job.source.leaves) - {self.job.source.oid}
        self._levels = [relation for relation in self.job.source.relations if relation not in leaves]

    def hold(self, claim: UnitClaim) -> str | None:
        """Keep partitions from being taken out while the unit is read; the relation's name, None if it is gone.

        The source is locked before the entries, as a TRUNCATE of the source does.
        """
        job = self.job
        path = ", ".join(["pg_catalog", *map(quote, job.source.operator_schemas), "pg_temp"])
        execute(
            self.connection,
            f"SET LOCAL lock_timeout = {limits_of(self.connection).table_lock_ms}; SET LOCAL search_path = {path}; "
            # Workers are the parallelism that was asked for.
            "SET LOCAL max_parallel_workers_per_gather = 0",
        )
        for level in execute(
            self.connection,
            "SELECT c.oid, c.oid::regclass::text AS name FROM pg_class c WHERE c.oid = ANY (%(levels)s::oid[]) "
            "ORDER BY c.oid <> %(source)s, c.oid",
            {"levels": self._levels, "source": job.source.oid},
        ).all():
            # A unit of the source reads one of its leaves, which is locked below; the others look at any.
            lock_table(self.connection, level.name, level.oid, "ACCESS SHARE", only=claim.of_source)
        # The other side's question names the source as it was called when the run began.
        check_name(self.connection, job.source.sql, job.source.oid)
        self._source.look(partitions=False)
        values = {"relation": claim.relation, "ours": not claim.of_source, "source": job.source.oid}
        name = execute(self.connection, STILL_THERE, values).scalar()
        while name is not None:
            locked = self.lock(name, claim.relation)
            before, name = name, execute(self.connection, STILL_THERE, values).scalar()
            # Under its lock it can't be renamed any more; an old snapshot knows its old name only.
            if name == before:
                return str(name) if locked else None
        return None

    def check_names(self, claim: UnitClaim, name: str) -> None:
        """What was read by name was that: a lock keeps a table's name, its schema can have another one since."""
        check_name(self.connection, self.job.source.sql, self.job.source.oid)
        if claim.of_source:
            check_name(self.connection, name, claim.relation)

    def lock(self, name: str, relation: int) -> bool:
        """Lock a relation by its name; False if it doesn't have that name any more."""
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
        """SQL that a row is the unit's; what it binds is put into `values`."""
        job = self.job
        if claim.side == "source":
            unit = ScanRange(claim.lower, claim.upper)
            return unit.condition(job.source.primary_key, job.source.comparands, None, values)
        terms = []
        for sign, bound in ((">=", claim.lower), ("<", claim.upper)):
            # From the first block to the last it is a plain scan, which reads ahead.
            if bound is not None and bound != [0]:
                terms.append(f"{alias}.ctid {sign} '({int(bound[0])},0)'::tid")
        if claim.side == "delta":
            terms.append(f"{alias}.state = 'regular'")
        if claim.side != "heap":
            # What readers see: without the entries of partitions that are leaving or joining.
            shown = "SELECT coalesce(roir.is_shown(%(id)s, %(alias)s), 'true')"
            terms.append(execute(self.connection, shown, {"id": job.generation_id, "alias": alias}).scalar_one())
        # Put in last: a partition's bounds may hold literals with a per cent sign.
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
        """Bound, but where pieces are cut by blocks: there all values are numbers. around: has the query in FROM."""
        if claim.side != "source":
            for name in sorted(values, key="where".__eq__):
                sql = sql.replace(f"%({name})s", str(values[name]))
            values = {}
        item, values = owner.relation(self.connection, self.job.source, sql, columns, values, reads)
        return execute(self.connection, around.replace("{compared}", item), values).one()
