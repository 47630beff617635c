"""Django, as an application has it, beside an index: what its ORM, tests, fixtures and migrations do keeps it exact."""

from __future__ import annotations

import json
import unittest
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import DatabaseError, connection, migrations, models, transaction
from django.db.migrations.state import ProjectState
from django.db.models import F, Value
from django.db.models.functions import Concat
from django.test import TestCase, TransactionTestCase

from airflow_roir.engine import clean_up, drop
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.django_app import connect_to
from tests.engine.django_app.models import ByKey, Item

pytestmark = pytest.mark.sample(1)

APP = Item._meta.app_label
APP_CONFIG = "tests.engine.django_app"
ROWS = 100
REFUSED_BY_THE_VIEW = 'cannot .* view "ix"'


@pytest.fixture(autouse=True)
def application(database: Database, dsn: str) -> Iterator[None]:
    """The application's table has an index, and the guard is on."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int NOT NULL, note text NOT NULL DEFAULT '')",
        f"INSERT INTO t SELECT i, i % 7, i, 'n' || i FROM generate_series(1, {ROWS}) i",
    )
    steps.make_index(database, include="v")
    run_sql(dsn, "SELECT roir.guard()")
    connect_to(dsn)
    # Alone, since a flush makes the rows that Django's own applications need.
    apps.set_installed_apps([APP_CONFIG])
    yield
    apps.unset_installed_apps()
    connection.close()


def _fails_halfway() -> None:
    with transaction.atomic():
        Item.objects.filter(id=1).update(k="a")
        try:
            with transaction.atomic():
                Item.objects.filter(id__lt=50).delete()
                raise ValueError
        except ValueError:
            Item.objects.filter(id=2).update(k="b")


def _while_it_reads() -> None:
    with transaction.atomic():
        for entry in ByKey.objects.filter(k="3").iterator(chunk_size=2):
            Item.objects.filter(id=entry.id).update(k="moved")


MORE = [Item(id=90 + i, k=f"bulk {i}", v=i) for i in range(30)]
WRITES: dict[str, Callable[[], object]] = {
    "save": lambda: Item(id=7, k="saved", v=1).save(),
    "create": lambda: Item.objects.create(id=ROWS + 1, k="created", v=1),
    "update": lambda: Item.objects.filter(k="3").update(k=None, v=F("v") + 1),
    "update by an expression": lambda: Item.objects.update(k=Concat(Value("x"), F("k"))),
    "update or create": lambda: Item.objects.update_or_create(id=3, defaults={"k": "other"}),
    "bulk create": lambda: Item.objects.bulk_create([Item(id=one.id + 100, k=one.k, v=one.v) for one in MORE]),
    "ignore conflicts": lambda: Item.objects.bulk_create(MORE, ignore_conflicts=True),
    "update conflicts": lambda: Item.objects.bulk_create(
        MORE, update_conflicts=True, unique_fields=["id"], update_fields=["k"]
    ),
    "bulk update": lambda: Item.objects.bulk_update([Item(id=i, k=f"bulk {i}", v=0) for i in range(40)], ["k", "v"]),
    "delete": lambda: Item.objects.filter(v__gt=10).exclude(k="2").delete(),
    "delete one": lambda: Item.objects.get(id=5).delete(),
    "lock and save": transaction.atomic(lambda: Item.objects.select_for_update().get(id=5).save()),
    "a savepoint that fails": _fails_halfway,
    "while it reads the index": _while_it_reads,
}


@pytest.mark.parametrize("what", WRITES)
def test_what_the_orm_writes_is_in_the_index(database: Database, what: str) -> None:
    WRITES[what]()
    assert sorted(ByKey.objects.values_list()) == sorted(Item.objects.values_list("id", "k", "v"))
    steps.assert_exact(database)


@pytest.mark.parametrize("base", [TestCase, TransactionTestCase])
def test_its_tests_leave_the_index_as_the_table(database: Database, base: type[TransactionTestCase]) -> None:
    """A TestCase rolls back; a TransactionTestCase commits, and truncates all tables at its end."""

    class OfTheirs(base):  # type: ignore[misc, valid-type]
        def test_it(self) -> None:
            Item.objects.create(id=ROWS + 1, k="new", v=1)
            with transaction.atomic():
                Item.objects.filter(k="3").delete()
            assert ByKey.objects.count() == Item.objects.count()

        test_again = test_it

    suite = unittest.defaultTestLoader.loadTestsFromTestCase(OfTheirs)
    result = unittest.TextTestRunner(stream=StringIO()).run(suite)
    assert (result.testsRun, result.errors, result.failures) == (2, [], [])
    assert Item.objects.count() == (ROWS if base is TestCase else 0)
    Item.objects.create(id=ROWS + 9, k="after", v=1)
    steps.assert_exact(database)


def test_flush_empties_the_index(database: Database) -> None:
    call_command("flush", interactive=False, verbosity=0)
    assert steps.assert_exact(database).rows == 0


@pytest.mark.parametrize("flushed", [False, True], ids=["over the rows", "after a flush"])
def test_a_fixture_brings_rows_and_no_entries(database: Database, tmp_path: Path, flushed: bool) -> None:
    """`dumpdata` dumps the index's model too, as it does each view; `loaddata` would write its entries."""
    both, rows = tmp_path / "both.json", tmp_path / "rows.json"
    call_command("dumpdata", APP, output=str(both), verbosity=0)
    assert len(json.loads(both.read_text())) == 2 * ROWS
    call_command("dumpdata", APP, exclude=[f"{APP}.bykey"], output=str(rows), verbosity=0)
    Item.objects.filter(id__lt=30).update(k="since")
    if flushed:
        call_command("flush", interactive=False, verbosity=0)
    left = sorted(Item.objects.values_list())
    with pytest.raises(DatabaseError, match=REFUSED_BY_THE_VIEW):
        call_command("loaddata", str(both), verbosity=0)
    assert sorted(Item.objects.values_list()) == left
    steps.assert_exact(database)
    call_command("loaddata", str(rows), verbosity=0)
    assert steps.assert_exact(database).rows == ROWS
    assert not Item.objects.filter(k="since").exists()


WRITES_OF_ENTRIES: dict[str, Callable[[], object]] = {
    "save": lambda: ByKey(id=7, k="saved", v=1).save(),
    "create": lambda: ByKey.objects.create(id=ROWS + 1, k="created", v=1),
    "update": lambda: ByKey.objects.update(k=None),
    "delete": lambda: ByKey.objects.all().delete(),
    "delete one": lambda: ByKey.objects.get(id=5).delete(),
    "bulk create": lambda: ByKey.objects.bulk_create([ByKey(id=ROWS + 1, k="x", v=1)]),
}


@pytest.mark.parametrize("what", WRITES_OF_ENTRIES)
def test_the_index_s_model_only_reads(database: Database, what: str) -> None:
    with pytest.raises(DatabaseError, match=REFUSED_BY_THE_VIEW):
        WRITES_OF_ENTRIES[what]()
    assert steps.assert_exact(database).rows == ROWS


def test_what_it_sees_names_nothing_of_ours() -> None:
    assert connection.introspection.table_names() == ["t"]
    written = StringIO()
    call_command("inspectdb", include_views=True, stdout=written)
    found = [line.strip() for line in written.getvalue().splitlines() if line.strip().startswith("db_table")]
    assert found == ["db_table = 'ix'", "db_table = 't'"]


PASS = (
    migrations.AddField("item", "more", models.IntegerField(default=7)),
    migrations.AlterField("item", "note", models.CharField(max_length=9)),
    migrations.RemoveField("item", "note"),
    migrations.RenameField("item", "note", "remark"),
    migrations.AddIndex("item", models.Index(fields=["v"], name="mine")),
    migrations.AddConstraint("item", models.CheckConstraint(condition=models.Q(v__lt=1000), name="small")),
    migrations.AlterModelTable("item", "other"),
    migrations.RunSQL("INSERT INTO t VALUES (9001, 'new', 1, 'x')"),
)
REFUSED = (
    migrations.RemoveField("item", "k"),
    migrations.RenameField("item", "k", "key"),
    migrations.AlterField("item", "v", models.BigIntegerField()),
)


def _migrate(operation: migrations.operations.base.Operation) -> None:
    before = ProjectState.from_apps(Item._meta.apps)
    after = before.clone()
    operation.state_forwards(APP, after)
    with connection.schema_editor() as editor:
        operation.database_forwards(APP, editor, before, after)


@pytest.mark.parametrize("operation", PASS, ids=lambda operation: operation.describe())
def test_its_migration_passes(database: Database, operation: migrations.operations.base.Operation) -> None:
    _migrate(operation)
    clean_up.clean_up(database)
    steps.assert_exact(database)
    with database.transaction() as ours:
        assert faults.warnings(ours) == []


@pytest.mark.parametrize("operation", REFUSED, ids=lambda operation: operation.describe())
def test_its_migration_of_what_the_index_needs_is_refused(
    database: Database, operation: migrations.operations.base.Operation
) -> None:
    with pytest.raises(DatabaseError, match=r"index public.ix|roir_data.g1_source"):
        _migrate(operation)
    steps.assert_exact(database)


def test_a_model_that_is_deleted_leaves_one_thing_to_do(database: Database) -> None:
    """Django drops its table with CASCADE."""
    _migrate(migrations.DeleteModel("item"))
    with database.transaction() as ours:
        assert faults.warnings(ours) == [
            "index public.ix: its table was dropped; drop the index, too: roir drop public.ix"
        ]
    drop.drop_index(database, "public.ix", "test")
    clean_up.clean_up(database)
    with database.transaction() as ours:
        assert faults.warnings(ours) == []
