"""The definition of an index on all surfaces, and code that must not take an expression for a column of the table."""

from __future__ import annotations

from airflow_roir.cli.overview import index_notes
from airflow_roir.definition import IndexDefinition
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast import forecast, objections
from airflow_roir.engine.forecast.worth import Worth, of_query
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.engine.snapshot.report import markdown
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
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


def make_many(dsn: str, partitions: int = 60) -> None:
    run_sql(
        dsn,
        "CREATE TABLE users (id int, joined int, email text, deleted_at timestamptz, v int, PRIMARY KEY (id, joined)) "
        "PARTITION BY RANGE (joined)",
        *(f"CREATE TABLE users_{n} PARTITION OF users FOR VALUES FROM ({n}) TO ({n + 1})" for n in range(partitions)),
        f"INSERT INTO users SELECT i, i % {partitions}, 'User' || i, NULL, i FROM generate_series(1, 600) i",
        "ANALYZE users",
    )


def planned(database: Database, query: str, where: str | None = WHERE, include: str | None = None) -> Worth:
    definition = IndexDefinition.parse("ix", "users", KEYS, include, where=where)
    found = forecast.run(database, definition, BuildOptions())
    return of_query(database, found, found.worth, query, run=False)


def test_a_plan_takes_no_expression_for_a_column(database: Database, dsn: str) -> None:
    """Found: it said that the index lacks `email`, and advised to include it, though the view has lower(email)."""
    make_many(dsn)
    query = "SELECT id FROM users WHERE lower(email) = 'user7' AND deleted_at IS NULL"
    found = planned(database, query)
    assert found.query is not None
    assert (found.query.asked.columns, found.query.lacks) == (("address", "id"), ())
    assert found.pays == "yes"
    assert found.why.startswith("the view answers it")
    lacking = planned(database, query.replace("id FROM", "email FROM")).query
    assert lacking is not None
    assert lacking.lacks == ("email",)
    other = planned(database, "SELECT id FROM users WHERE v = 7")
    assert "has no condition on lower(email) that an index could use" in other.why
    unlike = planned(database, "SELECT id FROM users WHERE lower(email) = 'user7'")
    assert (unlike.pays, unlike.query and unlike.query.serves) == ("no", False)
    assert unlike.why.endswith("its condition must imply deleted_at IS NULL")


def test_the_worth_in_general_names_the_expression(database: Database, dsn: str) -> None:
    make_many(dsn, 110)
    definition = IndexDefinition.parse("ix", "users", KEYS)
    worth = forecast.run(database, definition, BuildOptions()).worth
    assert worth is not None
    assert "a query by lower(email) alone opens" in worth.why


def test_a_plan_before_init_judges_the_expressions(database: Database, dsn: str) -> None:
    """Found: it said nothing of them until there was a control schema."""
    make_many(dsn, 12)
    run_sql(dsn, "DROP SCHEMA roir, roir_data CASCADE")
    for keys, where, said in (
        ("lower(emial) AS address", "", 'column "emial" does not exist'),
        ("lower(email) AS v", "", "as a column of"),
        ("random()", "", "must be marked IMMUTABLE"),
        (KEYS, "now() > deleted_at", "must be marked IMMUTABLE"),
    ):
        found = objections.find(database, IndexDefinition.parse("ix", "users", keys, where=where), BuildOptions())
        assert [one for one in found.refused if said in one], found.refused
    fit = objections.find(database, IndexDefinition.parse("ix", "users", KEYS, where=WHERE), BuildOptions())
    assert (fit.before_init, len(fit.refused), fit.worth is not None) == (True, 1, True)
