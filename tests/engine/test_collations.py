"""Collations of key and primary key: libraries that are exchanged, ICU, and those that find different texts equal."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import pytest

from airflow_roir.engine import clean_up, install
from airflow_roir.engine.control import run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.errors import InvalidInput, SourceChanged
from airflow_roir.operation import Status
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.stages import through_modes
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

# The libraries that report a version: ICU, if the server has it, or PostgreSQL's own since 17. libc's C reports none.
VERSIONED = """
SELECT quote_ident(collname) FROM pg_collation
 WHERE pg_collation_actual_version(oid) IS NOT NULL AND collisdeterministic
   AND collencoding IN (-1, pg_char_to_encoding('UTF8'))
 ORDER BY collname = 'und-x-icu' DESC, collname LIMIT 1
"""


@pytest.fixture
def collation(dsn: str) -> str:
    found = sql(steps.session(dsn), VERSIONED)
    if not found:
        pytest.skip("no collation of this server tells the version of its library: it has neither ICU nor its own")
    return str(found[0][0])


def make(dsn: str, pk: str, key: str) -> None:
    run_sql(
        dsn,
        f"CREATE TABLE t (id text COLLATE {pk} PRIMARY KEY, k text COLLATE {key}, v int)",
        "INSERT INTO t SELECT 'id ' || i, 'k ' || i % 7, i FROM generate_series(1, 60) i",
    )


def exchange(dsn: str, collation: str) -> None:
    """Makes the recorded version of the collation's library another one than today's."""
    run_sql(dsn, f"UPDATE pg_collation SET collversion = 'before' WHERE oid = '{collation}'::regcollation")


def exchange_for_entries(dsn: str, column: str) -> None:
    """Does the same for the entries that were sorted by it."""
    run_sql(
        dsn,
        "UPDATE roir.generation g SET entry = jsonb_set(entry, '{columns}', (SELECT jsonb_agg(CASE "
        f"WHEN c.value ->> 'source' = '{column}' THEN c.value || '{{\"collation_version\": \"before\"}}' ELSE c.value "
        "END ORDER BY c.position) FROM jsonb_array_elements(entry -> 'columns') WITH ORDINALITY c (value, position)))",
    )


def test_an_exchanged_library_under_the_primary_key_is_refused(database: Database, dsn: str, collation: str) -> None:
    """A scan by the primary key's index could miss rows. The index's own keys are safe: the build sorts them."""
    make(dsn, collation, '"C"')
    exchange(dsn, collation)
    with pytest.raises(InvalidInput, match=r"recorded as before.*REINDEX TABLE public\.t.*REFRESH VERSION"):
        steps.begin(database)
    run_sql(dsn, "REINDEX TABLE t", f"ALTER COLLATION {collation} REFRESH VERSION")
    steps.begin(database)


def test_an_exchanged_library_under_the_key_is_none_of_the_builds(database: Database, dsn: str, collation: str) -> None:
    make(dsn, '"C"', collation)
    exchange(dsn, collation)
    steps.make_index(database)
    steps.assert_exact(database)
    assert clean_up.clean_up(database).warnings == []


@pytest.mark.parametrize("column", ["id", "k"])
@pytest.mark.parametrize("phase", ["build", "finalize"])
def test_a_resume_under_another_library_fails(
    database: Database, dsn: str, collation: str, column: str, phase: str
) -> None:
    make(dsn, collation, collation)
    _, operation = steps.begin(database)
    if phase == "finalize":
        steps.build_all(database, operation)
        steps.seal_all(database, operation)
    exchange_for_entries(dsn, column)
    going_on = steps.build_all if phase == "build" else steps.fold_all
    with (
        pytest.raises(SourceChanged, match=rf'column "{column}" \(before, now .*[Aa]bort the operation'),
        run.driving(database, operation),
    ):
        going_on(database, operation)
    assert status(database)[0].status == Status.FAILED


@pytest.mark.parametrize("text", ["lower(k)", "k COLLATE {}"])
def test_the_library_of_an_expression_is_known(database: Database, dsn: str, collation: str, text: str) -> None:
    key = text.format(collation)
    make(dsn, '"C"', '"C"' if "COLLATE" in text else collation)
    steps.make_index(database, keys=f"{key} AS low")
    for _rebuild in range(2):
        assert clean_up.clean_up(database).warnings == []
        exchange_for_entries(dsn, "low")
        (warning,) = clean_up.clean_up(database).warnings
        assert f"of {text.split(' ')[0]}" in warning
        assert "lookups may miss entries" in warning
        steps.make_index(database, table=None, keys=None)


@pytest.mark.by_hand("sweeps")
def test_an_exchanged_library_under_a_published_index_is_told(database: Database, dsn: str, collation: str) -> None:
    make(dsn, '"C"', collation)
    steps.make_index(database)
    exchange_for_entries(dsn, "k")
    (warning,) = clean_up.clean_up(database).warnings
    assert "lookups may miss entries" in warning
    steps.make_index(database, table=None, keys=None)
    assert clean_up.clean_up(database).warnings == []


@pytest.fixture
def other_locale(server: str, pg: int, collation: str) -> Iterator[str]:
    """The DSN of a database whose own collation tells a version."""
    provider = "icu ICU_LOCALE 'und'" if "icu" in collation else "builtin BUILTIN_LOCALE 'C.UTF-8'"
    run_sql(server, f"CREATE DATABASE other_locale TEMPLATE template0 LOCALE_PROVIDER {provider}")
    yield database_dsn(server, "other_locale")
    run_sql(server, "DROP DATABASE other_locale WITH (FORCE)")


def test_the_databases_own_collation_counts_too(other_locale: str) -> None:
    database = Database(other_locale, "roir tests")
    install.init(database)
    make(other_locale, '"default"', '"default"')
    _, operation = steps.begin(database)
    run_sql(other_locale, "UPDATE pg_database SET datcollversion = 'before' WHERE datname = current_database()")
    with pytest.raises(InvalidInput, match="REFRESH COLLATION VERSION"):
        steps.begin(database, "other")
    steps.build_all(database, operation)
    exchange_for_entries(other_locale, "k")
    with pytest.raises(SourceChanged):
        steps.seal_all(database, operation)


@pytest.fixture
def icu(dsn: str) -> None:
    """Skips the test if the server is built without ICU."""
    if not sql(steps.session(dsn), "SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'"):
        pytest.skip("this server is built without ICU, as the embedded ones are; Debian's has it (--pg 15)")


# Case and accents don't count, digits count as numbers: neither the order of bytes nor the database's.
ICU = {
    "another order": "provider = icu, locale = 'de-u-kn-true-kf-upper'",
    "case insensitive": "provider = icu, locale = 'und-u-ks-level2', deterministic = false",
    "accent insensitive": "provider = icu, locale = 'und-u-ks-level1', deterministic = false",
}
TEXTS = ("a10", "A9", "á9", "Ä", "ae", "zoë", "ZOE", "straße", "STRASSE", "", "ﬁ", "fi", "e\u0301", "é")


@pytest.mark.parametrize("kind", ICU)
@pytest.mark.parametrize("as_primary_key", [False, True], ids=["key", "primary key too"])
@pytest.mark.usefixtures("icu")
def test_keys_in_icus_order(database: Database, dsn: str, kind: str, as_primary_key: bool) -> None:
    """In every mode the primary key distinguishes equal texts that aren't the same; they are kept as written."""
    run_sql(
        dsn,
        f"CREATE COLLATION odd ({ICU[kind]})",
        "CREATE TABLE t (id int, p text COLLATE odd, k text COLLATE odd, v int, PRIMARY KEY "
        + ("(p, id))" if as_primary_key else "(id))"),
    )
    user = steps.session(dsn)
    for n in range(60):
        text = TEXTS[n % len(TEXTS)]
        sql(user, "INSERT INTO t VALUES (%s, %s, nullif(%s, ''), %s)", n, text, text, n)
    user.commit()

    def write(mode: str) -> None:
        sql(user, "UPDATE t SET k = upper(k) WHERE id % 4 = 0")
        sql(user, "UPDATE t SET k = 'A' || k WHERE id % 9 = 0")
        sql(user, "UPDATE t SET p = lower(p) WHERE id % 5 = 0")
        sql(user, "UPDATE t SET p = upper(p), k = lower(k) WHERE id % 7 = 0")
        sql(user, "DELETE FROM t WHERE id % 11 = 3")
        user.commit()
        sql(user, "INSERT INTO t SELECT %s, p, k, v FROM t ORDER BY id LIMIT 1", 1000 + ord(mode[0]))
        user.commit()
        sql(user, "INSERT INTO t SELECT id, upper(p), k, -1 FROM t ON CONFLICT DO NOTHING")
        sql(user, "DELETE FROM t WHERE v = -1")
        user.commit()

    through_modes(database, write, include="v" if as_primary_key else "p,v", ranges=4)
    as_written = 'SELECT k COLLATE "C", id, p COLLATE "C", v FROM {} ORDER BY 1, 2, 3, 4'
    assert sql(user, as_written.format("ix")) == sql(user, as_written.format("t"))
    looked_up = "SELECT count(*) FROM {} WHERE k = 'zoë'"
    assert sql(user, looked_up.format("ix")) == sql(user, looked_up.format("t"))


@pytest.mark.parametrize("kind", ICU)
@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.usefixtures("icu")
def test_a_key_in_another_collation_than_its_columns(database: Database, dsn: str, kind: str, unique: bool) -> None:
    """With `email COLLATE case_insensitive` as its key, a unique index ignores case without `lower`."""
    run_sql(
        dsn,
        f"CREATE COLLATION odd ({ICU[kind]})",
        'CREATE TABLE t (id int PRIMARY KEY, k text COLLATE "C", v int)',
        "CREATE TABLE twin (LIKE t)",
        f"CREATE {'UNIQUE ' * unique}INDEX ON twin (k COLLATE odd)",
    )
    user = steps.session(dsn)
    for n in range(60):
        sql(user, "INSERT INTO t VALUES (%s, %s, %s)", n, f"{TEXTS[n % len(TEXTS)]}.{n}" if n else None, n)
    sql(user, "INSERT INTO twin SELECT * FROM t")
    user.commit()

    def write(mode: str) -> None:
        for change in (
            "UPDATE {} SET k = upper(k) WHERE id % 4 = 0",
            "UPDATE {} SET k = lower(k), v = v + 1 WHERE id % 3 = 0",
            f"INSERT INTO {{}} SELECT id + 10 * ascii('{mode}'), upper(k), v FROM t WHERE id BETWEEN 30 AND 34",
            f"INSERT INTO {{}} VALUES (5000 + ascii('{mode}'), 'Ann {mode}', 1)",
            f"INSERT INTO {{}} VALUES (6000 + ascii('{mode}'), 'ANN {mode}', 1)",
            "UPDATE {} SET k = NULL WHERE id = 11",
            "DELETE FROM {} WHERE id % 11 = 3",
        ):
            outcomes = []
            for table in ("twin", "t"):
                if mode == "capture" and outcomes == ["23505"]:
                    # A first build doesn't enforce its key yet.
                    continue
                try:
                    sql(user, change.format(table))
                except psycopg2.errors.UniqueViolation:
                    user.rollback()
                    outcomes.append("23505")
                else:
                    user.commit()
                    outcomes.append("done")
            assert len(set(outcomes)) == 1, (mode, change, outcomes)

    def same(_database: Database, index: str) -> None:
        ours = sql(user, f'SELECT kk COLLATE "C", id FROM {index} ORDER BY 1, 2')
        assert ours == sql(user, 'SELECT k COLLATE "C", id FROM t ORDER BY 1, 2')
        user.rollback()

    through_modes(database, write, keys="k COLLATE odd AS kk", include=None, ranges=4, compare=same, unique=unique)
    steps.make_index(database, table=None, keys=None)
    same(database, "ix")
    for text in ("zoë.5", "ANN active", "STRASSE.8"):
        found = sql(user, "SELECT id FROM ix WHERE kk = %s ORDER BY 1", text)
        assert found == sql(user, "SELECT id FROM t WHERE k = %s COLLATE odd ORDER BY 1", text)


@pytest.mark.usefixtures("icu")
def test_a_primary_key_that_finds_different_texts_equal(database: Database, dsn: str) -> None:
    """'a' and 'A' are one row: one entry, which follows the row's own spelling. So do watermarks."""
    run_sql(
        dsn,
        f"CREATE COLLATION odd ({ICU['case insensitive']})",
        "CREATE TABLE t (id text COLLATE odd PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT CASE i % 2 WHEN 0 THEN 'ID' ELSE 'id' END || i, i % 3, i FROM generate_series(1, 50) i",
    )
    user = steps.session(dsn)

    def write(mode: str) -> None:
        sql(user, "UPDATE t SET id = CASE WHEN v % 2 = 0 THEN lower(id) ELSE upper(id) END WHERE v % 5 = 0")
        sql(user, "DELETE FROM t WHERE id = 'iD3'")
        sql(user, "INSERT INTO t VALUES ('Id3', %s, 3)", mode)
        sql(user, "INSERT INTO t VALUES ('iD4', 'other', 4) ON CONFLICT (id) DO UPDATE SET id = EXCLUDED.id")
        user.commit()

    through_modes(database, write, include="v", ranges=4)
    assert sql(user, 'SELECT id COLLATE "C", k, v FROM ix ORDER BY 1') == sql(
        user, 'SELECT id COLLATE "C", k, v FROM t ORDER BY 1'
    )
    assert sql(user, "SELECT v FROM ix WHERE id = 'ID3'") == [(3,)]


@pytest.mark.usefixtures("icu")
def test_segments_and_partitions_by_icus_order(database: Database, dsn: str) -> None:
    """A partitioned source whose bounds are in ICU's order; ranges and segments are cut in it too."""
    run_sql(
        dsn,
        f"CREATE COLLATION odd ({ICU['another order']})",
        "CREATE TABLE t (p text COLLATE odd, id int, k text COLLATE odd, v int, PRIMARY KEY (p, id)) "
        "PARTITION BY RANGE (p)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (MINVALUE) TO ('x9')",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM ('x9') TO (MAXVALUE)",
        "INSERT INTO t SELECT 'x' || i % 20, i, 'X' || i % 13, i FROM generate_series(1, 200) i",
    )

    def write(mode: str) -> None:
        run_sql(
            dsn,
            "UPDATE t SET p = 'X' || (v + 7) % 20 WHERE id % 4 = 0",
            "DELETE FROM t WHERE p > 'x15' AND id % 5 = 0",
            "UPDATE t SET k = lower(k) WHERE id % 3 = 0",
        )

    through_modes(database, write, include="v", ranges=6, segments=4, batch_rows=20)


@pytest.mark.sample(0)
@pytest.mark.parametrize("by", ["", "PARTITION BY HASH (id)"], ids=["plain", "partitioned"])
def test_names_of_another_collation_than_that_of_their_type_are_written(database: Database, dsn: str, by: str) -> None:
    """A parameter of type name has its own collation: the capture's dynamic statements name the one that they need."""
    run_sql(
        dsn,
        f'CREATE TABLE t (id name COLLATE "POSIX" PRIMARY KEY, k name COLLATE "POSIX", v text) {by}',
        *(["CREATE TABLE t1 PARTITION OF t FOR VALUES WITH (MODULUS 1, REMAINDER 0)"] if by else []),
        "INSERT INTO t SELECT 'id ' || i, 'k ' || i % 7, nullif(i % 3, 1)::text FROM generate_series(1, 60) i",
    )

    def write(mode: str) -> None:
        user = steps.session(dsn)
        sql(user, "DELETE FROM t WHERE id IN (SELECT id FROM t ORDER BY id LIMIT 5)")
        sql(user, "UPDATE t SET v = CASE WHEN v IS NULL THEN 'was null' END WHERE k::text IN ('k 1', 'k 2')")
        sql(
            user,
            "UPDATE t SET k = NULL WHERE k::text = 'k 3' AND v IS NULL; "
            "UPDATE t SET id = id || '!' WHERE k::text = 'k 4'",
        )
        user.commit()

    through_modes(database, write, keys="k, v")
