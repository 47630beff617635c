"""Names of any shape, for schema, table, columns and index: none collides with ours, and none is more than a name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine import clean_up, install
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.source import catalog
from airflow_roir.errors import InvariantViolated
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import through_modes
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

COLUMNS = [
    *("line%no", "%s", "%(x)s", "%(w0)s", "%%", "a:b", ":name", "$roir$", "$1", "roir", "roir_", "$", "?"),
    *("OLD", "NEW", "old", "new", "tg_op", "TG_OP", "found", "careful", "found_entries", "one_snapshot", "state"),
    *("s", "d", "b", "t", "u", "n", "k0", "total", "c1", "c2", "c3", "xid8", "ctid ", "oid", "excluded", "EXCLUDED"),
    *(
        "x" * 63,
        "é" * 31,
        "日本語",
        "🦀",
        "line\nbreak",
        "tab\t",
        " ",
        "'",
        "''",
        "\\",
        '"',
        '""',
        'a"b',
        "`",
        "--",
        "/*",
    ),
    *("'; DROP TABLE t; --", '"; DROP TABLE t; --', "$$; DROP TABLE t; $$", "select", "user", "order", "a.b", "a,b"),
    *("Mixed Case", "record", "row", "value", "matched", "same", "present", "entries", "null", "array", "1", ")"),
]
GROUPS = [COLUMNS[start : start + 15] for start in range(0, len(COLUMNS), 15)]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: repr(names[0]))
def test_columns_may_be_called_anything(database: Database, dsn: str, names: list[str]) -> None:
    """Each name once, as a primary key, a key or an included column; then `id` and `v`."""
    names = [*names, "id", "v"]
    for number in range(0, len(names) - 2, 3):
        id_, k, v = map(quote, names[number : number + 3])
        table = f"t{number}"
        run_sql(
            dsn,
            f"CREATE TABLE {table} ({id_} int PRIMARY KEY, {k} text, {v} int)",
            f"INSERT INTO {table} SELECT i, nullif(i % 4, 3)::text, i FROM generate_series(1, 20) i",
        )

        def write(mode: str, table: str = table, id_: str = id_, k: str = k, v: str = v) -> None:
            user = steps.session(dsn)
            for statement in (
                f"UPDATE {table} SET {k} = {k} || 'x' WHERE {id_} IN (2, 3)",
                f"UPDATE {table} SET {id_} = {id_} + 100, {v} = -1 WHERE {id_} = (SELECT max({id_}) FROM {table})",
                f"DELETE FROM {table} WHERE {id_} = (SELECT min({id_}) FROM {table})",
            ):
                sql(user, statement)
            user.commit()

        through_modes(database, write, f"ix{number}", table, keys=k, include=v)


NAMES = ["Weird Schema", 'Order "Items"', "%s", "a.b", "x" * 63, "🦀\n", "'; DROP SCHEMA public; --", "1", "$roir$"]


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", NAMES)
def test_schema_table_and_index_may_be_called_anything(database: Database, dsn: str, name: str) -> None:
    schema, table, index = quote(name), f"{quote(name)}.{quote(name)}", f"{quote(name)}.{quote(name[:40] + ' ix')}"
    run_sql(
        dsn,
        f"CREATE SCHEMA {schema}",
        f"CREATE TYPE {schema}.{quote(name[:40] + ' t')} AS ENUM ('a', '%s', '')",
        f"CREATE TABLE {table} (id int PRIMARY KEY, k {schema}.{quote(name[:40] + ' t')})",
        f"INSERT INTO {table} SELECT i, (ARRAY['a', '%s', '', NULL])[1 + i % 4]::{schema}.{quote(name[:40] + ' t')} "
        "FROM generate_series(1, 20) i",
    )

    def write(mode: str) -> None:
        run_sql(dsn, f"UPDATE {table} SET k = '%s' WHERE id < 5", f"DELETE FROM {table} WHERE id = 6")

    through_modes(database, write, index, table)
    steps.make_index(database, index, None, None)
    steps.assert_exact(database, index)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ('"$user", public', ["public"]),
        ("nowhere, b, a", ["b", "a"]),
        ('"A,b", "a""b"', ["A,b", 'a"b']),
        ("A", ["a"]),
        ("", []),
    ],
)
def test_an_unqualified_name_is_looked_up_as_the_role_would(
    database: Database, dsn: str, path: str, expected: list[str]
) -> None:
    run_sql(dsn, "CREATE SCHEMA a", "CREATE SCHEMA b", 'CREATE SCHEMA "A,b"', 'CREATE SCHEMA "a""b"')
    [(name,)] = sql(steps.session(dsn), "SELECT current_database()")
    value = path or "''"
    run_sql(dsn, f"ALTER DATABASE {name} SET search_path = {value}")
    with database.transaction() as connection:
        assert catalog.default_schemas(connection) == expected
        for schema in reversed(expected):
            run_sql(dsn, f"CREATE TABLE {quote(schema)}.found (id int PRIMARY KEY)")
            source = catalog.read_source(connection, QualifiedName(None, "found"))
            assert source.name.schema == schema


# The change of the index's schema while the index is built, the message of the publish, and the remedy.
GONE = {
    "renamed": ("ALTER SCHEMA app RENAME TO other", 'schema "app" does not exist', "ALTER SCHEMA other RENAME TO app"),
    "renamed, another one made": (
        "ALTER SCHEMA app RENAME TO other",
        'schema "app" does not exist',
        "CREATE SCHEMA app",
    ),
    "closed": (
        "REVOKE CREATE ON SCHEMA app FROM app_maker",
        "permission denied",
        "GRANT CREATE ON SCHEMA app TO app_maker",
    ),
}


@pytest.mark.parametrize("how", GONE)
def test_a_publish_says_why_it_can_not_make_the_view(dsn: str, maker: str, how: str) -> None:
    """The operation can be resumed as soon as the schema is there again, and nothing that was built is lost."""
    statement, said, heal = GONE[how]
    database = Database(maker, "roir tests")
    run = steps.sealed(database, "app.ix", "app.t", "k")
    run_sql(dsn, statement)
    steps.fold_all(database, run)
    with pytest.raises(InvariantViolated, match=f"index app.ix: its view can't be made: {said}.*then try again"):
        steps.publish_all(database, run)
    run_sql(dsn, heal, "GRANT ALL ON SCHEMA app TO app_maker")
    steps.publish_all(database, start_run(database, "app.ix", "test", take_over=True))
    steps.assert_exact(database, "app.ix")


def test_a_clean_up_names_the_right_that_it_lacks(dsn: str, maker: str) -> None:
    """View and tables are right, and nothing has to be dropped."""
    database = Database(maker, "roir tests")
    steps.make_index(database, "app.ix", "app.t", "k")
    right = "Give the role that roir connects as this right"
    for lost, said, back in (
        (
            "REVOKE CREATE ON SCHEMA app FROM app_maker",
            f"index app.ix: its view can't be made: permission denied for schema app; nothing was changed. "
            f"{right}, then try again",
            "GRANT CREATE ON SCHEMA app TO app_maker",
        ),
        (
            "REVOKE SELECT ON pg_stat_activity FROM PUBLIC",
            "index app.ix can't be cleaned up: permission denied for view pg_stat_activity. "
            f"{right} again, then run roir clean-up",
            "GRANT SELECT ON pg_stat_activity TO PUBLIC",
        ),
    ):
        run_sql(dsn, lost)
        assert clean_up.clean_up(database).warnings[:1] == [said]
        run_sql(dsn, back)
    assert clean_up.clean_up(database).warnings == []


@pytest.fixture
def maker(dsn: str) -> Iterator[str]:
    """The DSN of app_maker, who has made the control schema; app.t is its table."""
    run_sql(dsn, "DROP ROLE IF EXISTS app_maker", "CREATE ROLE app_maker LOGIN")
    with closing(steps.session(dsn)) as user:
        [(name,)] = sql(user, "SELECT current_database()")
    run_sql(
        dsn,
        f"GRANT CREATE ON DATABASE {quote(name)} TO app_maker",
        "DROP SCHEMA roir, roir_data CASCADE",
        "CREATE SCHEMA app",
        "GRANT ALL ON SCHEMA app TO app_maker",
        "CREATE TABLE app.t (id int PRIMARY KEY, k text)",
        "INSERT INTO app.t SELECT i, i FROM generate_series(1, 9) i",
        "ALTER TABLE app.t OWNER TO app_maker",
    )
    makers = dsn.replace("//postgres:@", "//app_maker:@")
    install.init(Database(makers, "roir tests"))
    yield makers
    run_sql(dsn, "DROP OWNED BY app_maker CASCADE", "DROP ROLE app_maker")
