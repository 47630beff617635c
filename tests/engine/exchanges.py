"""Names that are exchanged before the n-th statement of a command: the scene, the kinds of exchange, the commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg2
import psycopg2.errors
from sqlalchemy import event
from sqlalchemy.pool import QueuePool

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, clean_up, drop, dry_run, install, lifecycle, prepare, publish, revert, switch
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run, driving, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach, remove_entries, sync
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.options import BuildOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

INDEX = "public.ix"
ROWS = "SELECT i, (array['a', 'b', 'c', 'd', 'e'])[i % 5 + 1]::kind, i, -i, 'e' FROM generate_series"
SHAPE = "(id int PRIMARY KEY, k kind, v int, w int, l kind)"
OTHERS = (
    f"CREATE TABLE app.t_new {SHAPE}",
    "INSERT INTO app.t_new SELECT i, 'o', 7, 7, 'o' FROM generate_series(20, 70) i",
    "CREATE TABLE app.other (code text PRIMARY KEY, v int, k int)",
    "INSERT INTO app.other VALUES ('x', 1, 1)",
    "CREATE TABLE public.my_table (k kind, id int, v int)",
    "CREATE VIEW public.my_view AS SELECT k, id, v FROM app.t_new WHERE id < 25",
    f"CREATE TABLE app.p_new {SHAPE}",
    "INSERT INTO app.p_new SELECT i, 'o', 7, 7, 'o' FROM generate_series(1, 9) i",
    f"CREATE TABLE app.n1 {SHAPE}",
    f"INSERT INTO app.n1 {ROWS}(60, 75) i",
    f"CREATE TABLE app.n_new {SHAPE}",
    "INSERT INTO app.n_new SELECT i, 'o', 7, 7, 'o' FROM generate_series(61, 64) i",
)
BEGIN = ("CREATE SCHEMA app", "CREATE TYPE public.kind AS ENUM ('a', 'b', 'c', 'd', 'e', 'o')")
SCENES = {
    "plain": (*BEGIN, f"CREATE TABLE app.t {SHAPE}", f"INSERT INTO app.t {ROWS}(1, 40) i", *OTHERS, "ANALYZE app.t"),
    "parts": (
        *BEGIN,
        f"CREATE TABLE app.t {SHAPE} PARTITION BY RANGE (id)",
        "CREATE TABLE app.p1 PARTITION OF app.t FOR VALUES FROM (0) TO (30)",
        "CREATE TABLE app.p2 PARTITION OF app.t FOR VALUES FROM (30) TO (60)",
        f"INSERT INTO app.t {ROWS}(1, 40) i",
        *OTHERS,
        "ANALYZE app.t",
    ),
}
BOUNDS = "FOR VALUES FROM (60) TO (90)"
# All names that the sources and the tables exchanged with them may have after an exchange.
TABLES = ("t", "t_new", "other", "p_new", "n1", "n_new", "p1", "p2")


@dataclass(frozen=True)
class Kind:
    """Statements that exchange names in one transaction. undo: the statements that give the name back, if the user has
    to run them. old, new: the tables that have the name before and afterwards. fails: users' writes may fail until a
    clean-up or the undo.
    """

    how: str
    undo: str = ""
    old: str = "t"
    new: str = ""
    scenes: tuple[str, ...] = ("plain", "parts")
    fails: bool = False


def swap(old: str, new: str, keyword: str = "TABLE") -> str:
    return f"ALTER {keyword} {old} RENAME TO was; ALTER TABLE {new} RENAME TO {old.split('.')[1]}"


KINDS = {
    "table": Kind(swap("app.t", "app.t_new"), new="t_new"),
    "shape": Kind(swap("app.t", "app.other"), new="other"),
    "view": Kind("ALTER TABLE app.t RENAME TO was; CREATE VIEW app.t AS SELECT * FROM app.was WHERE id % 2 = 0"),
    "gone": Kind("ALTER TABLE app.t RENAME TO was"),
    "schema": Kind("ALTER SCHEMA app RENAME TO app2"),
    "schema taken": Kind(
        "ALTER SCHEMA app RENAME TO app2; CREATE SCHEMA app; CREATE TABLE app.t (LIKE app2.t INCLUDING ALL); "
        "INSERT INTO app.t SELECT * FROM app2.t_new"
    ),
    "leaf": Kind(swap("app.p1", "app.p_new"), old="p1", new="p_new", scenes=("parts",)),
    "leaf gone": Kind("ALTER TABLE app.p2 RENAME TO was", old="p2", scenes=("parts",)),
    "two leaves": Kind(swap("app.p1", "app.p2"), old="p1", new="p2", scenes=("parts",)),
    "index: view": Kind(
        "ALTER VIEW IF EXISTS public.ix RENAME TO was; ALTER VIEW public.my_view RENAME TO ix",
        "ALTER VIEW public.ix RENAME TO my_view; ALTER VIEW IF EXISTS public.was RENAME TO ix",
    ),
    "index: table": Kind(
        "ALTER VIEW IF EXISTS public.ix RENAME TO was; ALTER TABLE public.my_table RENAME TO ix",
        "ALTER TABLE public.ix RENAME TO my_table; ALTER VIEW IF EXISTS public.was RENAME TO ix",
    ),
    "keys": Kind("ALTER TABLE app.t RENAME k TO x; ALTER TABLE app.t RENAME l TO k; ALTER TABLE app.t RENAME x TO l"),
    "included": Kind(
        "ALTER TABLE app.t RENAME v TO x; ALTER TABLE app.t RENAME w TO v; ALTER TABLE app.t RENAME x TO w"
    ),
    "key": Kind("ALTER TABLE app.t RENAME k TO x", "ALTER TABLE app.t RENAME x TO k", fails=True),
    "primary key": Kind("ALTER TABLE app.t RENAME id TO x", "ALTER TABLE app.t RENAME x TO id", fails=True),
    "type": Kind("ALTER TYPE kind RENAME TO feeling", fails=True),
    "retyped": Kind("ALTER TABLE app.t ALTER v TYPE numeric USING v + 0.5"),
    "joining": Kind(swap("app.n1", "app.n_new"), old="n1", new="n_new", scenes=("parts",)),
}


class Blocked(BaseException):
    """The exchange would wait for the command: it comes after the command, or before it."""


class Pooled(Database):
    """Keeps its sessions: to open one takes longer than the statements in it."""

    def __init__(self, dsn: str, application_name: str = "roir") -> None:
        super().__init__(dsn, application_name, poolclass=QueuePool, pool_size=10)


class Exchange:
    """An exchange before statement number `at` of a database's sessions. outcome: `none`, `done` or `blocked`."""

    def __init__(self, database: Database, kind: Kind, oids: dict[str, int], at: int) -> None:
        self.database, self.kind, self.oids, self.at = database, kind, oids, at
        self.seen = 0
        self.outcome = "none"
        self.before = ""

    def __enter__(self) -> Exchange:
        event.listen(self.database.engine, "before_cursor_execute", self._look)
        return self

    def __exit__(self, *_: object) -> None:
        event.remove(self.database.engine, "before_cursor_execute", self._look)

    def _look(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.before = " ".join(statement.split())[:150]
            self.come()

    def come(self) -> None:
        """Does the exchange, and a write to the tables that had or have the name, if a lock doesn't prevent it."""
        session = psycopg2.connect(self.database.dsn)
        try:
            self._write(session, self.kind.old, 5)
            sql(session, "SET lock_timeout = '30ms'")
            try:
                sql(session, self.kind.how)
                session.commit()
                self.outcome = "done"
            except psycopg2.errors.UndefinedTable:
                # The command has dropped the table.
                session.rollback()
                return
            except psycopg2.errors.LockNotAvailable:
                session.rollback()
                self.outcome = "blocked"
                raise Blocked from None
            self._write(session, self.kind.old, 8)
            self._write(session, self.kind.new, 9)
        finally:
            session.close()

    def _write(self, session: psycopg2.extensions.connection, name: str, number: int) -> None:
        oid = self.oids.get(name)
        if oid is None:
            return
        sql(session, "SET lock_timeout = '30ms'")
        [(table, column)] = sql(
            session,
            "SELECT a.attrelid::regclass::text, quote_ident(attname) FROM pg_attribute a "
            "WHERE attrelid = %s AND attnum = 3",
            oid,
        ) or [(None, None)]
        if table is None:
            return
        # A write that changes an included column, and one that deletes a row. Columns are found by place: their names
        # may have changed.
        [(first,)] = sql(
            session, f"SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = {oid} AND attnum = 1"
        )
        try:
            sql(session, f"UPDATE {table} SET {column} = 1000 + {number} WHERE {first}::text = '{number}'")
            sql(session, f"DELETE FROM {table} WHERE {first}::text = '{number + 10}'")
            session.commit()
        except psycopg2.errors.LockNotAvailable:
            session.rollback()
        except psycopg2.errors.ObjectInUse:  # it is being attached
            session.rollback()
        except psycopg2.Error:
            session.rollback()
            if not self.kind.fails:
                raise


# --- the states before a command, each made once and cloned


def definition() -> IndexDefinition:
    return IndexDefinition.parse(INDEX, "app.t", "k", "v")


def options(**more: Any) -> BuildOptions:
    few: dict[str, Any] = {"parallelism": 1, "ranges": 2, "segments": 2, "batch_rows": 15, "scan": "key"}
    return BuildOptions(**{**few, "lock_patience_s": 1, **more})


def begun(database: Database, **more: Any) -> None:
    prepare.prepare(database, definition(), options(**more), "test")
    written(database)


def written(database: Database) -> None:
    """Writes that the delta then holds."""
    run_sql(
        database.dsn,
        "UPDATE app.t SET k = 'e' WHERE id IN (3, 33)",
        "DELETE FROM app.t WHERE id IN (4, 34)",
        "INSERT INTO app.t VALUES (44, 'a', 44, -44, 'a')",
        "UPDATE app.t SET v = v + 1 WHERE id = 6",
    )


def to(database: Database, *legs: Callable[[Database, Run], object]) -> None:
    run = start_run(database, INDEX, "test", take_over=True)
    with driving(database, run):
        for leg in legs:
            leg(database, run)


def folded(database: Database, run: Run) -> None:
    steps.fold_delta(database, run)


def built(database: Database, **more: Any) -> None:
    begun(database, **more)
    to(database, steps.build_all)


def sealed(database: Database, **more: Any) -> None:
    begun(database, **more)
    to(database, steps.build_all, steps.seal_all)


def switched(database: Database) -> None:
    begun(database)
    to(database, steps.build_all, steps.seal_all, switch.switch)


def to_publish(database: Database, **more: Any) -> None:
    begun(database, **more)
    to(database, steps.build_all, steps.seal_all, switch.switch, folded)


def published(database: Database) -> None:
    begun(database, verify="none")
    to(database, steps.build_all, steps.seal_all, lifecycle.run_phases)


def again(database: Database, **more: Any) -> None:
    prepare.prepare(database, IndexDefinition.parse(INDEX, None, None, None), options(**more), "test")


def rebuilding(database: Database, **more: Any) -> None:
    published(database)
    again(database, **more)
    run_sql(database.dsn, "UPDATE app.t SET k = 'b' WHERE id = 7", "DELETE FROM app.t WHERE id = 10")


def from_index(database: Database) -> None:
    rebuilding(database, scan="index")


def by_block(database: Database) -> None:
    begun(database, scan="block")


def rebuild_to_publish(database: Database) -> None:
    rebuilding(database)
    to(database, steps.build_all, steps.seal_all, switch.switch, folded)


def rebuilt(database: Database, **more: Any) -> None:
    rebuilding(database, verify="none", **more)
    to(database, steps.build_all, steps.seal_all, lifecycle.run_phases)


def expired(database: Database) -> None:
    rebuilt(database, revert_window_s=0)


def aborting(database: Database) -> None:
    begun(database)
    requests.request_abort(database, INDEX, "test")


def spoiled(database: Database) -> None:
    """Damages a published index: one entry is wrong, one is missing, one is too many."""
    published(database)
    run_sql(
        database.dsn,
        "UPDATE roir_data.g1 SET c3 = -1 WHERE c2 = 3",
        "DELETE FROM roir_data.g1 WHERE c2 = 30",
        "INSERT INTO roir_data.g1 VALUES ('a', 59, 5)",
    )


def gone(database: Database) -> None:
    """Detaches one partition without roir, and attaches one with rows."""
    published(database)
    run_sql(
        database.dsn, "ALTER TABLE app.t DETACH PARTITION app.p1", f"ALTER TABLE app.t ATTACH PARTITION app.n1 {BOUNDS}"
    )


def leaving(database: Database) -> None:
    """A partition's entries are still to be removed, and there are new rows in its bounds."""
    published(database)
    run_sql(
        database.dsn,
        "SELECT roir.detach_partition('app.p1')",
        "CREATE TABLE app.p1b PARTITION OF app.t FOR VALUES FROM (0) TO (30)",
        "INSERT INTO app.t SELECT * FROM app.p1 WHERE id < 12",
    )


def nothing(database: Database) -> None:
    """Leaves the table without an index."""


def remove(database: Database) -> None:
    with database.transaction() as connection:
        rows = remove_entries.leaving(connection)
    for row in rows:
        remove_entries.remove(database, row, lambda _line: None, 1)


def verified(database: Database, **more: Any) -> None:
    lifecycle.verify(database, INDEX, VerifyOptions(parallelism=1, **more), "test")


Command = Callable[[Database], object]
COMMANDS: dict[str, tuple[Callable[[Database], None], Command]] = {
    "plan": (nothing, lambda database: dry_run.run(database, definition(), options(), patience_s=1)),
    "prepare": (nothing, lambda database: prepare.prepare(database, definition(), options(), "test")),
    "prepare by blocks": (
        nothing,
        lambda database: prepare.prepare(database, definition(), options(scan="block"), "test"),
    ),
    "prepare a rebuild": (published, again),
    "build": (begun, lambda database: to(database, steps.build_all)),
    "build by blocks": (by_block, lambda database: to(database, steps.build_all)),
    "build by index": (from_index, lambda database: to(database, steps.build_all)),
    "seal": (built, lambda database: to(database, steps.seal_all)),
    "switch": (sealed, lambda database: to(database, switch.switch)),
    "fold": (switched, lambda database: to(database, folded)),
    "finalize": (to_publish, lambda database: lifecycle.finalize(database, INDEX, "test", take_over=True)),
    "publish": (to_publish, lambda database: to(database, publish.publish)),
    "publish a rebuild": (rebuild_to_publish, lambda database: to(database, publish.publish)),
    "verify": (spoiled, verified),
    "repair": (spoiled, lambda database: verified(database, repair=True)),
    "repair a part": (spoiled, lambda database: verified(database, repair=True, sample=100)),
    "revert": (rebuilt, lambda database: revert.revert(database, INDEX, "test", patience_s=1)),
    "abort": (begun, lambda database: abort.abort(database, INDEX, "test", patience_s=1)),
    "abort a rebuild": (rebuilding, lambda database: abort.abort(database, INDEX, "test", patience_s=1)),
    "drop": (rebuilt, lambda database: drop.drop_index(database, INDEX, "test", patience_s=1)),
    "clean-up": (expired, clean_up.clean_up),
    "clean-up of an abort": (aborting, clean_up.clean_up),
    "clean-up of a partition": (leaving, clean_up.clean_up),
    "removal": (leaving, remove),
    "sync": (gone, lambda database: sync.sync_partitions(database, "app.t", "test", patience_s=1)),
    "attach": (published, lambda database: attach.attach_partition(database, "app.t", "app.n1", BOUNDS, "test")),
    "attach in a rebuild": (
        rebuilding,
        lambda database: attach.attach_partition(database, "app.t", "app.n1", BOUNDS, "test"),
    ),
    "detach": (published, lambda database: detach.detach_partition(database, "app.p1", "test", patience_s=1)),
    "detach and drop": (
        published,
        lambda database: detach.detach_partition(database, "app.p1", "test", drop=True, patience_s=1),
    ),
    "status": (rebuilding, lambda database: status(database)),
    "init": (rebuilding, install.init),
}
OF_PARTS = ("clean-up of a partition", "removal", "sync", "attach", "attach in a rebuild", "detach", "detach and drop")


def members() -> Sequence[tuple[str, str, str]]:
    """The combinations of command, scene and kind that are possible."""
    return [
        (command, scene, kind)
        for command in COMMANDS
        for scene in SCENES
        for kind, how in KINDS.items()
        if scene in how.scenes
        and (scene == "parts" or command not in OF_PARTS)
        # A partitioned table's rebuild doesn't read the index.
        and (scene == "plain" or command != "build by index")
        # The server refuses the change if there is a generation.
        and (kind != "retyped" or COMMANDS[command][0] is nothing)
        and (kind != "joining" or command in ("attach", "attach in a rebuild", "sync"))
    ]


def oids(dsn: str) -> dict[str, int]:
    """The oids of the tables by their names before the exchange."""
    session = steps.session(dsn)
    with suppress(psycopg2.Error):
        found = sql(session, "SELECT n, to_regclass('app.' || n)::oid::bigint FROM unnest(%s) n", list(TABLES))
    session.close()
    return {name: oid for name, oid in found if oid is not None}
