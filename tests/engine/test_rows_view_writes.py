"""Writes by the rows view of an index have the results and effects that they have on a table without partitions."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine.database import Database
from tests.comparison import compare
from tests.conftest import run_sql
from tests.engine import rows_ground
from tests.engine.rows_ground import PARTS
from tests.engine.steps import session, sql
from tests.engine.test_locks import in_thread, pid_of, wait_until, watching

COLUMNS = "id, d, k, v::text, n, g, note, at"
VALUES: dict[str, tuple[str, ...]] = {
    "d": ("0", "3", str(PARTS - 1), str(PARTS), "NULL"),
    "k": ("'1'", "'7'", "NULL", "''", "'new'"),
    "v": ("NULL", "'{}'", "'{\"a\":1}'", "'{\"a\": 1}'"),
    "n": ("1", "2", "500", "1000", "NULL"),
    "note": ("'kept'", "'refused'", "'x'", "'longer than ten'", "NULL"),
    "at": ("NULL", "'2021-01-01'", "'infinity'"),
    "g": ("DEFAULT",),
}
SETS = {
    **VALUES,
    "n": ("n + 1", "n", "n * 300", "2", "DEFAULT"),
    "k": ("k || 'a'", *VALUES["k"], "DEFAULT"),
    "d": ("d", "(d + 1) % 12", "12"),
}
CONDITIONS = (
    *("k = '7'", "k IS NULL", "k > '15' AND d < 6", "k IN ('1', '2', 'new')", "note = 'kept'", "n % 7 = 0", "false"),
    *("id = {id}", "id = {id} AND n < 60", "id IN (SELECT n FROM {t} WHERE k = '3')", "v ->> 'a' = '1' AND d = 3"),
)
KINDS = ("insert", "insert", "select", "identity", "update", "update", "update", "delete", "from", "using", "with")
WAITS = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
FULL = f"SELECT {COLUMNS} FROM {{}} ORDER BY 1, 2, 3"


def statement(draw: random.Random) -> str:
    """A statement on table {t}."""
    number = draw.randint(1, 130)
    where = draw.choice(CONDITIONS).format(id=number, t="{t}")
    sets = ", ".join(f"{name} = {draw.choice(SETS[name])}" for name in draw.sample(sorted(SETS), draw.randint(1, 2)))
    match draw.choice(KINDS):
        case "insert":
            return insert(draw)
        case "select":
            return f"INSERT INTO {{t}} (id, d, k, n) SELECT id + 1000, d, k, n FROM {{t}} WHERE {where} ORDER BY id"
        case "identity":
            return f"INSERT INTO {{t}} (d, k, at) VALUES ({draw.randrange(PARTS + 1)}, 'seq', DEFAULT)"
        case "update":
            return f"UPDATE {{t}} SET {sets} WHERE {where}"
        case "from":
            pairs = "(VALUES ('7', 1), ('8', 2), ('new', 3)) y (a, b)"
            return f"UPDATE {{t}} x SET n = x.n + y.b FROM {pairs} WHERE x.k = y.a"
        case "using":
            return "DELETE FROM {t} x USING (VALUES ('7'), ('7'), ('9')) y (a) WHERE x.k = y.a AND x.n % 2 = 1"
        case "with":
            first = f"UPDATE {{t}} SET {sets} WHERE {where} RETURNING id"
            return f"WITH u AS ({first}) DELETE FROM {{t}} WHERE id = {number}"
    return f"DELETE FROM {{t}} WHERE {where}"


def insert(draw: random.Random) -> str:
    """Inserts up to three rows, with values or DEFAULT for some columns."""
    columns = draw.sample(sorted(VALUES.keys() - {"d"}), draw.randint(0, 3))
    rows = []
    for _ in range(draw.randint(1, 3)):
        given = [draw.choice((*VALUES[name], "DEFAULT")) for name in columns]
        rows.append(f"({', '.join([str(draw.randint(100, 300)), str(draw.randrange(PARTS)), *given])})")
    return f"INSERT INTO {{t}} ({', '.join(['id', 'd', *columns])}) VALUES {', '.join(rows)}"


@dataclass(frozen=True)
class Outcome:
    error: str | None
    count: int
    rows: list[tuple[object, ...]]


def run(user: psycopg2.extensions.connection, text: str) -> Outcome:
    """Runs a statement after a savepoint, to which an error returns."""
    with user.cursor() as cursor:
        cursor.execute("SAVEPOINT here")
        try:
            cursor.execute(text)
            rows = sorted(cursor.fetchall(), key=str) if cursor.description else []
            return Outcome(None, cursor.rowcount, rows)
        except psycopg2.Error as error:
            cursor.execute("ROLLBACK TO here")
            return Outcome(error.pgcode, -1, [])


def play(dsn: str, seed: int, steps_: int = 25) -> None:
    """Random statements on the view and on the twin: same outcomes, same rows, and the index stays right."""
    draw = random.Random(seed)
    user = session(dsn, draw.choice(("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")))
    errors = 0
    for _ in range(steps_):
        text = statement(draw)
        if draw.random() < 0.6 and not text.startswith("WITH"):
            text += f" RETURNING {'x.' if ' x ' in text else ''}id, d, k, v::text, n, g, note, at"
        ours, theirs = run(user, text.replace("{t}", "ix_rows")), run(user, text.replace("{t}", "twin.t"))
        if theirs.error == "40001" or ours.error == "21000":
            continue
        assert ours == theirs, (seed, text)
        assert sql(user, FULL.format("ix_rows")) == sql(user, FULL.format("twin.t")), (seed, text)
        errors += theirs.error is not None
        if draw.random() < 0.2:
            user.commit()
    user.commit()
    user.close()


@pytest.fixture
def ground(dsn: str) -> str:
    rows_ground.make(dsn)
    return dsn


@pytest.mark.sample(4, 16)
@pytest.mark.parametrize("whole", [False, True], ids=["partitioned twin", "twin"])
@pytest.mark.parametrize("seed", range(40))
def test_random_statements_do_what_they_do_on_the_twin(dsn: str, seed: int, whole: bool) -> None:
    rows_ground.make(dsn, whole=whole)
    play(dsn, seed)
    counts = compare(Database(dsn, "roir tests"), "ix")
    assert (counts.missing, counts.extra, counts.different) == (0, 0, 0)


def test_a_generated_column_is_refused_as_on_the_table(ground: str) -> None:
    user = session(ground)
    for text in ("INSERT INTO {} (id, d, g) VALUES (900, 1, 5)", "UPDATE {} SET g = 5 WHERE id = 7"):
        assert [run(user, text.format(name)).error for name in ("ix_rows", "t")] == ["428C9", "428C9"]


def test_copy_and_identity_columns_work(ground: str) -> None:
    user = session(ground)
    with user.cursor() as cursor:
        cursor.copy_expert("COPY ix_rows (d, k) FROM STDIN", io.StringIO("3\tcopied\n4\tcopied\n"))
    assert sql(user, "SELECT id, d, n, note FROM t WHERE k = 'copied' ORDER BY id") == [
        (1, 3, 1, "none"),
        (2, 4, 1, "none"),
    ]


def test_a_statement_that_gives_a_row_two_values_is_refused(ground: str) -> None:
    """PostgreSQL itself takes one of the values, any of them."""
    user = session(ground)
    text = "UPDATE ix_rows x SET n = y.b FROM (VALUES ('7', {}), ('7', {})) y (a, b) WHERE x.k = y.a"
    assert run(user, text.format(1, 2)).error == "21000"
    assert run(user, text.format(1, 1)) == Outcome(None, 6, [])


# The first change of a row, by another session; then what the statement by the view must do once it is committed.
CHANGES = {
    "another column": "UPDATE t SET n = n + 1 WHERE id = 7",
    "the key": "UPDATE t SET k = 'moved' WHERE id = 7",
    "another partition": "UPDATE t SET d = 11 WHERE id = 7",
    "the primary key": "UPDATE t SET id = 700 WHERE id = 7",
    "deleted": "DELETE FROM t WHERE id = 7",
    "to the same": "UPDATE t SET at = at - interval '1 day' WHERE id = 7",
    "locked": "SELECT FROM t WHERE id = 7 FOR UPDATE",
    "another row": "UPDATE t SET n = n + 1 WHERE id = 8",
}
HARMLESS = {"to the same", "locked", "another row"}
OURS = {
    "UPDATE": "UPDATE ix_rows SET n = n + 10 WHERE k = '7' AND id = 7{} RETURNING n",
    "UPDATE of the key": "UPDATE ix_rows SET k = 'ours' WHERE k = '7' AND id = 7{} RETURNING n",
    "DELETE": "DELETE FROM ix_rows WHERE k = '7' AND id = 7{} RETURNING n",
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_changes_while_the_statement_waits_is_never_overwritten(
    ground: str, change: str, ours: str, ends: str, isolation: str
) -> None:
    """The statement has its snapshot, and waits for the other session's lock on the row."""
    other, user, watch = session(ground), session(ground, isolation), watching(ground)
    sql(other, CHANGES[change])
    results: list[list[tuple[int]]] = []
    thread, errors = in_thread(lambda: results.append(sql(user, OURS[ours].format(""))))
    if change != "another row":
        wait_until(watch, WAITS, pid_of(user))
    sql(other, ends)
    thread.join()
    judge(ground, change if ends == "COMMIT" else "another row", isolation, results, errors, user)


@pytest.mark.sample(4)
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_changed_since_it_was_read_is_never_overwritten(
    ground: str, change: str, ours: str, isolation: str
) -> None:
    """The statement has read the row, and waits before it writes: its new snapshot finds the other's change at once."""
    other, user, watch = session(ground), session(ground, isolation), watching(ground)
    gate = session(ground)
    sql(gate, "SELECT pg_advisory_lock(1)")
    # The sub-select's result is needed after the row was read.
    waits = " AND n = (SELECT 7 + 0 * length(pg_advisory_lock(1)::text))"
    results: list[list[tuple[int]]] = []
    thread, errors = in_thread(lambda: results.append(sql(user, OURS[ours].format(waits))))
    wait_until(watch, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event = 'advisory'", pid_of(user))
    sql(other, CHANGES[change])
    other.commit()
    sql(gate, "SELECT pg_advisory_unlock(1)")
    thread.join()
    judge(ground, change, isolation, results, errors, user)


def judge(
    dsn: str,
    change: str,
    isolation: str,
    results: list[list[tuple[int]]],
    errors: list[BaseException],
    user: psycopg2.extensions.connection,
) -> None:
    """Either the row was as it was read, and was written; or an error asks to retry, and nothing was written."""
    harmless = change in HARMLESS - ({"to the same"} if isolation != "READ COMMITTED" else set())
    if isolation == "SERIALIZABLE" and errors:
        harmless = False
    assert [type(error).__name__ for error in errors] == ([] if harmless else ["SerializationFailure"])
    if harmless:
        assert len(results[0]) == 1
        user.commit()
    user.close()
    plain = session(dsn)
    assert sql(plain, FULL.format("ix_rows")) == sql(plain, FULL.format("t"))
    assert sql(plain, "SELECT count(*) FROM t WHERE n >= 17 AND n < 27 AND id IN (7, 700)")[0][0] <= 1
    if change == "another column":
        assert sql(plain, "SELECT n FROM t WHERE id = 7") == [(8,)]


@dataclass(frozen=True)
class Variant:
    """A broken form of a function: one text in its place for another."""

    function: str
    text: str
    broken: str


SAME = "concat_ws(' AND ', same, {}), returned)"
ERROR = "RAISE serialization_failure USING"
VARIANTS = {
    "overwrites what changed": Variant("row_write_statement", SAME.format("unchanged"), SAME.format("NULL")),
    "returns the row as it was given": Variant(
        "write_row", "RETURN written;", "RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;"
    ),
    "counts a change of another session as no row": Variant("write_row", ERROR, f"RETURN NULL; {ERROR}"),
    "sets all columns": Variant("row_write_statement", "IF c.given OR", "IF c.makes = '' AND c.now IS NOT NULL OR"),
    "writes a row twice": Variant("write_row", "written.mine AND written.done", "false"),
    "takes a removal of its own for another's": Variant(
        "is_removed_by_me", "RETURN roir.is_mine(removed_by)", "RETURN false"
    ),
    "reads with a newer snapshot": Variant("row_of", " STABLE ", " VOLATILE "),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_variant_is_found(ground: str, name: str, deadlocks_meant: None) -> None:
    variant = VARIANTS[name]
    [(text,)] = sql(
        session(ground), "SELECT pg_get_functiondef(p.oid) FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace "
        "WHERE nspname = 'roir' AND proname = %s", variant.function,
    )  # fmt: skip
    broken = text.replace(variant.text, variant.broken)
    assert broken != text
    run_sql(ground, broken)
    with pytest.raises(AssertionError):
        find(ground)


def find(dsn: str) -> None:
    """The checks that find the variants. Each leaves table and twin as they were."""
    user = session(dsn)
    for text in (
        "UPDATE {t} SET n = n + 1 WHERE k = '7' RETURNING n, g, at",
        "INSERT INTO {t} (id, d) VALUES (900, 1) RETURNING n, g, note, at",
        "DELETE FROM {t} x USING (VALUES ('7'), ('7')) y (a) WHERE x.k = y.a",
        "UPDATE {t} x SET note = 'y' FROM (VALUES ('8'), ('8')) y (a) WHERE x.k = y.a",
    ):
        assert run(user, text.replace("{t}", "ix_rows")) == run(user, text.replace("{t}", "twin.t")), text
        assert sql(user, FULL.format("ix_rows")) == sql(user, FULL.format("twin.t"))
        user.rollback()
    # A trigger of one column, and the right on one column.
    run_sql(dsn, "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$",
            "CREATE TRIGGER no BEFORE UPDATE OF note ON t FOR EACH ROW EXECUTE FUNCTION no()")  # fmt: skip
    assert run(user, "UPDATE ix_rows SET n = n + 1 WHERE k = '7'").error is None
    user.rollback()
    run_sql(dsn, "DROP TRIGGER no ON t")
    _wait_and_lose(dsn)
    # A statement that changes the table while it reads by the view.
    body = "BEGIN UPDATE t SET n = 900; RETURN 1; END"
    run_sql(dsn, f"CREATE FUNCTION change() RETURNS int LANGUAGE plpgsql AS $$ {body} $$")
    changing = "(SELECT change() AS c OFFSET 0) c, LATERAL (SELECT n FROM ix_rows WHERE c.c = 1) x"
    assert sql(user, f"SELECT count(*) FROM {changing} WHERE n = 900") == [(0,)]
    user.close()


def _wait_and_lose(dsn: str) -> None:
    other, user, watch = session(dsn), session(dsn), watching(dsn)
    sql(other, CHANGES["another column"])
    thread, errors = in_thread(lambda: sql(user, OURS["UPDATE"].format("")))
    wait_until(watch, WAITS, pid_of(user))
    other.commit()
    thread.join()
    user.close()
    assert [type(error).__name__ for error in errors] == ["SerializationFailure"]
