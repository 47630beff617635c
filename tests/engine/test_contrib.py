"""Types and triggers of contrib's extensions, where the server has them (Debian's and Ubuntu's packages do)."""

from __future__ import annotations

import itertools

import pytest

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import through_modes
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(2)


@pytest.fixture(params=["public", "ext"])
def schema(request: pytest.FixtureRequest) -> str:
    """The extension's schema. In neither are its operators found by a pinned search_path."""
    return str(request.param)


def create_extension(dsn: str, name: str, schema: str = "public") -> None:
    user = steps.session(dsn)
    if not sql(user, "SELECT 1 FROM pg_available_extensions WHERE name = %s", name):
        pytest.skip(f"this server has no {name}")
    user.close()
    run_sql(dsn, f"CREATE SCHEMA IF NOT EXISTS {schema}", f"CREATE EXTENSION {name} SCHEMA {schema}")


VALUES = {
    "citext": ("'Abc'", "'aBC'", "'b'", "''"),
    "ltree": ("'Top.Science'", "'Top'", "'a.b.c'", "''"),
    "hstore": ("'a=>1, b=>NULL'", "''", "'b=>2, a=>1'", '\'"x y"=>"=>"\''),
}
# The values for a primary key: citext takes 'Abc' and 'aBC' for equal.
UNIQUE = {"citext": ("'Abc'", "'b'", "'C'", "''")}


@pytest.mark.parametrize("role", ["key", "primary key", "included"])
@pytest.mark.parametrize("name", VALUES)
def test_types(database: Database, dsn: str, name: str, role: str, schema: str) -> None:
    """Found: hstore as the first column of a primary key: a scan by key failed, since its operators have other names.
    It holds: refused: `<` and `>` must order the primary key.
    """
    create_extension(dsn, name, schema)
    if (name, role) == ("hstore", "primary key"):
        run_sql(dsn, f"CREATE TABLE t (p {schema}.hstore PRIMARY KEY, k text)")
        with pytest.raises(InvalidInput, match="that < and > don't order"):
            steps.begin(database)
        return
    kind = f"{schema}.{name}"
    values = UNIQUE.get(name, VALUES[name]) if role == "primary key" else VALUES[name]
    a, b, c, _ = (f"{value}::{kind}" for value in values)
    identity = "p, id" if role == "primary key" else "id"
    run_sql(dsn, f"CREATE TABLE t (id int NOT NULL, p {kind}, k text, v int, PRIMARY KEY ({identity}))")
    some = f"(ARRAY[{', '.join(values)}]::{kind}[])[i % 4 + 1]"

    def rows(first: int, last: int) -> str:
        return f"INSERT INTO t SELECT i, {some}, i % 3, i FROM generate_series({first}, {last}) i"

    run_sql(dsn, rows(1, 40))
    user = steps.session(dsn)
    numbers = itertools.count(100, 100)

    def write(mode: str) -> None:
        number = next(numbers)
        for statement in (
            f"UPDATE t SET p = {b} WHERE id % 8 = 0",
            # Back, and to texts that are equal but not the same.
            f"UPDATE t SET p = {a} WHERE id % 16 = 0",
            f"UPDATE t SET p = {b} WHERE id % 16 = 0",
            f"UPDATE t SET p = {c} WHERE id % 7 = 1",
            "UPDATE t SET p = NULL WHERE id % 10 = 3" if role != "primary key" else "DELETE FROM t WHERE id % 10 = 3",
            "DELETE FROM t WHERE id % 9 = 0",
            rows(number, number + 30),
            f"INSERT INTO t VALUES ({number + 50}, {b}, 'x', 1) ON CONFLICT ({identity}) DO UPDATE SET k = 'upsert'",
        ):
            sql(user, statement)
            user.commit()

    keys = {"key": "p", "primary key": "k", "included": "k"}[role]
    through_modes(database, write, keys=keys, include="v, p" if role == "included" else "v")
    user.close()


AUDIT = """
CREATE TABLE audit (id bigserial PRIMARY KEY, was jsonb, now jsonb);
CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit (was, now) VALUES (to_jsonb(OLD), to_jsonb(NEW));
    RETURN NULL;
END $$;
CREATE TRIGGER zz_audit AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION audit();
"""
TRIGGERS = {
    "audit": AUDIT,
    "tcn": "CREATE TRIGGER tcn AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW "
    "EXECUTE FUNCTION triggered_change_notification()",
    "moddatetime": "CREATE TRIGGER md BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION moddatetime(at)",
    "insert_username": "CREATE TRIGGER iu BEFORE INSERT OR UPDATE ON t FOR EACH ROW "
    "EXECUTE FUNCTION insert_username(who)",
    "autoinc": "CREATE SEQUENCE next_v; CREATE TRIGGER ai BEFORE INSERT OR UPDATE ON t FOR EACH ROW "
    "EXECUTE FUNCTION autoinc(v, next_v)",
    "lo": "CREATE TRIGGER l BEFORE UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION lo_manage(o)",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", TRIGGERS)
def test_triggers_that_extensions_add(database: Database, dsn: str, name: str) -> None:
    """They change rows before these are stored, write elsewhere, or notify; the index has the rows' last values."""
    if name != "audit":
        create_extension(dsn, name)
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int, at timestamp, who text, o oid)",
        TRIGGERS[name],
        "INSERT INTO t SELECT i, i % 5, 0, now(), 'me', lo_create(0) FROM generate_series(1, 60) i",
    )
    user = steps.session(dsn)

    def write(phase: str) -> None:
        for statement in (
            "UPDATE t SET k = k || 'x', v = 0 WHERE id % 2 = 0",
            "UPDATE t SET o = lo_create(0), who = NULL WHERE id % 3 = 0",
            "DELETE FROM t WHERE id % 5 = 0",
            "INSERT INTO t SELECT i, 'again', 0 FROM generate_series(1, 60) i "
            "ON CONFLICT (id) DO UPDATE SET k = 'c', v = 0",
        ):
            sql(user, statement)
            user.commit()

    through_modes(
        database,
        write,
        keys="who, k" if name == "insert_username" else "k, v",
        include="at, o" if name == "insert_username" else "at, who, o",
    )
    user.close()
    assert clean_up.clean_up(database).warnings == []
