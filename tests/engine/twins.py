"""A table with a unique index of ours, and a twin without partitions that has PostgreSQL's own constraint instead.

Both get the same statements: the index promises `UNIQUE (…) DEFERRABLE INITIALLY IMMEDIATE`.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import psycopg2
import psycopg2.errors
import psycopg2.extensions
from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import apply_delta, prepare, switch
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.unique_keys import AWAY, IDS, KEYS, PARTS, Kind, Menu, Template

INDEX = "ix"
TWIN = "twin"
PLAIN, PARTITIONED, NESTED = "plain", "partitioned", "partitioned twice"
LAYOUTS = (PLAIN, PARTITIONED, NESTED)
EXCLUSION_VIOLATION = "23P01"
UNIQUE_VIOLATION, FOREIGN_KEY_VIOLATION, SERIALIZATION_FAILURE = "23505", "23503", "40001"


def table(kind: Kind, layout: str, primary_key: str = "") -> list[str]:
    """DDL of table `t (id, part, …, v)`. primary_key: the words that follow its columns."""
    create = f"CREATE TABLE t (id int, part int, {kind.columns}, v int, PRIMARY KEY ({kind.primary_key}) {primary_key})"
    if layout == PLAIN:
        return [create]
    parts = [f"CREATE TABLE t{p} PARTITION OF t FOR VALUES IN ({p})" for p in range(PARTS - 1)]
    last = f"CREATE TABLE t{PARTS - 1} PARTITION OF t DEFAULT"
    if layout == NESTED:
        by = kind.primary_key.split(", ")[0]
        last = f"{last} PARTITION BY HASH ({by})"
        parts += [
            f"CREATE TABLE r{r} PARTITION OF t{PARTS - 1} FOR VALUES WITH (MODULUS 2, REMAINDER {r})" for r in (0, 1)
        ]
        parts.insert(-2, last)
    else:
        parts.append(last)
    return [f"{create} PARTITION BY LIST (part)", *parts]


def twin(kind: Kind, primary_key: str = "") -> list[str]:
    """DDL of the twin, for a session whose path begins with the twin's schema."""
    if kind.is_computed:
        # A constraint of unique keys can't have expressions; this kind can, and is checked at the same moment.
        excluded = f"EXCLUDE USING btree ({kind.indexed} WITH =)" + (f" WHERE ({kind.where})" if kind.where else "")
        constraint = f"CONSTRAINT {INDEX} {excluded} DEFERRABLE INITIALLY IMMEDIATE"
        return [*table(kind, PLAIN, primary_key), f"ALTER TABLE t ADD {constraint}"]
    nulls = "NULLS NOT DISTINCT " if kind.nulls_not_distinct else ""
    constraint = f"CONSTRAINT {INDEX} UNIQUE {nulls}({kind.indexed}) DEFERRABLE INITIALLY IMMEDIATE"
    return [*table(kind, PLAIN, primary_key), f"ALTER TABLE t ADD {constraint}"]


def begin(database: Database, kind: Kind, **options: object) -> Run:
    """Prepares the unique index and starts a run."""
    definition = IndexDefinition.parse(
        INDEX,
        "t",
        kind.indexed,
        kind.include,
        unique=True,
        nulls_not_distinct=kind.nulls_not_distinct,
        where=kind.where,
    )
    options = {"ranges": 3, "segments": 3, "batch_rows": 7, **options}
    prepared = prepare.prepare(database, definition, BuildOptions(**options), "test")  # type: ignore[arg-type]
    return start_run(database, prepared.index, "test", take_over=True)


@dataclass(frozen=True)
class Outcome:
    """The end of a statement: '' or its SQLSTATE, and the unique constraint that the error names. count: of rows."""

    error: str = ""
    about: tuple[str | None, ...] = ()
    count: int = -1
    text: str = ""

    @property
    def is_duplicate(self) -> bool:
        """True if our index, or the twin's constraint, has refused the statement."""
        return self.error == UNIQUE_VIOLATION and self.about[2] == INDEX


class Side:
    """A user's session on one of the two tables."""

    def __init__(self, dsn: str, schema: str) -> None:
        self.session = psycopg2.connect(dsn)
        self.schema = schema
        sql(self.session, f"SET search_path = {schema}, public; SET lock_timeout = '2s'; SET timezone = 'UTC'")
        self.session.commit()

    def run(self, statement: str) -> Outcome:
        """Runs a statement in the open transaction."""
        try:
            with self.session.cursor() as cursor:
                if statement.startswith("COPY "):
                    head, _, query = statement.partition(" FROM ")
                    rows = io.StringIO()
                    cursor.copy_expert(f"COPY ({query}) TO STDOUT", rows)
                    rows.seek(0)
                    cursor.copy_expert(f"{head} FROM STDIN", rows)
                else:
                    cursor.execute(statement)
                return Outcome(count=cursor.rowcount)
        except psycopg2.Error as error:
            diag = error.diag
            schema = "public" if diag.schema_name == self.schema else diag.schema_name
            about = (schema, diag.table_name, diag.constraint_name, diag.message_detail, diag.message_primary)
            code = UNIQUE_VIOLATION if error.pgcode == EXCLUSION_VIOLATION else error.pgcode or str(error)
            return Outcome(code, about, text=str(error))

    def rows(self) -> list[str]:
        """All rows, as text."""
        return [row for (row,) in sql(self.session, "SELECT t::text FROM t ORDER BY 1")]


@dataclass
class Tally:
    """Counts of a comparison."""

    statements: int = 0
    refused: int = 0
    # Refused on both sides, if several keys are duplicates and each side names another one.
    another_key: int = 0
    other_errors: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    folded: int = 0

    def told(self) -> str:
        """The counts, in one line."""
        share = self.refused / max(self.statements, 1)
        return (
            f"{self.statements} statements, {self.refused} refused ({share:.0%}), {self.another_key} name another key, "
            f"other errors {dict(self.other_errors)}, {self.retried} with 40001, {self.folded} delta rows folded"
        )


class Twins:
    """Both tables, filled alike, with the index in direct mode.

    ddl: of both sides, after the tables (triggers, other tables). deferrable: of the primary key. more: statements.
    """

    def __init__(
        self,
        dsn: str,
        kind: Kind,
        layout: str = PARTITIONED,
        seed: int = 1,
        ddl: Sequence[str] = (),
        deferrable: bool = False,
        more: tuple[Template, ...] = (),
    ) -> None:
        self.dsn = dsn
        self.kind = kind
        self.chance = random.Random(seed)
        self.menu = Menu(kind, self.chance, deferrable, more)
        self.tally = Tally()
        self.log: list[str] = []
        self.database = Database(dsn, "roir tests")
        primary_key = "DEFERRABLE" if deferrable else ""
        values = kind.of("i", self.chance)
        fill = (
            f"INSERT INTO t (id, part, {kind.names}, v) SELECT i, i % {PARTS}, {values}, i "
            f"FROM generate_series(1, {IDS}) i"
        )
        run_sql(dsn, *kind.needs, f"CREATE SCHEMA {TWIN}")
        self.ours, self.theirs = Side(dsn, "public"), Side(dsn, TWIN)
        for side, made in ((self.ours, table(kind, layout, primary_key)), (self.theirs, twin(kind, primary_key))):
            for statement in (*made, *ddl, fill, "ANALYZE t"):
                sql(side.session, statement)
            side.session.commit()
        self.run = begin(self.database, kind)
        steps.build_all(self.database, self.run)
        steps.seal_all(self.database, self.run)
        switch.switch(self.database, self.run)
        self.look: Connection = self.database.engine.connect()
        with self.look.begin():
            self.job: Job = load_job(self.look, self.run)
        self.watcher = steps.session(dsn)
        sql(self.watcher, "SET lock_timeout = '5s'")
        self.watcher.commit()
        self.base, self.delta = physical.base(self.job.generation_id), physical.delta(self.job.generation_id)
        self.direct = True
        self.isolation = "READ COMMITTED"
        # Since the transaction began: the delta was folded in part; the table was truncated.
        self.moved = self.emptied = False

    def close(self) -> None:
        self.look.close()
        self.watcher.close()
        for side in (self.ours, self.theirs):
            side.session.close()
        self.database.engine.dispose()

    # -- the operation

    def mix(self) -> None:
        """Spreads the entries over base and delta, with all sorts of stale ones that capture mode can leave."""
        entry = self.job.entry
        columns = ", ".join(entry.physical())
        projection = ", ".join(column.of("t") for column in entry.columns)
        identity, rest = entry.identity_positions, list(range(entry.key, entry.identity))
        own = ", ".join(f"m.c{i + 1}" for i in identity)
        names = ", ".join(f"c{i + 1}" for i in identity)
        other = ", ".join(("o" if i in rest else "m") + f".c{i + 1}" for i in identity)
        apart = " OR ".join(f"o.c{i + 1} <> m.c{i + 1}" for i in rest) or "false"
        regular = " AND ".join(f"m.c{i + 1} IS DISTINCT FROM NULL" for i in range(entry.key))
        seed = self.chance.randrange(1000)
        stale_values = self.kind.of("g", self.chance)
        stale = (
            f"(SELECT 1 + g % {IDS} + {AWAY} * (g % 2), g % {PARTS}, {stale_values}, NULL::int "
            f"FROM generate_series(2, {KEYS + 8}) g WHERE g NOT IN (SELECT coalesce({self.kind.number}, -1) FROM t)) "
            f"t (id, part, {self.kind.names}, v)"
        )
        stale_columns = ", ".join(column.of("t") for column in entry.columns[: entry.identity])
        # Entries with a NULL in the key are distinguished by (key, pk): left out here.
        stale_regular = " AND ".join(f"{c.of('t')} IS DISTINCT FROM NULL" for c in entry.columns[: entry.key])
        user = self.watcher
        sql(
            user,
            f"DELETE FROM {self.base}; DELETE FROM {self.delta}; "
            f"CREATE TEMP TABLE mixed ON COMMIT DROP AS SELECT *, row_number() OVER () AS n, count(*) OVER () AS total "
            f"FROM (SELECT {projection} FROM t WHERE {entry.satisfied('t')} "
            f"ORDER BY md5(id::text || part || {seed})) t ({columns}); "
            f"INSERT INTO {self.base} ({columns}) SELECT {columns} FROM mixed WHERE n % 4 = 0; "
            f"INSERT INTO {self.base} ({names}) SELECT {own} FROM mixed m WHERE n % 4 = 2; "
            f"INSERT INTO {self.delta} ({columns}, state) SELECT {columns}, 'regular' FROM mixed WHERE n % 4 > 0; "
            "CREATE TEMP TABLE stale ON COMMIT DROP AS "
            f"SELECT {other} FROM mixed m JOIN mixed o ON o.n = m.n % m.total + 1 WHERE m.n % 4 = 3 AND ({apart}) "
            f"AND {regular}; "
            f"INSERT INTO stale SELECT {stale_columns} FROM {stale} WHERE {stale_regular}; "
            f"INSERT INTO {self.delta} ({names}, state) SELECT {names}, 'antimatter' FROM stale",
        )
        if entry.enforced:
            sql(user, f"INSERT INTO {self.base} ({names}) SELECT {names} FROM stale WHERE {self._drawn('stale')}")
        user.commit()

    def _drawn(self, name: str) -> str:
        """A condition for some rows of a table; the same rows for the same seed."""
        return f"(hashtext({name}::text) + {self.chance.randrange(1000)}) % 4 <> 0"

    def fold_step(self) -> None:
        """Folds a part of the delta, without a wait."""
        first = self.chance.choice((0, 0, 1))
        with self.database.connect() as connection:
            folded = steps.fold_blocks(
                connection, apply_delta.Folding(connection, self.job.generation_id, self.job.entry), first, first + 1
            )
        self.tally.folded += folded.rows
        self.moved = self.moved or folded.rows > 0

    def fold_some(self) -> None:
        """Folds one or two rows of the delta. A step by blocks would take all of these small deltas."""
        with self.database.connect() as connection, connection.begin():
            worker = apply_delta.Folding(connection, self.job.generation_id, self.job.entry)
            ctids = sql(self.watcher, f"SELECT ctid::text FROM {self.delta} WHERE state <> 'ghost' ORDER BY 1")
            self.watcher.commit()
            if not ctids:
                return
            (some,) = self.chance.choice(ctids)
            execute(connection, "SET LOCAL lock_timeout = '500ms'")
            folded = worker.fold(f"d.ctid = '{some}'::tid")
        self.tally.folded += folded.rows
        self.moved = self.moved or folded.rows > 0

    def publish(self) -> None:
        """Folds and publishes."""
        steps.fold_and_publish(self.database, self.run)
        self.direct = False

    # -- the comparisons

    def statement(self, statement: str) -> Outcome:
        """Runs a statement on both sides, and checks that the outcomes are the same."""
        self.log.append(statement)
        self.tally.statements += 1
        for side in (self.ours, self.theirs):
            sql(side.session, "SAVEPOINT here")
        ours, theirs = self.ours.run(statement), self.theirs.run(statement)
        if ours.error == SERIALIZATION_FAILURE != theirs.error and self.isolation != "READ COMMITTED":
            # 40001 is allowed if others, the fold among them, wrote since the snapshot.
            assert self.moved, self.told(f"40001 without a reason: {ours.text}")
            self.tally.retried += 1
            return ours
        for side, outcome in ((self.ours, ours), (self.theirs, theirs)):
            sql(side.session, "ROLLBACK TO here" if outcome.error else "RELEASE here")
        if ours.error:
            self.tally.refused += 1
        if ours.error not in ("", UNIQUE_VIOLATION):
            self.tally.other_errors[ours.error] += 1
        if self.menu.more and {ours.error, theirs.error} == {UNIQUE_VIOLATION, FOREIGN_KEY_VIOLATION}:
            return ours  # the order of rows decides which of both comes first
        # A partitioned table and a plain one report the same counts of rows.
        alike = (ours.error, ours.count) == (theirs.error, theirs.count)
        if alike and (ours.is_duplicate or theirs.is_duplicate):
            alike = ours.about[:3] == theirs.about[:3] if self.kind.is_computed else ours.about == theirs.about
            # The order of rows decides which of several keys comes first, and partitions change that order. It also
            # decides which constraint comes first, if the primary key is checked at the end, too.
            if not alike and self.menu.deferrable and not (ours.is_duplicate and theirs.is_duplicate):
                alike = True
            elif not alike and (ours.about[:3], ours.about[4]) == (theirs.about[:3], theirs.about[4]):
                alike = statement.startswith("DO ") or self._is_one_of_several(statement, ours)
                self.tally.another_key += alike
        assert alike, self.told(f"ours: {ours}\ntheirs: {theirs}")
        return ours

    def _is_one_of_several(self, statement: str, ours: Outcome) -> bool:
        """True if the twin has that key twice while its constraint isn't checked."""
        twin = self.theirs.session
        sql(twin, "SAVEPOINT unchecked; SET CONSTRAINTS ALL DEFERRED")
        outcome = self.theirs.run(statement)
        found: set[str] = set()
        if not outcome.error:
            names = self.kind.indexed
            values = ", ".join(f"coalesce({name}::text, 'null')" for name in names.split(", "))
            same = " AND ".join(f"o.{name} IS NOT DISTINCT FROM t.{name}" for name in names.split(", "))
            twice = f"SELECT {values} FROM t WHERE (SELECT count(*) FROM t o WHERE {same}) > 1"
            found = {f"Key ({names})=({', '.join(key)}) already exists." for key in sql(twin, twice)}
        sql(twin, "ROLLBACK TO unchecked; SET CONSTRAINTS ALL IMMEDIATE")
        return bool(outcome.error) or ours.about[3] in found

    def begin(self, isolation: str) -> None:
        """Begins a transaction on both sides."""
        self.isolation, self.moved, self.emptied = isolation, False, False
        for side in (self.ours, self.theirs):
            side.session.rollback()
            sql(side.session, f"SET TRANSACTION ISOLATION LEVEL {isolation}")
            sql(side.session, "SELECT count(*) FROM pg_class")
        self.log.append(f"BEGIN ISOLATION LEVEL {isolation}")

    def end(self, commit: bool) -> None:
        """Ends both transactions alike, and checks that both sides have the same rows and the index is exact."""
        self.log.append("COMMIT" if commit else "ROLLBACK")
        errors = []
        for side in (self.ours, self.theirs):
            error = ""
            try:
                side.session.commit() if commit else side.session.rollback()
            except psycopg2.Error as found:
                error = found.pgcode or str(found)
                side.session.rollback()
            errors.append(error)
        assert errors[0] == errors[1], self.told(f"at the end: {errors}")
        self.check()

    def check(self) -> None:
        """Checks that both sides have the same rows, and that the index is their projection."""
        ours, theirs = self.ours.rows(), self.theirs.rows()
        for side in (self.ours, self.theirs):
            side.session.rollback()
        assert ours == theirs, self.told(f"only ours {set(ours) - set(theirs)}, only theirs {set(theirs) - set(ours)}")
        different = self.differences()
        assert not different, self.told(f"{different}")

    def differences(self) -> list[tuple[str, ...]]:
        """The entries that are missing or too many."""
        entry = self.job.entry
        columns = entry.physical()
        ours = f"SELECT {', '.join(columns)} FROM {self.base}"
        if self.direct:
            same = entry.equal("b.", "d.")
            ours = (
                f"SELECT {', '.join(entry.physical(prefix='b.'))} FROM {self.base} b WHERE NOT EXISTS "
                f"(SELECT FROM {self.delta} d WHERE d.state <> 'ghost' AND {same}) "
                f"UNION ALL SELECT {', '.join(columns)} FROM {self.delta} WHERE state = 'regular'"
            )
        values = ", ".join(column.of("t") for column in entry.columns)
        source = f"SELECT {values} FROM public.t t WHERE {entry.satisfied('t')}"
        a, b = (f"SELECT x::text FROM ({one}) x" for one in (ours, source))
        found = sql(
            self.watcher,
            f"SELECT 'extra', x.* FROM ({a} EXCEPT ALL {b}) x UNION ALL "
            f"SELECT 'missing', x.* FROM ({b} EXCEPT ALL {a}) x",
        )
        self.watcher.rollback()
        return found

    def told(self, what: str) -> str:
        """The failure, and all statements since the last transaction began."""
        begun = max((i for i, line in enumerate(self.log) if line.startswith("BEGIN")), default=0)
        mode = "direct" if self.direct else "active"
        return f"{self.kind.name}, {mode} mode: {what}\n" + ";\n".join(self.log[begun:])

    # -- at random

    def transaction(self, levels: Sequence[str]) -> None:
        """Runs up to four statements, with folds between them."""
        self.begin(self.chance.choice(levels))
        for _ in range(self.chance.randint(1, 4)):
            # An open TRUNCATE holds the whole delta.
            if self.direct and not self.emptied and self.chance.random() < 0.3:
                self.log.append("-- fold")
                self.fold_some()
            statement = self.menu.statement()
            outcome = self.statement(statement)
            self.emptied = self.emptied or "TRUNCATE" in statement
            if outcome.error == SERIALIZATION_FAILURE:
                self.end(commit=False)
                return
        self.end(commit=self.chance.random() < 0.8)
