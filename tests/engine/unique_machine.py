"""The state machine with a unique index: keys collide half of the time, and the reports of duplicates are true.

The source decides what is true: which of its rows share a key, in one snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import psycopg2
import psycopg2.errors
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import execute
from airflow_roir.errors import DuplicatesFound
from airflow_roir.operation import Status
from airflow_roir.options import BuildOptions
from tests.engine.disturbance import Disturbance
from tests.engine.machine import Machine
from tests.engine.steps import sql
from tests.engine.users import ROWS, Users, Write

SHARED = "SELECT k FROM public.{t} WHERE {which} GROUP BY k HAVING count(*) > 1"
ENFORCED = (
    "SELECT EXISTS (SELECT FROM roir.generation g JOIN roir.index i ON i.id = g.index_id "
    "WHERE i.name = %s AND g.capture_mode IN ('direct', 'active'))"
)


class UniqueUsers(Users):
    """Users whose keys are a few numbers. At first each row has its own."""

    def __init__(self, dsn: str, table: str, index: str, shared: str) -> None:
        super().__init__(dsn, table, index)
        self.shared = shared
        self.refused = 0
        self.look = psycopg2.connect(dsn)
        self.look.autocommit = True

    def write(self, write: Write, disturbing: bool = False) -> None:
        # The number of another row, or a number that no row has.
        key = str((write.i + 5 * int(write.k)) % (ROWS + 4)) if write.k.isdigit() else write.k
        own = write.sql.replace("(id % 3)::text", "id::text").replace("(i % 3)::text", "i::text")
        super().write(replace(write, k=key, sql=own), disturbing)

    def met(self, error: psycopg2.Error) -> None:
        """Checks that a refusal by the index comes only while it is enforced."""
        if isinstance(error, psycopg2.errors.UniqueViolation) and error.diag.constraint_name == self.index:
            self.refused += 1
            assert sql(self.look, ENFORCED, self.index) == [(True,)], "a duplicate is refused in capture mode (U1)"

    def heal(self) -> None:
        """Heals duplicates as a user does: of the rows that share a key all but one are deleted or get another key."""
        if not self.sessions[0].closed:
            self.commit_all()
        while True:
            found = sql(self.look, self.shared)
            if not found:
                return
            for (key,) in found:
                rows = sql(self.look, f"SELECT id FROM {self.table} WHERE k IS NOT DISTINCT FROM %s ORDER BY id", key)
                for number, (row,) in enumerate(rows[1:]):
                    # By a delete, or by a key of the row's own.
                    if number % 2:
                        sql(self.look, f"DELETE FROM {self.table} WHERE id = %s", row)
                    else:
                        sql(self.look, f"UPDATE {self.table} SET k = 'healed ' || id WHERE id = %s", row)

    def close(self) -> None:
        self.look.close()


class UniqueMachine(Machine):
    """The state machine with a unique index whose NULLs are distinct."""

    reached: Counter[str] = Counter()
    nulls_not_distinct = False
    users: UniqueUsers

    def _make_users(self, dsn: str) -> UniqueUsers:
        return UniqueUsers(dsn, self.table, self.index, self.shared)

    @property
    def shared(self) -> str:
        """SQL for the keys that several rows share."""
        return SHARED.format(t=self.table, which="true" if self.nulls_not_distinct else "k IS NOT NULL")

    def _rows(self) -> str:
        return f"INSERT INTO {self.table} SELECT i, i::text, i FROM generate_series(1, {ROWS}) i"

    def _begin(self, created: bool) -> None:
        definition = IndexDefinition.parse(self.index)
        if created:
            definition = IndexDefinition.parse(
                self.index, self.table, "k", self.include, unique=True, nulls_not_distinct=self.nulls_not_distinct
            )
        options = BuildOptions(
            ranges=3, segments=2, batch_rows=2, scan=self.scans[not created], lock_timeout_ms=20, lock_patience_s=0
        )
        prepare.prepare(self.database, definition, options)

    @contextmanager
    def _disturbed(self, meanwhile: list[Disturbance]) -> Iterator[None]:
        found = None
        with super()._disturbed(meanwhile):
            try:
                yield
            except DuplicatesFound as error:
                found = error
        if found is not None:
            self.reached["duplicates found"] += 1
            self._is_true(str(found), alone=not meanwhile)
            with suppress(Exception):
                requests.pause(self.database, self.index, "test", str(found))
            self._look()

    def _is_true(self, told: str, alone: bool) -> None:
        """Checks that the recorded rows are those that share their keys now. alone: there were no other writes."""
        with self.connection.begin():
            recorded = set(
                execute(
                    self.connection,
                    "SELECT concat(key ->> 0, '/', primary_key ->> 0) FROM roir.duplicate "
                    "WHERE operation_id = %(o)s AND healed_at IS NULL",
                    {"o": self.row.id},
                ).scalars()
            )
            same = f"EXISTS (SELECT FROM ({self.shared}) o WHERE o.k IS NOT DISTINCT FROM t.k)"
            rows = f"SELECT concat(k, '/', id) FROM public.{self.table} t WHERE {same}"
            real = set(execute(self.connection, rows).scalars())
        if alone:
            assert recorded == real, f"duplicates recorded {sorted(recorded)}, real {sorted(real)} (U2): {told}"
            assert real, f"no duplicate, and yet it says: {told} (U2)"

    def _finish(self) -> None:
        if self.row.status == Status.PAUSED:
            self.users.heal()
        self.advance(meanwhile=[])

    @initialize(published=st.sampled_from((0, 0, 0, 1)), phases=st.integers(0, 2))
    def start(self, published: int, phases: int) -> None:
        """Starts in a first build, before its switch, in most examples."""
        super().start(published, phases)

    @precondition(lambda self: self.row.status == Status.PAUSED)
    @rule()
    def heal(self) -> None:
        self.users.heal()

    @invariant()
    def is_unique(self) -> None:
        """Checks that from the first switch on no two rows share a key, and that no shared key is recorded."""
        try:
            with self.connection.begin():
                execute(self.connection, "SET LOCAL lock_timeout = '20ms'")
                enforced = {"active", "retired"} & set(self.generations.values()) or self.mode == "direct"
                if not enforced:
                    return
                shared = execute(self.connection, self.shared).scalars().all()
                assert not shared, f"rows share the keys {shared} of a unique index (U3)"
                if self.mode != "direct":
                    return
                left = "SELECT count(*) FROM roir.duplicate WHERE operation_id = %(o)s AND healed_at IS NULL"
                assert not execute(self.connection, left, {"o": self.row.id}).scalar(), "switched with a duplicate (U3)"
        except DBAPIError as error:
            if not isinstance(error.orig, psycopg2.errors.LockNotAvailable) or not self._is_truncated():
                raise

    def is_right(self) -> None:
        super().is_right()
        self.is_unique()

    def teardown(self) -> None:
        """Heals the duplicates, and carries everything to its end."""
        self.reached["refused"] += self.users.refused
        try:
            super().teardown()
        finally:
            self.users.close()


class EqualNullsMachine(UniqueMachine):
    """The same machine, with NULLs that are one key."""

    nulls_not_distinct = True
