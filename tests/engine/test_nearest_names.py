"""A name that doesn't exist is refused with the nearest that does, on every surface; all that is wrong, at once."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import pytest

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.source import catalog
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.nearest import nearest, nearest_qualified
from airflow_roir.options import BuildOptions
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.following import no_spark as no_spark
from tests.engine.steps import session, sql
from tests.test_cli import here

IX = "shop.orders_by_status"


@pytest.fixture(scope="module")
def shop(server: str) -> Iterator[str]:
    """A shop whose names differ in schema, in case, and by a letter."""
    run_sql(server, "CREATE DATABASE nearest_names TEMPLATE roir_template")
    dsn = database_dsn(server, "nearest_names")
    run_sql(
        dsn,
        'CREATE SCHEMA shop; CREATE SCHEMA "Sales"; CREATE SCHEMA hidden',
        'CREATE TABLE shop.orders (day int, id int, status text, "Total" int, PRIMARY KEY (day, id)) '
        "PARTITION BY RANGE (day)",
        "CREATE TABLE shop.orders_2025 PARTITION OF shop.orders FOR VALUES FROM (0) TO (10)",
        'CREATE TABLE "Sales".invoices (id int PRIMARY KEY, k int)',
        "CREATE TABLE hidden.secrets (id int PRIMARY KEY)",
        "INSERT INTO shop.orders SELECT i % 10, i, 's', i FROM generate_series(1, 50) i",
    )
    steps.make_index(Database(dsn), IX, "shop.orders", "status")
    yield dsn
    run_sql(server, "DROP DATABASE nearest_names WITH (FORCE)")


# By the kind of a name: wrong ones, each with what was meant; and the surfaces that take one, as {}.
NAMES: dict[str, tuple[tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "table": (
        (
            ("shop.ordrs", "shop.orders"),
            ("orders", "shop.orders"),
            ("public.orders", "shop.orders"),
            ('shop."Orders"', "shop.orders"),
            ("Sales.invoices", '"Sales".invoices'),
            ("shop.invoice", '"Sales".invoices'),
        ),
        (
            "build x --table {} --keys k",
            "plan x --table {} --keys k",
            "doctor --table {}",
            "sync-partitions {}",
            "attach-partition {} shop.orders_2025 FOR",
        ),
    ),
    "column": (
        (("stauts", "status"), ("total", '"Total"'), ('"Status"', "status")),
        (
            "build x --table shop.orders --keys {}",
            "build x --table shop.orders --keys id --include {}",
            "plan x --table shop.orders --keys {}",
        ),
    ),
    "index": (
        (
            ("shop.ordrs_by_status", IX),
            ("orders_by_staus", IX),
            ("public.orders_by_status", IX),
            ('"Orders_By_Status"', IX),
        ),
        (
            "build {}",
            "plan {}",
            *(f"{command} {{}}" for command in ("status", "pause", "resume", "abort", "revert", "drop", "verify")),
            "change {} --priority 1",
            "compact {} --without-spark",
            "duplicates {}",
            "report {}",
            "SELECT roir.pause('{}')",
            "SELECT roir.resume('{}')",
            "SELECT roir.change('{}', priority => 1)",
            "SELECT roir.abort('{}')",
        ),
    ),
    "partition": (
        (("shop.orders_2O25", "shop.orders_2025"), ("orders_2025", "shop.orders_2025")),
        ("detach-partition {}", "attach-partition shop.orders {} FOR"),
    ),
    "schema": ((("sales.x", '"Sales"'), ("shopp.x", "shop")), ("build {} --table shop.orders --keys id",)),
    "operation": ((("99", "1 is the newest, of index shop.orders_by_status"),), (f"report {IX} --operation {{}}",)),
}


def refused(dsn: str, surface: str, name: str) -> str:
    if surface.startswith("SELECT"):
        with pytest.raises(psycopg2.Error) as error:
            sql(session(dsn), surface.format(name))
        return str(error.value)
    done = here(dsn, *(part.replace("{}", name) for part in surface.split()), code=1 if "doctor" in surface else 2)
    return f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("kind", "surface"), [(kind, surface) for kind, (_, surfaces) in NAMES.items() for surface in surfaces]
)
@pytest.mark.sample(3, 3)
def test_the_nearest_name_is_named(shop: str, kind: str, surface: str, no_spark: None) -> None:
    """Found: the refusal of a name said at most to quote it if it has capitals."""
    for name, meant in NAMES[kind][0]:
        said = refused(shop, surface, name)
        assert (meant if kind == "operation" else f"Did you mean {meant}?") in said, (name, said)


def test_a_name_that_is_like_none_names_none(shop: str) -> None:
    for surface in ("status {}", "SELECT roir.pause('{}')", "sync-partitions {}"):
        assert "Did you mean" not in refused(shop, surface, "nowhere")


def test_a_table_that_isn_t_there_is_named_once_with_its_schema(shop: str) -> None:
    """Found: "table shop.ordres doesn't exist in schema "shop"". A name alone needs the schemas that were searched."""
    said = refused(shop, "build x --table {} --keys id", "shop.nowhere")
    assert "table shop.nowhere doesn't exist; check the name" in said
    assert "table nowhere doesn't exist in schemas " in refused(shop, "build x --table {} --keys id", "nowhere")


def test_only_names_that_the_role_may_see_are_named(shop: str) -> None:
    def near(name: str, role: str | None = None) -> str:
        with Database(shop).transaction() as connection:
            if role is not None:
                connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
            return str(catalog.near(connection, QualifiedName(None, name), ["public"]))

    run_sql(shop, "CREATE ROLE seer; GRANT USAGE ON SCHEMA shop TO seer")
    try:
        assert (near("secret"), near("ordrs")) == ("hidden.secrets", "shop.orders")
        assert (near("secret", "seer"), near("ordrs", "seer")) == ("None", "None")
        run_sql(shop, "GRANT SELECT (id) ON shop.orders TO seer")
        assert (near("secret", "seer"), near("ordrs", "seer")) == ("None", "shop.orders")
    finally:
        run_sql(shop, "DROP OWNED BY seer", "DROP ROLE seer")


def typos(name: str) -> Iterator[str]:
    """The name with a letter left out, doubled, exchanged for another or for its neighbour."""
    for at in range(len(name)):
        yield name[:at] + name[at + 1 :]
        yield name[:at] + name[at] + name[at:]
        yield f"{name[:at]}x{name[at + 1 :]}"
        yield name[:at] + name[at : at + 2][::-1] + name[at + 2 :]


WORDS = ("orders", "orders_by_customer", "flights_by_plane", "email", "ordered_at", "customer_id", "total")


def test_every_typo_of_a_letter_finds_the_name_and_another_word_finds_none(dsn: str) -> None:
    """In Python, and in SQL, whose likeness is another one."""
    likeness = session(dsn)
    for word in WORDS:
        for typo in {*typos(word)}:
            assert nearest(typo, [word]) == word, typo
            [(alike,)] = sql(likeness, "SELECT roir.likeness(%s, %s)", typo, word)
            assert alike >= 0.5 or len(word) <= 6, (typo, word, alike)
        for other in ("payments", "warehouse_stock", "zip"):
            assert nearest(other, [word]) is None
            [(alike,)] = sql(likeness, "SELECT roir.likeness(%s, %s)", other, word)
            assert alike < 0.5


def test_of_equal_names_the_nearest_schema_is_named() -> None:
    known = [QualifiedName(*one.split(".")) for one in ("a.t", "Sales.t", "shop.t", "shop.tt")]
    assert nearest_qualified(QualifiedName("sales", "t"), known, ["sales"]) == QualifiedName("Sales", "t")
    assert nearest_qualified(QualifiedName(None, "T"), known, ["shop", "a"]) == QualifiedName("shop", "t")
    assert nearest_qualified(QualifiedName(None, "T"), known, ["x"]) == QualifiedName("Sales", "t")
    assert nearest_qualified(QualifiedName(None, "zzz"), known, ["x"]) is None


WRONG = {
    "names and values": (
        "build Sales.x --table shop.orders --keys stauts --include total,id --parallelism 0 --warn-after soon",
        (
            "6 errors:",
            'no schema "sales"',
            'no column "stauts"',
            'no column "total"',
            '"id" belongs to the primary key',
            "parallelism is 0",
            "--warn-after is 'soon'",
        ),
    ),
    "combinations": (
        "build x --table shop.orders --keys status,status --include status --nulls-not-distinct --census",
        ('key column "status" is repeated', "is a key column already", "only a unique index", "a census lists"),
    ),
    "several indexes": (
        "build x --table shop.orders --keys status --with nonsense --with y(stats) --with x(status) --ranges no",
        ("'nonsense' is no index", 'no column "stats"', "index x is named twice", "ranges is 'no'"),
    ),
    "names that can't be read": (
        "build a.b.c --table shop.ordrs --keys ,id --parallelism many",
        ("at most a schema and a name", "table shop.ordrs doesn't exist", "a name is empty", "parallelism is 'many'"),
    ),
    "a plan": (
        "plan Sales.x --table shop.orders --keys stauts --ranges 0 --measure -1",
        ('no schema "sales"', 'no column "stauts"', "ranges is 0", "measure is -1"),
    ),
    "a change": (
        "change shop.ordrs_by_status --parallelism 0 --priority high --throttle lag=1",
        ("4 errors:", "there is no index", "parallelism is 0", "priority is 'high'", "no signal lag"),
    ),
    "a resume": (
        "resume nowhere --batch-rows 5 --priority 999",
        ("3 errors:", "there is no index", "--batch-rows is 5", "--priority is 999"),
    ),
    "a verification": ("verify nowhere --sample x --slices 0", ("3 errors:", "no index", "--sample", "slices is 0")),
    "a compaction": (
        "compact nowhere --budget much --parallelism 0",
        ("3 errors:", "no index", "--budget", "parallelism"),
    ),
    "SQL": (
        "SELECT roir.change('{}', parallelism => 0, batch_rows => 5, windows => 'now', throttle => 'lag=1 x')",
        ("5 errors:", "no index nowhere", "parallelism is 0", "batch_rows is 5", "windows: now", "no signal lag"),
    ),
    "a resume by SQL": (
        "SELECT roir.resume('{}', parallelism => 0, priority => 999)",
        ("3 errors:", "parallelism", "prior"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.sample(3, 3)
def test_all_that_is_wrong_is_named_at_once(shop: str, case: str, no_spark: None) -> None:
    """Found: the first wrong name hid the others, and a wrong value all names."""
    surface, parts = WRONG[case]
    said = refused(shop, surface, "nowhere")
    for part in parts:
        assert part in said, (part, said)


def test_the_engine_names_all_objections(shop: str) -> None:
    definition = IndexDefinition.parse("nowhere.x", "shop.orders", "stauts", "total")
    with pytest.raises(InvalidInput) as error:
        lifecycle.prepare(Database(shop), definition, BuildOptions(on_duplicate="stop"))
    assert len(error.value.parts) == 4
    with pytest.raises(NotFound, match="Did you mean status"):
        lifecycle.prepare(Database(shop), IndexDefinition.parse("x", "shop.orders", "stauts"), BuildOptions())


def test_wrong_values_are_named_without_a_database() -> None:
    said = here(
        "host=127.0.0.1 port=1", "build", "x", "--table", "a.b.c", "--keys", "k", "--ranges", "0", code=2
    ).stderr
    assert "2 errors:" in said
