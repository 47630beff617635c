"""One worker of a verification: claims units, and compares source and index in them, inside PostgreSQL.

Stage `total`: both sides are summed. Where they differ, stage `sum`: the same by buckets of the primary key. Stage
`check`: the rows of the buckets whose sums differ are compared one by one; where only a part is verified, all rows of
that part. A unit is claimed like a range of a build.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from psycopg2 import errors as pg_errors
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine import generation as physical
from airflow_roir.engine import owner
from airflow_roir.engine.claims import Pieces, Stop, why_stop
from airflow_roir.engine.database import execute
from airflow_roir.engine.locks import check_name, is_renamed, lock_table, telling_of_names
from airflow_roir.engine.run import TABLE_LOCK_WAIT, check_fingerprint, read_control
from airflow_roir.engine.verify import comparison, damage, repair
from airflow_roir.engine.verify.comparison import of_source
from airflow_roir.engine.verify.job import UnitClaim, UnitMetrics, VerifyJob
from airflow_roir.engine.verify.snapshot import SharedSnapshot
from airflow_roir.operation import Status
from airflow_roir.scan_range import ScanRange

# What is due: a unit that is to be compared, or one that is compared and still claimed, with something to mend.
DUE = "(done AND claim_epoch IS NOT NULL OR NOT done AND NOT %(spent)s AND ordinal < %(until)s)"
UNITS = Pieces(
    "unit",
    "roir.verification_unit",
    "verification_id = %(verification)s",
    "NOT done",
    "stage, side, relation, lower, upper, done",
    DUE,
)
UNIT_DONE = """done = true, seconds = %(seconds)s, rows = %(rows)s, snapshot = %(snapshot)s,
       buckets = %(buckets)s::int[], counts = %(counts)s::bigint[], sums = %(sums)s::numeric[]"""
NO_SUMS: dict[str, Any] = {"rows": 0, "snapshot": None, "buckets": None, "counts": None, "sums": None}

# How far the work of a verification may go on: by its time, and, in a walk, up to which unit.
LIMITS = """
SELECT coalesce((SELECT sum(value::numeric) FROM jsonb_each_text(o.phase_seconds))
                >= (v.options ->> 'max_seconds')::numeric, false) AS spent,
       coalesce((SELECT u.ordinal FROM roir.verification_unit u
                  WHERE u.verification_id = v.id AND v.quota IS NOT NULL ORDER BY u.ordinal OFFSET v.quota LIMIT 1),
                2147483647) AS until
  FROM roir.verification v JOIN roir.operation o ON o.id = v.operation_id
 WHERE v.id = %(verification)s
"""
# The check of one segment's B-trees, each entry included; the extension may be in any schema.
TREES = """
SELECT format('SELECT %%I.bt_index_check(%%s::regclass, true)', n.nspname, i.indexrelid)
  FROM pg_index i, pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
 WHERE i.indrelid = %(relation)s::oid AND i.indisunique AND e.extname = 'amcheck'
"""
# How many shared snapshots are tried before a unit is read in one of its own.
SHARES = 3
# No such snapshot any more, or its session is about to end.
NO_SNAPSHOT = (
    pg_errors.InvalidParameterValue,
    pg_errors.UndefinedObject,
    pg_errors.ObjectNotInPrerequisiteState,
)
# NULL where the relation is gone, or no part of the source any more; of our own segments only whether they are there.
STILL_THERE = """
SELECT c.oid::regclass::text FROM pg_class c
 WHERE c.oid = %(relation)s::oid
   AND (%(ours)s OR c.oid = %(source)s OR EXISTS (
        SELECT FROM pg_partition_ancestors(c.oid::regclass) a WHERE a.relid = %(source)s::oid))
"""
# Whether the totals, which differed, were of one snapshot.
ONE_SNAPSHOT = """
SELECT count(DISTINCT snapshot) = 1 AND bool_or(stage = 'sum') FROM (
    SELECT stage, CASE WHEN stage = 'total' THEN snapshot END AS snapshot FROM roir.verification_unit
     WHERE verification_id = %(verification)s) u
"""
# What nothing that was found and is left explains.
UNEXPLAINED = """
INSERT INTO roir.discrepancy (verification_id, unit_id, kind, key, primary_key, detail)
SELECT %(verification)s, %(unit)s, 'damaged', %(key)s, %(primary_key)s, %(detail)s
 WHERE NOT EXISTS (SELECT FROM roir.discrepancy d WHERE d.verification_id = %(verification)s
                      AND d.primary_key = %(primary_key)s::jsonb AND d.outcome IS NULL)
"""
Found = TypeVar("Found")


class VerifyWorker:
    """One of a verification's parallel workers. Each method is one transaction, so that tests can step it."""

    def __init__(self, connection: Connection, verify_job: VerifyJob, worker: int) -> None:
        self.connection = connection
        self.verify_job = verify_job
        self.job = verify_job.job
        self.worker = worker
        self.snapshot = SharedSnapshot(connection)
        self.newer = (connection.dialect.server_version_info or (0,)) >= (18,)

    def claim(self) -> UnitClaim | Stop:
        """Claim a unit. Raises Fenced."""
        run = self.job.run
        values = {"verification": self.verify_job.verification_id}
        with self.connection.begin():
            row = read_control(self.connection, run)
            if stop := why_stop(row, self.worker):
                return stop
            limits = execute(self.connection, LIMITS, values).one()
            found = UNITS.claim(self.connection, run, self.worker, {**values, **limits._mapping})
        if found is None:
            return Stop("done")
        return UnitClaim(
            found.id,
            found.ordinal,
            found.claim_token,
            found.stage,
            found.side,
            found.relation,
            found.lower,
            found.upper,
            found.done,
        )

    def unit(self, claim: UnitClaim) -> UnitMetrics:
        """Compare a claimed unit. What a check found commits together with the unit's end; sums alone change nothing.

        Raises Fenced (nothing was changed), SourceChanged, LockNotAcquired (a name was changed meanwhile).
        """
        with telling_of_names():
            return self._unit(claim)

    def _unit(self, claim: UnitClaim) -> UnitMetrics:
        begun = time.monotonic()
        checked, found = 0, 0
        if claim.side == "both":
            self._whole(claim, begun)
        elif claim.stage != "check" and claim.side not in ("tree", "reach"):
            summed = self._sums(claim)
            with self.connection.begin():
                checked = self._commit(claim, summed, begun)
        else:
            with self.connection.begin():
                name = self._hold(claim)
                if name is not None and claim.side == "tree":
                    self._noting_corruption(claim, name, self._check_tree)
                elif name is not None and claim.side == "reach":
                    self._noting_corruption(claim, name, self._count)
                elif name is not None:
                    checked, found = self._noting_corruption(claim, name, self._check) or (0, 0)
                    if found and self.verify_job.options.is_partial:
                        self._look_again("unit_id = %(unit)s", {"unit": claim.id})
                if name is not None:
                    self._check_names(claim, name)
                to_repair = found > 0 and self.verify_job.options.repair
                self._commit(claim, {**NO_SUMS, "rows": checked}, begun, to_repair)
        return UnitMetrics(self.worker, claim.ordinal, checked, time.monotonic() - begun, found)

    def mend(self, claim: UnitClaim) -> bool:
        """Mend what was found in a unit that is compared, then give its claim up; False where a pause came between.

        Raises Fenced.
        """
        run = self.job.run
        with telling_of_names():
            for _ in repair.mend_unit(self.connection, self.job, self.verify_job.verification_id, claim.id):
                with self.connection.begin():
                    if read_control(self.connection, run).status != Status.RUNNING:
                        return False
        with self.connection.begin():
            if not UNITS.release(self.connection, run, claim):
                raise UNITS.fenced(run, self.worker, claim)
        return True

    def close(self) -> None:
        """Let go of the snapshot."""
        self.snapshot.close()

    def _sums(self, claim: UnitClaim) -> dict[str, Any]:
        """The unit's sums, in the snapshot that the workers share."""
        shared: str | None = None
        for _ in range(SHARES):
            shared = self.snapshot.share(self.verify_job.verification_id, gone=shared)
            try:
                return self._sums_in(claim, shared)
            except DBAPIError as error:
                # Whoever held it has left, as the next one may.
                if not isinstance(error.orig, NO_SNAPSHOT):
                    raise
        return self._sums_in(claim, None)

    def _sums_in(self, claim: UnitClaim, shared: str | None) -> dict[str, Any]:
        job = self.job
        values: dict[str, Any] = {}
        with self.connection.begin():
            execute(self.connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            if shared is not None:
                execute(self.connection, f"SET TRANSACTION SNAPSHOT '{shared}'")
            name = self._hold(claim)
            if name is None:
                return NO_SUMS
            entry = job.entry
            read = of_source(entry, "r") if claim.of_source else entry.physical(prefix="r.")
            where = self._where(claim, values, "r")
            if claim.side != "source":
                # An index that has lost something must not hide it.
                execute(self.connection, damage.WITHOUT_INDEX)
            elif values:
                # As a batch of the build: a unit is no scan of the whole table.
                execute(self.connection, "SET LOCAL enable_seqscan = off")
            if claim.stage == "total":
                sql = comparison.total(entry, read, f"{name} r", where, self.newer)
            else:
                sql = comparison.sums(entry, read, f"{name} r", where, self.newer, self.verify_job.buckets)
            reads = [name] if claim.of_source else None
            row = self._execute(claim, sql, values, comparison.SUMMED, "SELECT * FROM {compared}", reads)
            self._check_names(claim, name)
            return {**row._mapping, "snapshot": shared or f"unit {claim.id}"}

    def _hold(self, claim: UnitClaim) -> str | None:
        """Keep partitions from being taken out while the unit is read; the relation's name, None where it is gone.

        The source is locked before the entries, as a TRUNCATE of the source does.
        """
        job = self.job
        path = ", ".join(["pg_catalog", *map(quote, job.source.operator_schemas), "pg_temp"])
        execute(
            self.connection,
            f"SET LOCAL lock_timeout = '{TABLE_LOCK_WAIT}'; SET LOCAL search_path = {path}; "
            # Workers are the parallelism that was asked for.
            "SET LOCAL max_parallel_workers_per_gather = 0",
        )
        for level in execute(
            self.connection,
            "SELECT c.oid, c.oid::regclass::text AS name FROM unnest(%(relations)s::oid[]) r (oid) "
            "JOIN pg_class c USING (oid) WHERE c.relkind = 'p' OR c.oid = %(source)s "
            "ORDER BY c.oid <> %(source)s, c.oid",
            {"relations": list(job.source.relations), "source": job.source.oid},
        ).all():
            # A unit of the source reads one of its leaves, which is locked below; the others look at any.
            lock_table(self.connection, level.name, level.oid, "ACCESS SHARE", only=claim.of_source)
        # The other side's question names the source as it was called when the run began.
        check_name(self.connection, job.source.sql, job.source.oid)
        check_fingerprint(self.connection, job)
        values = {"relation": claim.relation, "ours": not claim.of_source, "source": job.source.oid}
        name = execute(self.connection, STILL_THERE, values).scalar()
        while name is not None:
            locked = self._lock(name, claim.relation)
            before, name = name, execute(self.connection, STILL_THERE, values).scalar()
            # Under its lock it can't be renamed any more; an old snapshot knows its old name only.
            if name == before:
                return str(name) if locked else None
        return None

    def _check_names(self, claim: UnitClaim, name: str) -> None:
        """What was read by name was that: a lock keeps a table's name, its schema can have another one since."""
        check_name(self.connection, self.job.source.sql, self.job.source.oid)
        if claim.of_source:
            check_name(self.connection, name, claim.relation)

    def _lock(self, name: str, relation: int) -> bool:
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

    def _where(self, claim: UnitClaim, values: dict[str, Any], alias: str) -> str:
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

    def _execute(
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

    def _check(self, claim: UnitClaim, name: str) -> tuple[int, int]:
        job, with_delta = self.job, self.verify_job.with_delta
        values: dict[str, Any] = {}
        # Not "s": that is the source's in the question whether an entry is shown.
        alias = "r" if claim.of_source else "x"
        where = self._where(claim, values, alias)
        if claim.side != "source":
            where += f" AND {alias}.ctid >= '(0,0)'::tid"
        # What is looked up is looked up by an index, however small the table is: as readers and the capture do.
        execute(self.connection, damage.BY_INDEX)
        if self.verify_job.suspicious is not None:
            read = of_source(job.entry, "r") if claim.of_source else job.entry.physical(prefix="x.")
            bucket = comparison.bucket(job.entry, read, self.verify_job.buckets)
            # A constant, so that the server looks them up by hash.
            where += f" AND {bucket} = ANY ('{{{','.join(map(str, self.verify_job.suspicious))}}}'::int[])"
        if claim.side == "source":
            compared = comparison.missing_or_different(
                job.source, job.entry, job.generation_id, name, where, with_delta
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
        return self._execute(claim, sql, values, comparison.COMPARED, around, reads)

    def _extra(self, claim: UnitClaim, name: str, where: str) -> tuple[str, str]:
        job = self.job
        # A regular row of the delta overrides the base itself.
        of_base = self.verify_job.with_delta and claim.side == "entry"
        itself = damage.itself(job.entry, physical.base(job.generation_id)) if claim.side != "delta" else None
        remedy = damage.remedy_of_entries(job.run.index)
        return comparison.extra(job.source, job.entry, job.generation_id, name, where, of_base, itself, remedy)

    def _count(self, claim: UnitClaim, name: str) -> None:
        """Whether a segment's B-tree leads to as much as its heap holds; to what it doesn't."""
        execute(self.connection, damage.BY_INDEX)
        counted = execute(self.connection, damage.COUNTS.format(segment=name)).one()
        if counted.heap != counted.tree:
            self._compare(claim, self._extra(claim, name, "x.ctid >= '(0,0)'::tid"), {})

    def _look_again(self, which: str, values: dict[str, Any]) -> None:
        found = execute(
            self.connection,
            f"SELECT id FROM roir.discrepancy WHERE {which} AND verification_id = %(verification)s "
            "AND kind IN ('missing', 'extra') AND outcome IS NULL",
            {**values, "verification": self.verify_job.verification_id},
        )
        repair.Mender(self.connection, self.job).look_again(list(found.scalars()))

    def _whole(self, claim: UnitClaim, begun: float) -> None:
        """What is left to explain, without any index: lookups that failed, and sums of one snapshot that differed."""
        rows: list[Row[Any]] = []
        values = {"verification": self.verify_job.verification_id, "unit": claim.id}
        with self.connection.begin():
            execute(self.connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            # Before the snapshot, which LOCK doesn't take: an older one sees the rows of a COPY with FREEZE that was
            # waited for, and not their entries.
            execute(self.connection, f"SET LOCAL lock_timeout = '{TABLE_LOCK_WAIT}'")
            self._lock(self.job.source.sql, self.job.source.oid)
            if self._hold(claim) is not None and execute(self.connection, ONE_SNAPSHOT, values).scalar_one():
                rows = self._differing()
                check_name(self.connection, self.job.source.sql, self.job.source.oid)
        with self.connection.begin():
            self._hold(claim)
            self._look_again("true", {})
            for row in rows:
                seen = f"{row.rows} rows and {row.entries} entries of this primary key, by no index, differ"
                of_source = damage.remedy_of_source(self.job.source)
                remedy = of_source if row.rows > 1 else damage.remedy_of_entries(self.job.run.index)
                found = {
                    "key": json.dumps(row.key),
                    "primary_key": json.dumps(row.primary_key),
                    "detail": f"{seen}. {remedy}",
                }
                execute(self.connection, UNEXPLAINED, {**values, **found})
            self._commit(claim, NO_SUMS, begun)

    def _differing(self) -> list[Row[Any]]:
        job, buckets = self.job, self.verify_job.buckets
        parallel = f"SET LOCAL max_parallel_workers_per_gather = {self.verify_job.options.parallelism}"
        execute(self.connection, f"{damage.WITHOUT_INDEX}; {parallel}")
        shown = "SELECT coalesce(roir.is_shown(%(id)s, 'x'), 'true')"
        visible = execute(self.connection, shown, {"id": job.generation_id}).scalar_one()
        both = damage.both_sides(
            job.source, job.entry, job.generation_id, visible, self.verify_job.with_delta, self.newer
        )
        query = damage.differing_buckets(both, job.entry, buckets)
        differ = list(owner.rows(self.connection, job.source, query, damage.DIFFERING_BUCKETS).scalars())
        if not differ:
            return []
        query = damage.differing_rows(both, job.entry, buckets, differ)
        return list(owner.rows(self.connection, job.source, query, damage.DIFFERING_ROWS).all())

    def _check_tree(self, claim: UnitClaim, name: str) -> None:
        for check in execute(self.connection, TREES, {"relation": claim.relation}).scalars().all():
            execute(self.connection, check)

    def _noting_corruption(self, claim: UnitClaim, name: str, look: Callable[[UnitClaim, str], Found]) -> Found | None:
        """What a look returns, or None where the server finds an index corrupt: that is written down."""
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

    def _commit(self, claim: UnitClaim, found: dict[str, Any], begun: float, to_repair: bool = False) -> int:
        # If there is something to repair the claim is kept until that is done.
        values = {**found, "to_repair": to_repair, "seconds": round(time.monotonic() - begun, 3)}
        UNITS.commit(
            self.connection, self.job.run, self.worker, claim, UNIT_DONE, values, "NOT p.done", "NOT %(to_repair)s"
        )
        return int(found["rows"])
