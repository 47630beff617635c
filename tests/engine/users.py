"""The users of the state machine: a session of each isolation level on one table. They write, read and never wait."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import psycopg2
import psycopg2.errors
import psycopg2.extensions
from hypothesis import strategies as st

from tests.engine import steps
from tests.engine.steps import sql

# Few rows, so that the users meet.
ROWS = 12
ISOLATIONS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
WRITES = (
    "UPDATE {t} SET k = '{k}' WHERE id = {i}",
    "UPDATE {t} SET k = '{k}' WHERE id = {i}; UPDATE {t} SET k = (id % 3)::text WHERE id = {i}",
    "UPDATE {t} SET k = NULL WHERE id BETWEEN {i} AND {i} + 3",
    "UPDATE {t} SET v = v + 1 WHERE id = {i}",
    # Only the row's place changes.
    "UPDATE {t} SET v = v WHERE id BETWEEN {i} AND {i} + 2",
    "DELETE FROM {t} WHERE id = {i}",
    "INSERT INTO {t} VALUES ({i}, '{k}', 0)",
    "INSERT INTO {t} VALUES ({i}, '{k}', 0) ON CONFLICT (id) DO UPDATE SET k = excluded.k",
    "DELETE FROM {t} WHERE id = {i}; INSERT INTO {t} VALUES ({i}, '{k}', 7)",
    "UPDATE {t} SET id = {j} WHERE id = {i}",
    # Two rows change places.
    "UPDATE {t} SET id = -1 WHERE id = {i}; UPDATE {t} SET id = {i} WHERE id = {j}; "
    "UPDATE {t} SET id = {j} WHERE id = -1",
    "MERGE INTO {t} USING (VALUES ({i}), ({j})) s (i) ON id = s.i WHEN MATCHED AND v > 5 THEN DELETE "
    "WHEN MATCHED THEN UPDATE SET v = v + 3 WHEN NOT MATCHED THEN INSERT VALUES (s.i, '{k}', 1)",
    "UPDATE {t} SET k = '{k}' WHERE id = {i} RETURNING touch('{t}', {j})",
    "UPDATE {t} SET k = '{k}' WHERE id = {i} RETURNING touch('{t}', {i})",
    "SAVEPOINT s; DELETE FROM {t} WHERE id IN ({i}, {j}); ROLLBACK TO s; UPDATE {t} SET v = 0 WHERE id = {j}",
    "TRUNCATE {t}",
    "INSERT INTO {t} SELECT i, (i % 3)::text, i FROM generate_series(1, 12) i ON CONFLICT DO NOTHING",
    "COPY {t} FROM PROGRAM 'echo {i},{k},5' (FORMAT csv)",
)
# A statement that is nested in another one.
TOUCH = (
    "CREATE OR REPLACE FUNCTION touch(t text, i int) RETURNS void LANGUAGE plpgsql AS "
    "$$ BEGIN EXECUTE format('UPDATE %I SET k = ''inner'', v = v + 1 WHERE id = $1', t) USING i; END $$"
)
# Errors that a user's statement may get beside others'. A write that would wait gives up.
EXPECTED = (
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.SerializationFailure,
    psycopg2.errors.UniqueViolation,
    psycopg2.errors.CardinalityViolation,
    psycopg2.errors.TriggeredDataChangeViolation,
)


@dataclass(frozen=True)
class Write:
    """A statement of one session. commit: its transaction ends with it."""

    session: int
    sql: str
    i: int
    j: int
    k: str
    commit: bool


sessions = st.integers(0, len(ISOLATIONS) - 1)
ids = st.integers(1, ROWS + 2)
writes = st.builds(Write, sessions, st.sampled_from(WRITES), ids, ids, st.sampled_from("012"), st.booleans())


class Users:
    """Sessions on table `table (id, k, v)`, with the index of that name, if it is there."""

    def __init__(self, dsn: str, table: str, index: str) -> None:
        self.table = table
        self.index = index
        self.sessions = [steps.session(dsn, isolation) for isolation in ISOLATIONS]
        for session in self.sessions:
            sql(session, "SET lock_timeout = '20ms'")
            session.commit()

    def write(self, write: Write, disturbing: bool = False) -> None:
        """Runs a user's write. disturbing: in the middle of an engine step, for which the write may have to wait."""
        session = self.sessions[write.session]
        try:
            sql(session, write.sql.format(t=self.table, i=write.i, j=write.j, k=write.k))
        except EXPECTED as error:
            waited = isinstance(error, psycopg2.errors.LockNotAvailable)
            assert not waited or disturbing or self._open(session), "a user's statement waits for nobody's (I6)"
            session.rollback()
            self.met(error)
        if write.commit:
            self.commit(write.session)

    def met(self, error: psycopg2.Error) -> None:
        """Called with an expected error of a user's statement. Does nothing here."""

    def commit(self, number: int) -> None:
        with suppress(*EXPECTED):
            self.sessions[number].commit()

    def commit_all(self) -> None:
        for number in range(len(self.sessions)):
            self.commit(number)

    def read(self, number: int) -> None:
        """Checks that index and source agree in one snapshot, the reader's own uncommitted writes included. A snapshot
        that is too old may be refused.
        """
        session = self.sessions[number]
        ((there,),) = sql(session, "SELECT to_regclass(%s) IS NOT NULL", self.index)
        if not there:
            return
        one, other = f"SELECT k, id, v FROM {self.index}", f"SELECT k, id, v FROM {self.table}"
        try:
            different = sql(session, f"({one} EXCEPT ALL {other}) UNION ALL ({other} EXCEPT ALL {one})")
        except EXPECTED:
            session.rollback()
            return
        assert different == [], "index and source differ in one snapshot (I1)"

    def _open(self, but: psycopg2.extensions.connection) -> bool:
        idle = psycopg2.extensions.TRANSACTION_STATUS_IDLE
        return any(s is not but and s.info.transaction_status != idle for s in self.sessions)
