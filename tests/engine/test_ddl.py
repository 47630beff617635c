"""Every DDL that can touch a source: refused, or harmless, or named by our next statement and by the status.

The sample runs each statement and some writes in one transaction, asks what the next batch or clean-up would find, and
rolls back. The sweep commits, in each phase, guarded or not, and goes on to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import psycopg2
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import clean_up, drop
from airflow_roir.engine.capture import partition_changes
from airflow_roir.engine.capture.row_function import function_name, trigger_name
from airflow_roir.engine.capture.truncate_function import truncate_function_name, truncate_trigger_name
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.health import faults
from airflow_roir.engine.lifecycle import run_phases
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.source import catalog, checks, owner
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, RoirError
from tests.conftest import database_dsn, run_sql
from tests.engine import ddl, steps
from tests.engine.ddl import Ddl
from tests.engine.stages import Stage, to_scan

pytestmark = pytest.mark.sample(1)

SHAPES = {"plain": ddl.PLAIN, "parts": ddl.PARTITIONED}
# A phase for each way in which the capture writes and we look.
SAMPLED = ("mid-build", "published")
SWEPT = ("prepared", "mid-build", "mid-build by block", "built", "sealed", "mid-fold", "published", "rebuild")

# A user runs each of these alone. {t} is the source, by its present name. Columns that are gone are left out.
WRITES = (
    "INSERT INTO {t} (d, id, k, v, c) VALUES (1, 101, 'new', 1, 'c'), (12, 102, NULL, 2, 'c')",
    "UPDATE {t} SET k = 'key' WHERE id % 5 = 1",
    "UPDATE {t} SET v = 7, c = 'changed' WHERE id % 5 = 2",
    "INSERT INTO {t} (d, id, k) VALUES (3, 3, 'up') ON CONFLICT (d, id) DO UPDATE SET k = 'upserted'",
    "UPDATE {t} SET id = id + 1000 WHERE id % 7 = 3",
    "UPDATE {t} SET d = (d + 10) % 30 WHERE id % 7 = 4",
    "DELETE FROM {t} WHERE id % 7 = 5",
)

# The ranges that a batch by blocks would find rewritten.
REWRITTEN = """
SELECT r.relation FROM roir.scan_range r JOIN pg_class c ON c.oid = r.relation::oid
 WHERE r.operation_id = %(operation)s AND NOT r.done AND r.filenode <> pg_relation_filenode(c.oid)
   AND NOT EXISTS (SELECT FROM roir.emptied e WHERE e.relation = r.relation
                      OR e.relation = (SELECT pg_partition_root(c.oid)::oid::bigint))
"""


@dataclass
class Outcome:
    """The outcome of one statement. writes: the error of the index's own parts in the writes after it."""

    refused: str = ""
    writes: str = ""
    exact: bool = False
    told: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """True if the statement was refused, harmless, or detected."""
        return bool(self.refused or self.told or (self.exact and not self.writes))


def fits(statement: Ddl, shape: str, pg: int) -> bool:
    return statement.shape in ("both", shape) and statement.since <= pg


def words(oid: int, generation_id: int) -> dict[str, str]:
    return {
        "base": f"roir_data.g{generation_id}",
        "delta": f"roir_data.g{generation_id}_delta",
        "source": f"roir_data.g{generation_id}_source",
        "capture": function_name(oid),
        "empty": truncate_function_name(oid),
        "row": trigger_name(oid),
        "truncate": truncate_trigger_name(oid),
    }


def rendered(text: str, oid: int, generation_id: int) -> str:
    for word, value in words(oid, generation_id).items():
        text = text.replace(f"{{{word}}}", value)
    return text


def projection(columns: list[str], relation: str) -> str:
    return f"SELECT array_agg(x::text ORDER BY x::text) FROM (SELECT {', '.join(columns)} FROM {relation}) x"


class Trial:
    """One statement, in a transaction that is rolled back."""

    def __init__(self, stage: Stage, shape: str) -> None:
        self.connection, self.job, self.shape = stage.connection, stage.job, shape
        self.published, self.rebuild = stage.phase == "published", stage.older is not None

    def run(self, statement: Ddl) -> Outcome:
        outcome = Outcome()
        transaction = self.connection.begin()
        try:
            try:
                self._as_user("; ".join(statement.sql))
            except DBAPIError as error:
                outcome.refused = str(error.orig).split("\n")[0]
                return outcome
            outcome.writes = self._write()
            outcome.told = self._told()
            if not outcome.told:
                outcome.exact = self._exact()
            return outcome
        finally:
            transaction.rollback()

    def _as_user(self, sql: str) -> Any:
        with self.connection.begin_nested():
            execute(self.connection, "SET LOCAL search_path = public, another; SET LOCAL row_security = on")
            execute(self.connection, rendered(sql, self.job.source.oid, self.job.generation_id))
            execute(self.connection, "SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL row_security = off")

    def _write(self) -> str:
        name = execute(self.connection, f"SELECT {self.job.source.oid}::oid::regclass::text").scalar_one()
        writes = list(WRITES)
        if self.shape == "parts":
            leaf = "SELECT relation::regclass::text FROM roir.partition_tree(%(oid)s) WHERE leaf ORDER BY 1 LIMIT 1"
            found = execute(self.connection, leaf, {"oid": self.job.source.oid}).scalar()
            writes += [f"TRUNCATE {found}", "INSERT INTO {t} (d, id, k) VALUES (1, 103, 'late')"] if found else []
        refused = ""
        for write in writes:
            try:
                self._as_user(write.replace("{t}", name))
            except DBAPIError as error:
                refused = refused or ours(error.orig)
        return refused

    def _told(self) -> tuple[str, ...]:
        """The messages of the next batch and the status. An error counts only before the publish."""
        try:
            with self.connection.begin_nested():
                if self.published:
                    return (*faults.warnings(self.connection), *self._gone())
                # In a rebuild readers see the older generation.
                return (*self._next_batch(), *faults.warnings(self.connection))
        except (RoirError, DBAPIError) as error:
            return (f"error: {error}",) if not self.published else ()

    def _gone(self) -> list[str]:
        """The partitions that the warnings report as gone."""
        values = {"generation": self.job.generation_id, "source": self.job.source.oid}
        query = "SELECT name FROM roir.partition_changes(%(generation)s, %(source)s) WHERE gone"
        return list(execute(self.connection, query, values).scalars())

    def _next_batch(self) -> Iterator[str]:
        source = catalog.read_source_by_oid(self.connection, self.job.source.oid)
        if catalog.fingerprint(self.connection, source.oid, self.job.columns) != self.job.fingerprint:
            yield "was altered"
        # Raises, as each batch and each verification does, if a partition's owner may not be read.
        owner.is_trusted(self.connection, source)
        generation = self.job.generation_id
        if (
            self.job.scan.by_blocks
            and execute(self.connection, REWRITTEN, {"operation": self.job.run.operation_id}).first()
        ):
            yield "was rewritten"
        found = partition_changes.check(self.connection, "ix", source, generation, self.job.entry, set())
        # The switch does the same.
        partition_changes.adopt(self.connection, source, generation, found)

    def _exact(self) -> bool:
        try:
            with self.connection.begin_nested():
                # A batch forbids its session to read views, and users read this one.
                forbids = "SELECT set_config(name, '', true) FROM pg_settings WHERE name = %(name)s"
                execute(self.connection, forbids, {"name": "restrict_nonsystem_relation_kind"})
                source = catalog.read_source_by_oid(self.connection, self.job.source.oid, check=False)
                columns = [f'"{column.source}"' for column in self.job.entry.columns]
                want = execute(self.connection, projection(columns, source.sql)).scalar()
                if self.published:
                    return bool(want == execute(self.connection, projection(columns, "public.ix")).scalar())
                if self.rebuild and want != execute(self.connection, projection(columns, "public.ix")).scalar():
                    return False
                have = f"({self._overlay(source)}) o"
                return bool(want == execute(self.connection, projection(self.job.entry.physical(), have)).scalar())
        except DBAPIError:
            return False

    def _overlay(self, source: Source) -> str:
        """SQL for the entries that the index would have if the rest were copied now and the delta folded."""
        entry, generation = self.job.entry, self.job.generation_id
        names, columns = ", ".join(entry.physical()), ", ".join(entry.source_columns("s"))
        key = [f'"{name}"' for name in self.job.source.primary_key]

        def bound(name: str) -> str:
            return ", ".join(f"(r.{name} ->> {i})::int" for i in range(len(key)))

        row = ", ".join(f"s.{name}" for name in key)
        scan = (
            f"SELECT {columns} FROM {source.sql} s WHERE EXISTS (SELECT FROM roir.scan_range r "
            f"WHERE r.operation_id = {self.job.run.operation_id} AND r.relation = s.tableoid::bigint AND NOT r.done "
            f"AND (r.lower IS NULL OR ({row}) >= ({bound('lower')})) "
            f"AND (r.upper IS NULL OR ({row}) < ({bound('upper')})) "
            f"AND (r.watermark IS NULL OR ({row}) > ({bound('watermark')})))"
        )
        if self.job.scan.by_blocks:
            scan = to_scan(self.connection, replace(self.job, source=source))
        base, delta = f"roir_data.g{generation}", f"roir_data.g{generation}_delta"
        # Entries of partitions that leave or join are shown only if they have a row.
        shown = execute(
            self.connection, "SELECT coalesce(roir.is_shown(%(id)s, 'x'), 'true')", {"id": generation}
        ).scalar_one()
        return (
            f"SELECT {names} FROM (SELECT {names} FROM (SELECT {names} FROM {base} UNION ALL ({scan})) b ({names}) "
            f"WHERE NOT EXISTS (SELECT FROM {delta} e WHERE e.state <> 'ghost' AND {entry.equal('b.', 'e.')}) "
            f"UNION ALL SELECT {names} FROM {delta} WHERE state = 'regular') x WHERE {shown}"
        )


def ours(error: Any) -> str:
    """The error if our objects raised it; '' for an error of the user's own statement."""
    context = f"{error} {getattr(getattr(error, 'diag', None), 'context', '')}"
    return str(error).split("\n")[0] if "roir" in context else ""


def make(dsn: str, shape: str) -> None:
    run_sql(dsn, *ddl.BEFORE, *SHAPES[shape], *ddl.FILL)


def stage(database: Database, phase: str) -> Stage:
    scan = "block" if phase.endswith("by block") else "key"
    return Stage(
        database, phase.removesuffix(" by block"), keys=ddl.KEYS, include=ddl.INCLUDE, scan=scan, batch_rows=20
    )


def tried(database: Database, pg: int, phase: str, shape: str, statements: list[Ddl], guarded: bool = False) -> None:
    """Tries each statement, and fails with the list of those that passed unnoticed."""
    make(database.dsn, shape)
    if guarded:
        run_sql(database.dsn, "SELECT roir.guard()")
    reached = stage(database, phase)
    trial = Trial(reached, shape)
    passed: dict[str, str] = {}
    for statement in statements:
        if statement.alone or not fits(statement, shape, pg) or (statement.unseen and not guarded):
            continue
        outcome = trial.run(statement)
        if not outcome.passes:
            passed[statement.name] = outcome.writes or "wrong"
    reached.connection.close()
    assert not passed, "\n".join(f"{name}: {how}" for name, how in passed.items())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("phase", SAMPLED)
def test_every_statement_once(database: Database, pg: int, phase: str, shape: str) -> None:
    """Each phase has one half of the statements, and each shape one half of those that fit both."""
    phases = ddl.EVERYTHING[SAMPLED.index(phase) :: len(SAMPLED)]
    tried(
        database,
        pg,
        phase,
        shape,
        [
            statement
            for number, statement in enumerate(phases)
            if statement.shape == shape or number % len(SHAPES) == list(SHAPES).index(shape)
        ],
    )


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("phase", SWEPT)
def test_every_statement_in_every_phase(database: Database, pg: int, phase: str, shape: str, guarded: bool) -> None:
    """Found: DDL in general. It holds: every statement in every phase: refused, harmless or warned of."""
    tried(database, pg, phase, shape, ddl.EVERYTHING, guarded)


def settled(database: Database, dsn: str, statement: Ddl, phase: str) -> str:
    """Commits the statement, writes, and continues to the end. Returns the error that no message reports, or ''."""
    with database.transaction() as connection:
        newest = execute(
            connection,
            "SELECT i.source_oid AS oid, max(g.id) AS id "
            "FROM roir.index i JOIN roir.generation g ON g.index_id = i.id GROUP BY 1",
        ).one()
        oid, generation = newest.oid, newest.id
    user = psycopg2.connect(dsn)
    user.autocommit = True
    try:
        for one in statement.sql:
            steps.sql(user, rendered(one, oid, generation))
    except psycopg2.Error:
        return ""
    name = steps.sql(user, f"SELECT {oid}::oid::regclass::text")[0][0]
    for write in WRITES:
        try:
            steps.sql(user, write.replace("{t}", name))
        except psycopg2.Error as error:
            if ours(error):
                break
    user.close()
    if phase != "published":
        try:
            run = start_run(database, "ix", "test", take_over=True)
            steps.build_all(database, run)
            steps.seal_all(database, run)
            run_phases(database, run)
        except (RoirError, DBAPIError) as error:
            return "" if str(error) else "an error without words"
    told = [line for one in indexes(database) for line in one.warnings]
    if not exact(database, oid) and not told:
        return "wrong before the clean-up, and the status says nothing"
    done = clean_up.clean_up(database)
    if not exact(database, oid) and not (done.warnings or done.waiting):
        return "wrong after the clean-up, which says nothing"
    return ""


def exact(database: Database, oid: int) -> bool:
    columns = ["k", "q", "id", "d", *ddl.INCLUDE.split(", ")]
    try:
        with database.transaction() as connection:
            name = execute(connection, f"SELECT {oid}::oid::regclass::text").scalar_one()
            have, want = (execute(connection, projection(columns, x)).scalar() for x in ("public.ix", name))
            return bool(have == want)
    except DBAPIError:
        return False


# Statements that can't be rolled back. A later step repairs the effect of some.
COMMITTED = [statement for statement in ddl.EVERYTHING if statement.alone]


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", SAMPLED)
@pytest.mark.parametrize("statement", COMMITTED, ids=lambda statement: statement.name)
def test_what_no_transaction_holds(database: Database, dsn: str, pg: int, statement: Ddl, phase: str) -> None:
    make(dsn, "parts" if statement.shape == "both" else statement.shape)
    stage(database, phase).connection.close()
    assert settled(database, dsn, statement, phase) == ""


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("phase", ["mid-build", "mid-fold", "published"])
def test_every_statement_to_the_end(
    server: str, database: Database, dsn: str, pg: int, phase: str, shape: str, guarded: bool
) -> None:
    make(dsn, shape)
    if guarded:
        run_sql(dsn, "SELECT roir.guard()")
    stage(database, phase).connection.close()
    source = steps.sql(steps.session(dsn), "SELECT current_database()")[0][0]
    run_sql(server, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{source}'")
    passed = {}
    for number, statement in enumerate(ddl.EVERYTHING):
        if not fits(statement, shape, pg) or (statement.unseen and not guarded):
            continue
        clone = f"{source}_{number}"
        run_sql(server, f"CREATE DATABASE {clone} TEMPLATE {source} STRATEGY file_copy")
        there = database_dsn(server, clone)
        if said := settled(Database(there, "roir tests"), there, statement, phase):
            passed[statement.name] = said
        run_sql(server, f"DROP DATABASE {clone} WITH (FORCE)")
    assert not passed, "\n".join(f"{name}: {how}" for name, how in passed.items())


def told(database: Database) -> tuple[str, ...]:
    (operation,) = status(database)
    return operation.warnings


@pytest.mark.parametrize("how", ["generated otherwise", "dropped and added", "names swapped"])
def test_entries_of_another_column_are_told_until_a_rebuild(database: Database, dsn: str, pg: int, how: str) -> None:
    """Found: `ALTER COLUMN … TYPE … USING` of the same type, `SET EXPRESSION`, a column dropped and added again, names
    exchanged: wrong and silent. It holds: the server refuses the first; the others fail a build, and are warned of
    after the publish.
    """
    if how == "generated otherwise" and pg < 17:
        pytest.skip("SET EXPRESSION came with PostgreSQL 17")
    make(dsn, "plain")
    stage(database, "published").connection.close()
    assert told(database) == ()
    alter = {
        "generated otherwise": ("ALTER TABLE t ALTER g SET EXPRESSION AS (lower(k) || '!')",),
        "dropped and added": ("ALTER TABLE t DROP COLUMN v CASCADE, ADD COLUMN v int DEFAULT 3",),
        "names swapped": ("ALTER TABLE t RENAME x TO y; ALTER TABLE t RENAME c TO x; ALTER TABLE t RENAME y TO c",),
    }[how]
    run_sql(dsn, *alter)
    assert any("Rebuild it" in line or "is another one now" in line for line in told(database)), told(database)
    if how == "names swapped":  # of another type, which the index's view can't show
        return
    steps.make_index(database, table=None, keys=None)
    steps.assert_exact(database)
    assert told(database) == ()


@pytest.mark.parametrize("phase", ["mid-build", "mid-fold", "published"])
def test_a_leaf_that_is_truncated_where_it_is_made_leaves_no_entry(database: Database, dsn: str, phase: str) -> None:
    """Found: a partition created, filled and truncated in one transaction left entries. It holds: its bounds are asked
    for rows.
    """
    make(dsn, "parts")
    stage(database, phase).connection.close()
    made = Ddl(
        (
            "BEGIN; CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40); "
            "INSERT INTO t (d, id, k) VALUES (31, 900, 'a'); TRUNCATE t3; "
            "INSERT INTO t (d, id, k) VALUES (32, 901, 'b'); COMMIT",
        )
    )
    assert settled(database, dsn, made, phase) == ""
    steps.assert_exact(database)


def test_a_primary_key_that_is_not_valid_is_refused_and_told(database: Database, dsn: str) -> None:
    """Found: a primary key that isn't valid was accepted. It holds: refused, and warned of."""
    make(dsn, "parts")
    only = ("ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE ONLY t ADD PRIMARY KEY (id, d)")
    run_sql(dsn, *only)
    with pytest.raises(InvalidInput, match="not valid"):
        steps.begin(database)
    run_sql(dsn, "ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (id, d)")
    stage(database, "published").connection.close()
    run_sql(dsn, *only)
    assert any("not valid" in line for line in told(database))
    drop.drop_index(database, "ix", "test")


def test_a_newer_server_is_said_to_be_untried() -> None:
    assert checks.untried(18) is None
    assert "PostgreSQL 19 is untested" in str(checks.untried(19))
