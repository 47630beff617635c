"""Keys of many types as bounds of new segments: they are read back as they were, and an attach reads no entries."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import event

from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.compacting import act, compact, left_over, segments, small
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(1)

SETUP = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE DOMAIN shorttext AS text CHECK (length(value) < 20)",
)
KEYS = {
    "int": "i % 50",
    "numeric": "(i % 20)::numeric * CASE WHEN i % 2 = 0 THEN 1.0 ELSE 1.00 END",
    "float8": "CASE i % 4 WHEN 0 THEN -0.0 WHEN 1 THEN 0.0 WHEN 2 THEN 'NaN' ELSE i / 7.0 END::float8",
    "text": "CASE i % 5 WHEN 0 THEN 'a''b' WHEN 1 THEN 'x%sy%(a)s' WHEN 2 THEN E'back\\\\slash' "
    "WHEN 3 THEN '$roir$' || i ELSE '' END || (i % 7)",
    "char(8)": "'k' || i % 30",
    "name": "('n' || i % 30)::name",
    '"char"': 'chr(65 + i % 20)::"char"',
    "uuid": "md5((i % 40)::text)::uuid",
    "bytea": "decode(md5((i % 40)::text), 'hex')",
    "timestamptz": "timestamptz '2020-01-01' + i % 40 * interval '1 hour'",
    "interval": "i % 40 * interval '1 hour'",
    "boolean": "i % 2 = 0",
    "mood": "(ARRAY['sad', 'ok', 'happy'])[1 + i % 3]::mood",
    "int[]": "ARRAY[i % 5, i % 3, NULL]",
    "pair": "ROW(i % 5, (i % 3)::text)::pair",
    "shorttext": "('p' || i % 40)::shorttext",
    "money": "(i % 40)::money",
    "jsonb": "to_jsonb(i % 40)",
    "varchar": "repeat(chr(65 + i % 26), 2000) || (i % 30)",
}
# A row type has no CHECK that shows where its NULLs are: their segment is read under the lock.
READ_UNDER_LOCK = ("pair",)


class Notices(list[str]):
    """Keeps all notices: psycopg2 keeps the last fifty."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def append(self, line: str) -> None:
        """Keeps the line."""
        self.said.append(line)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("key", KEYS)
def test_keys_as_bounds(dsn: str, key: str) -> None:
    """Split, merged and rewritten beside writes."""
    run_sql(
        dsn,
        *SETUP,
        f"CREATE TABLE t (id int PRIMARY KEY, k {key}, v text)",
        f"INSERT INTO t SELECT i, CASE WHEN i % 9 <> 0 THEN {KEYS[key]} END, repeat('v', i % 100) "
        "FROM generate_series(1, 600) i",
        "ANALYZE t",
    )
    database = small(dsn, 50)
    steps.make_index(database, keys="k", include="v", segments=3)
    said: list[str] = []

    def listen(connection: object, _record: object) -> None:
        with connection.cursor() as cursor:  # type: ignore[attr-defined]
            cursor.execute("SET client_min_messages = debug1")
        connection.commit()  # type: ignore[attr-defined]
        connection.notices = Notices(said)  # type: ignore[attr-defined]

    database.engine.dispose()
    database.engine.dispose()
    event.listen(database.engine, "connect", listen)

    def write(stage: str) -> None:
        if stage.endswith("indexing"):
            run_sql(
                dsn,
                "UPDATE t SET v = v || '!' WHERE id % 37 = 1",
                "DELETE FROM t WHERE id % 41 = 3",
                "INSERT INTO t SELECT id + 1000, k, v FROM t WHERE id % 43 = 2 ON CONFLICT DO NOTHING",
            )

    at = segments(dsn)
    compact(database, act("split", at[1], parts=3), act("rewrite", 0), between=write)
    steps.assert_exact(database)
    if len(segments(dsn)) > 2:
        compact(database, act("merge", *segments(dsn)[1:]), between=write)
    assert {status for (status,) in sql(session(dsn), "SELECT status FROM roir.compaction_unit")} == {"done"}
    write("indexing")
    steps.assert_exact(database)
    assert left_over(dsn) == []
    # Each table is read once, when it was new and empty: its CHECK then tells the swap what an attach needs.
    read = re.findall(r'verifying table "(\w+)"', "".join(said))
    assert read
    if key not in READ_UNDER_LOCK:
        assert len(read) == len(set(read))
        assert not any(name.endswith("_s000") for name in read)
