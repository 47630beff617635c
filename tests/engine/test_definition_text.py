"""The definition of an index on all surfaces, and code that must not take an expression for a column of the table."""

from __future__ import annotations

from airflow_roir.cli.overview import index_notes
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.engine.snapshot.report import markdown
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_expressions import KEYS, WHERE, make_users

DEFINITION = "on public.users by lower(email) AS address, including v, where deleted_at IS NULL, unique"


def make(database: Database, dsn: str) -> None:
    make_users(dsn)
    steps.make_index(database, "ix", "users", KEYS, "v", where=WHERE, unique=True)


def test_each_surface_says_what_an_index_is(database: Database, dsn: str) -> None:
    """Found: neither the status nor the report named the key, the included columns and the condition."""
    make(database, dsn)
    [index], operation = indexes(database), progress(database, "ix")
    for one in (index, operation):
        told = one.as_dict()
        assert (told["key"], told["include"], told["where"]) == (["lower(email) AS address"], ["v"], index.where)
        assert (told["definition"], told["unique"]) == (DEFINITION, True)
    notes = list(index_notes(index))
    assert notes[0] == DEFINITION
    assert "unique: enforced over all partitions, for rows where deleted_at IS NULL" in notes
    assert "| Definition | on public.users by lower(email) AS address, including v," in markdown(operation, None)


def test_the_examples_of_queries_say_that_a_partial_index_lacks_rows(database: Database, dsn: str) -> None:
    """Found: they read as if all rows were in the view."""
    make(database, dsn)
    [index] = indexes(database)
    by_view, whole = index.queries
    assert by_view == ("SELECT address, v FROM public.ix WHERE address = … -- only rows where (deleted_at IS NULL)")
    assert whole.endswith(" -- only rows where (deleted_at IS NULL)")
    user = steps.session(dsn)
    assert sql(user, by_view.replace("…", "'user7@x'")) == [("user7@x", 7)]
    assert len(sql(user, whole.replace("…", '"user7@x"'))) == 1
    assert sql(user, whole.replace("…", '"user6@x"')) == []
