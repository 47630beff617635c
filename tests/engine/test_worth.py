"""Whether an index will pay: by the catalogs, and for a query of the user, as the planner sees it."""

from __future__ import annotations

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.forecast import forecast, worth
from airflow_roir.engine.forecast import query as queries
from airflow_roir.engine.forecast.substitute import Use
from airflow_roir.engine.forecast.worth import OfQuery, Worth
from airflow_roir.engine.generation.entry import Entry, EntryColumn
from airflow_roir.engine.snapshot import details
from airflow_roir.errors import InvalidInput
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import session, sql
from tests.engine.test_many_indexes import statements

COLUMNS = 'id bigint, day int, k bigint, code varchar(20), state text, total numeric, "AND" int, flag boolean'


def table(dsn: str, partitions: int, rows: int = 600) -> None:
    """The table `t`, with a partition for each day."""
    run_sql(
        dsn,
        f"CREATE TABLE t ({COLUMNS}, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
        "DO $$ BEGIN FOR n IN 0.." + str(partitions - 1) + " LOOP EXECUTE format("
        "'CREATE TABLE t%s PARTITION OF t FOR VALUES FROM (%s) TO (%s)', n, n, n + 1); END LOOP; END $$",
        f"INSERT INTO t SELECT i, i % {partitions}, i % 97, 'c' || i, 's', i, i, i % 2 = 0 "
        f"FROM generate_series(1, {rows}) i",
        "ANALYZE t",
    )


def asked(
    database: Database,
    query: str | None,
    keys: str = "k",
    include: str | None = "state",
    run: bool = False,
    unique: bool = False,
    source: str = "t",
) -> Worth:
    definition = IndexDefinition.parse("ix", source, keys, include, unique)
    dry = forecast.run(database, definition, BuildOptions())
    assert dry.worth is not None
    return dry.worth if query is None else worth.of_query(database, dry, dry.worth, query, run)


def of(found: Worth) -> OfQuery:
    assert found.query is not None
    return found.query


def test_a_table_without_partitions_needs_no_index_of_roir(database: Database, dsn: str) -> None:
    run_sql(dsn, f"CREATE TABLE t ({COLUMNS}, PRIMARY KEY (id, day))")
    for query in (None, "SELECT state FROM public.t WHERE k = 1"):
        found = asked(database, query)
        assert (found.pays, found.partitions, found.partition_key) == ("no", 0, ())
        assert "no partitions" in found.why


def test_keys_with_the_partition_key_are_refused_where_pruning_or_unique_does_it(database: Database, dsn: str) -> None:
    table(dsn, 100)
    assert asked(database, None, "k,day").pays == "yes"
    first = asked(database, None, "day,k")
    assert (first.pays, 'begins with the partition key ("day")' in first.why) == ("no", True)
    own = asked(database, None, "day,id", None, unique=True)
    assert (own.pays, "PostgreSQL's own UNIQUE can enforce it" in own.why) == ("no", True)
    # Look-ups by id alone would still open all partitions.
    both = asked(database, None, "id,day", None, unique=True)
    assert (both.pays, 'only for queries by "id" alone' in both.why) == ("perhaps", True)
    assert asked(database, "SELECT day FROM public.t WHERE id = 5", "id,day", None, unique=True).pays == "yes"
    assert asked(database, None, "id", None, unique=True).pays == "yes"


def test_a_part_of_the_partition_key_prunes_less_than_all_of_it(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int, region text, day int, PRIMARY KEY (id, region, day)) PARTITION BY LIST (region)",
        "CREATE TABLE n PARTITION OF t FOR VALUES IN ('north') PARTITION BY LIST (day)",
        *(f"CREATE TABLE n{n} PARTITION OF n FOR VALUES IN ({n})" for n in range(20)),
    )
    for keys, pays in (("region", "perhaps"), ("day", "perhaps"), ("id", "perhaps")):
        assert asked(database, None, keys, None).pays == pays
    assert "is a part of the partition key (day, region)" in asked(database, None, "region", None).why
    found = asked(database, "SELECT id FROM t WHERE region = 'north'", "region", None)
    assert (found.pays, of(found).asked.opened) == ("yes", 20)


def test_a_unique_index_pays_by_what_it_refuses_whatever_the_query(database: Database, dsn: str) -> None:
    table(dsn, 3)
    for query in ("SELECT state FROM t WHERE id = 5", "SELECT state FROM t WHERE day = 1"):
        found = asked(database, query, "id", None, unique=True)
        assert (found.pays, "PostgreSQL's own UNIQUE would need" in found.why) == ("yes", True)


@pytest.mark.parametrize(
    ("partitions", "in_general", "covered", "whole"),
    [(3, "no", "no", "no"), (10, "no", "no", "no"), (11, "perhaps", "yes", "perhaps"), (100, "yes", "yes", "yes")],
)
def test_the_number_of_partitions_decides(
    database: Database, dsn: str, partitions: int, in_general: str, covered: str, whole: str
) -> None:
    """The bounds are the measured ones, and between them it's open. A query that names the partition key needs none."""
    table(dsn, partitions)
    assert asked(database, None).pays == in_general
    for query, pays, opened, lacks in (
        ("SELECT id, state FROM public.t WHERE k = 5", covered, partitions, ()),
        ("SELECT * FROM public.t WHERE k = 5", whole, partitions, ("AND", "code", "flag", "total")),
        ("SELECT state FROM public.t WHERE k = 5 AND day = 1", "no", 1, ()),
        ("SELECT state FROM public.t WHERE k = $1", covered, partitions, ()),
        ("SELECT state FROM public.t WHERE k = $1 AND day = $2", "no", 1, ()),
    ):
        if "$1" in query and _version(dsn) < 160_000:
            continue
        found = asked(database, query)
        assert (query, found.pays) == (query, pays), found.why
        its = of(found)
        assert (its.asked.opened, its.lacks, its.serves) == (opened, lacks, True)
        assert its.asked.planning_ms > 0
        if "day" in query:
            assert "the query opens only 1 of" in found.why


def test_parameters_whose_values_decide_how_many_partitions_are_opened(database: Database, dsn: str) -> None:
    """Found in review: a range of days by parameters counted as one partition, and so the answer was "no"."""
    if _version(dsn) < 160_000:
        pytest.skip("EXPLAIN plans parameters since PostgreSQL 16")
    table(dsn, 100)
    for condition in ("day > $2", "day BETWEEN $2 AND $3", "day = ANY ($2::int[])"):
        found = asked(database, f"SELECT state FROM t WHERE k = $1 AND {condition}")
        assert (condition, found.pays, of(found).asked.opened) == (condition, "perhaps", None)
        assert "depends on its parameters" in found.why
        assert "now opens some of 100 partitions" in found.lines()["query"][0]
    assert of(asked(database, "SELECT state FROM t WHERE k = $1 AND $2 = day")).asked.opened == 1


def _version(dsn: str) -> int:
    return session(dsn).info.server_version


@pytest.fixture
def sixty(database: Database, dsn: str) -> Database:
    table(dsn, 60)
    return database


SERVED = {
    "k = 5": True,
    "5 = k": True,
    "k IN (1, 2, 3)": True,
    "k = 1 OR k = 2": True,
    "k = 1 OR state = 's'": False,
    "k BETWEEN 1 AND 3": True,
    "k IS NULL": True,
    "k <> 5": False,
    "k + 1 = 5": False,
    "k = id": False,
    "k::text = '5'": False,
    "NOT (k = 5)": False,
    "state = 'k = 5'": False,
    "state = 't_1.k'' AND t_1.k = 1'": False,
    "(k, id) > (1, 2)": True,
    "k IS NOT NULL": True,
    "k = ANY (ARRAY[1, 2])": True,
    "k = 1 OR k = 2 AND state = 's'": True,
    '"AND" = 1': False,
    "k = (SELECT max(id) FROM public.t x WHERE x.day = 1)": True,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("condition", SERVED)
def test_conditions_that_an_index_can_use(sixty: Database, condition: str) -> None:
    """Turned, rewritten, with casts and strings that look like conditions; test_worth_shapes.py has the class."""
    assert of(asked(sixty, f"SELECT 1 FROM public.t WHERE {condition}")).serves is SERVED[condition]


def test_columns_of_joins_views_functions_and_hostile_names(sixty: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE c (k bigint PRIMARY KEY, name text)",
        "INSERT INTO c SELECT i, i FROM generate_series(1, 1000) i",
        "ANALYZE c",
        "CREATE VIEW v AS SELECT t.k AS renamed, t.total FROM t WHERE t.flag",
        "CREATE FUNCTION f(bigint) RETURNS numeric STABLE LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN (SELECT sum(total) FROM t WHERE k = $1); END $$",
        """ALTER TABLE t ADD "t_1.""total'" int""",
    )
    joined = of(asked(sixty, "SELECT c.name FROM public.t JOIN public.c ON c.k = t.k WHERE c.name = '7'"))
    assert (joined.asked.columns, joined.serves, joined.covers) == (("k",), True, True)
    seen = of(asked(sixty, "SELECT total FROM public.v WHERE renamed = 7"))
    assert (seen.asked.columns, seen.lacks, seen.serves) == (("flag", "k", "total"), ("flag", "total"), True)
    hidden = asked(sixty, "SELECT public.f(7)")
    assert (hidden.pays, of(hidden).asked.opened) == ("perhaps", 0)
    assert "a function in it may" in hidden.why
    own = of(asked(sixty, """SELECT "t_1.""total'", "AND" FROM public.t AS "w ""x" WHERE k = 1"""))
    assert own.lacks == ("AND", "t_1.\"total'")
    assert of(asked(sixty, "SELECT t FROM public.t WHERE k = 1")).lacks == ("*",)
    assert of(asked(sixty, "SELECT ctid FROM public.t WHERE k = 1")).lacks == ("ctid",)
    # Found in review: the names of an alias's columns counted as columns that the index lacks.
    assert of(asked(sixty, "SELECT q.a FROM public.t AS q (a, b) WHERE q.k = 1")).lacks == ()
    assert of(asked(sixty, "SELECT lower(code) FROM public.t WHERE code = 'x'", "code", None)).covers
    assert of(asked(sixty, "SELECT lower(code) FROM public.t WHERE code = 'x'", "code", None)).serves
    assert of(asked(sixty, "SELECT k FROM public.t ORDER BY k LIMIT 3")).serves
    assert not of(asked(sixty, "SELECT k FROM public.t ORDER BY k")).serves
    assert of(asked(sixty, "SELECT id FROM public.t WHERE flag", "flag")).serves
    wrong = asked(sixty, "SELECT total FROM public.t WHERE total = 1")
    assert (wrong.pays, "no condition on" in wrong.why) == ("no", True)


def prepared(database: Database, index: str, source: str | None, keys: str | None, include: str | None = None) -> None:
    lifecycle.prepare(database, IndexDefinition.parse(index, source, keys, include), BuildOptions(), "test")


@pytest.mark.by_hand("sweeps")
def test_a_first_build_says_on_its_page_whether_the_index_will_pay(database: Database, dsn: str) -> None:
    """As the plan does, while it can be aborted; a rebuild, and an index that is there, say nothing. The prepare has
    recorded it: a look doesn't count the partitions.
    """
    table(dsn, 12)
    for name, keys, include in (("by_k", "k", "state"), ("by_day", "day", None)):
        prepared(database, name, "t", keys, include)
        seen: list[str | None] = []
        sent = statements(database, lambda: seen.append(details.progress(database, name).worth))  # noqa: B023
        assert seen == [str(asked(database, None, keys, include))]
        assert [one for one in sent if "partition_tree" in one or "pg_partitioned_table" in one] == []
        requests.pause(database, name, "test")
        assert details.progress(database, name).worth == seen[0]
        requests.resume(database, name, "test")
        steps.finish_all(database, start_run(database, name, "test", take_over=True))
        assert details.progress(database, name).worth is None
    prepared(database, "by_k", None, None)
    assert details.progress(database, "by_k").worth is None
    run_sql(dsn, "CREATE TABLE plain (id int PRIMARY KEY, k int)")
    prepared(database, "of_plain", "plain", "k")
    assert str(details.progress(database, "of_plain").worth).startswith("no: the table has no partitions")
    requests.request_abort(database, "of_plain", "test")
    assert details.progress(database, "of_plain").worth is None


@pytest.mark.by_hand("sweeps")
def test_local_and_existing_indexes_are_named(sixty: Database, dsn: str) -> None:
    query = "SELECT state FROM public.t WHERE k = 5"
    assert of(asked(sixty, query)).asked.whole == 60
    run_sql(dsn, "CREATE INDEX t_by_k ON t (k)")
    run_sql(dsn, "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET enable_seqscan = off', current_database()); END $$")
    found = of(asked(sixty, query))
    assert (found.asked.local, found.asked.whole) == (("public.t_by_k",), 0)
    steps.make_index(sixty, "other", "t", "k", "state")
    served = asked(sixty, query)
    assert (served.pays, of(served).other) == ("no", "public.other")
    assert of(asked(sixty, "SELECT total FROM public.t WHERE k = 5")).other is None
    # A rebuild isn't kept from its own index.
    assert of(_rebuild(sixty, query)).other is None


def _rebuild(database: Database, query: str) -> Worth:
    dry = forecast.run(database, IndexDefinition.parse("other"), BuildOptions())
    return worth.of_query(database, dry, dry.worth, query, False)


REFUSED = {
    "SELECT 1; SELECT 2": "it isn't one query",
    "SELECT 1; COMMIT; DROP TABLE public.t": "it isn't one query",
    "SELECT 1); DROP TABLE public.t; --": "syntax error",
    "UPDATE public.t SET k = 1": "it writes rows",
    "DELETE FROM public.t RETURNING k": "it writes rows",
    "WITH x AS (DELETE FROM public.t RETURNING k) SELECT * FROM x": "it writes rows",
    "SELECT k FROM public.t WHERE k = 1 FOR UPDATE": "it locks rows",
    "CREATE TABLE public.x AS SELECT 1": "syntax error",
    "REFRESH MATERIALIZED VIEW x": "it isn't a SELECT",
    "DECLARE c CURSOR FOR SELECT 1": "syntax error",
    "EXECUTE roir_query": "does not exist",
    "SHOW work_mem": "syntax error",
    "ANALYZE SELECT 1": "syntax error",
    "COMMIT": "syntax error",
    "": "syntax error",
    "-- nothing": "syntax error",
    "SELECT nothing FROM public.t": "does not exist",
    "SELECT 'half": "unterminated",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize("query", REFUSED)
def test_what_is_no_select_is_refused_and_does_nothing(sixty: Database, dsn: str, query: str, run: bool) -> None:
    before = sql(session(dsn), "SELECT count(*), sum(k) FROM t")
    with pytest.raises(InvalidInput, match=f"can't be asked about.*{REFUSED[query]}"):
        asked(sixty, query, run=run)
    assert sql(session(dsn), "SELECT count(*), sum(k) FROM t") == before


@pytest.mark.sample(0)
def test_a_query_runs_only_when_that_is_wanted_and_can_write_nothing(sixty: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE log (n int)",
        "CREATE FUNCTION w() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN INSERT INTO log VALUES (1); RETURN 5; END $$",
        "CREATE FUNCTION escape() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN "
        "SET transaction_read_only = off; INSERT INTO log VALUES (1); RETURN 5; END $$",
    )
    assert of(asked(sixty, "SELECT state, public.w() FROM public.t WHERE k = 5")).look_ups == ()
    for function in ("w", "escape"):
        [table_, *_] = of(
            asked(sixty, f"SELECT state, public.{function}() FROM public.t WHERE k = 5", run=True)
        ).look_ups
        assert table_.ms is None
        assert "read-only" in str(table_) or "read-write" in str(table_)
    slow = of(asked(sixty, "SELECT state, pg_sleep(60) FROM public.t WHERE k = 5", run=True)).look_ups[0]
    assert str(slow) == "table: not known: the server takes longer than 5 s"
    assert sql(session(dsn), "SELECT * FROM log") == []
    assert sql(session(dsn), "SELECT count(*) FROM pg_prepared_statements") == [(0,)]


RELATIONS = "SELECT string_agg(c.oid || relname || relnamespace, ',' ORDER BY c.oid) FROM pg_class c"


def test_look_ups_are_measured_on_a_sample_and_leave_nothing(sixty: Database, dsn: str) -> None:
    """By the view that a publish makes, over segments with their B-trees, and by roir.rows of the table's own rows."""
    before = sql(session(dsn), RELATIONS)
    found = asked(sixty, "SELECT state FROM public.t WHERE k = 5", run=True)
    [by_table, by_view, by_rows] = of(found).look_ups
    assert [one.way for one in (by_table, by_view, by_rows)] == ["table", "view", "roir.rows"]
    # As many as the trial's time allows.
    assert by_table.sample is None
    assert 0 < (by_view.sample or 0) <= 600
    assert by_rows.sample == by_view.sample
    # As many rows as the query needs, or the next number that whole keys have.
    assert by_table.rows == 7
    assert 7 <= by_view.rows == by_rows.rows <= 14
    assert all(one.ms is not None and one.ms > 0 for one in (by_table, by_view, by_rows))
    [*_, last] = found.lines()["a look-up"]
    assert last == "the B-tree of all rows has a level or two more than that of a sample"
    assert f"measured on a sample of {by_view.sample} rows" in str(by_view)
    # Found in review: five calls in a new session take 20 ms each, so that the median of the first nine was 19 ms.
    assert str(by_rows).endswith("; more in the first five calls of a session")
    assert sql(session(dsn), RELATIONS) == before
    # Rows that an aggregate needs, not those that it returns; with a limit those that are wanted.
    assert of(asked(sixty, "SELECT count(total) FROM t WHERE k = 5", run=True)).look_ups[0].rows == 7
    assert of(asked(sixty, "SELECT k FROM t ORDER BY k LIMIT 3", run=True)).look_ups[0].rows == 3


@pytest.mark.parametrize("name", ["code", '"AND"', "flag", "mood", "word", "Kä'y%s"])
def test_look_ups_of_any_key(sixty: Database, dsn: str, name: str) -> None:
    column = name if name.startswith('"') or name.islower() else f'"{name}"'
    run_sql(
        dsn,
        "CREATE TYPE moods AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN words AS text CHECK (VALUE <> 'no')",
        "ALTER TABLE t ADD mood moods DEFAULT 'ok', ADD word words DEFAULT 'w', ADD \"Kä'y%s\" text DEFAULT '%'",
    )
    for of_unique in (False, True):
        query = f"SELECT id FROM t WHERE {column} = (SELECT {column} FROM t WHERE day = 1 LIMIT 1)"
        found = asked(sixty, query, column, None, run=True, unique=of_unique)
        [_, by_view, by_rows] = of(found).look_ups
        assert (by_view.problem, by_rows.problem) == (None, None)
        assert by_view.rows == by_rows.rows >= 1


def test_a_sample_that_tells_nothing_gives_the_reason_instead_of_a_figure(database: Database, dsn: str) -> None:
    table(dsn, 12, 0)
    query = "SELECT state FROM t WHERE k = 5"
    assert [one.problem for one in of(asked(database, query, run=True)).look_ups[1:]] == ["the table has no rows"] * 2
    run_sql(dsn, "INSERT INTO t (id, day) VALUES (1, 1)")
    told = str(of(asked(database, query, run=True)).look_ups[1])
    assert told == "view: not known: the key is NULL in all rows of the sample"


def test_the_answer_is_open_where_the_planner_cant_be_asked(sixty: Database, dsn: str) -> None:
    """As by a function that reads the table itself."""
    query = "SELECT id FROM t WHERE k = 5"
    assert asked(sixty, query).pays == "yes"
    run_sql(
        dsn,
        "CREATE FUNCTION f() RETURNS SETOF t LANGUAGE sql STABLE AS 'SELECT * FROM public.t'",
    )
    inlined = asked(sixty, "SELECT id FROM f() WHERE k = 5")
    assert (inlined.pays, of(inlined).serves) == ("perhaps", None)
    assert "isn't known: the query reads the table in a way that can't be tried" in inlined.why


def test_a_bare_name_that_means_another_table_isnt_taken_for_the_source(sixty: Database, dsn: str) -> None:
    """There the planner is asked about the full name; a query by the bare one reads the other table."""
    run_sql(
        dsn,
        "CREATE SCHEMA app",
        "CREATE TABLE app.t (id bigint, k bigint)",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = app, public', current_database()); END $$",
    )
    mine = asked(sixty, "SELECT a.id FROM t a JOIN public.t b ON a.id = b.id WHERE b.k = 5", source="public.t")
    assert (of(mine).serves, of(mine).covers) == (True, True)
    theirs = asked(
        sixty, "SELECT a.id FROM t a JOIN public.t b ON a.id = b.id WHERE a.k = 5 AND b.day > 3", source="public.t"
    )
    assert of(theirs).serves is not True
    assert of(asked(sixty, "SELECT id FROM t WHERE k = 5", source="public.t")).asked.opened == 0


def of_columns(*names: str) -> Entry:
    """An index of these columns, whose key is the first one."""
    columns = (EntryColumn(name, "int", "int", None, False, False, False) for name in names)
    return Entry(tuple(columns), 1, 1, 1)


def test_it_is_asked_with_the_callers_rights_settings_and_row_security(database: Database, dsn: str) -> None:
    """Found while it was made: roir's own sessions pin search_path and row_security, so that a query meant another."""
    table(dsn, 60)
    [(name,)] = sql(session(dsn), "SELECT 'reader_' || current_database()")
    run_sql(dsn, f"CREATE ROLE {name} LOGIN", "CREATE SCHEMA app", "CREATE VIEW app.mine AS SELECT * FROM t")
    run_sql(dsn, f"ALTER ROLE {name} SET search_path = app", "CREATE TABLE secret (k int)")
    run_sql(dsn, f"GRANT USAGE ON SCHEMA app TO {name}", f"GRANT SELECT ON app.mine, t TO {name}")
    run_sql(dsn, "GRANT USAGE ON SCHEMA public TO " + name)
    dry = forecast.run(database, IndexDefinition.parse("ix", "t", "k"), BuildOptions())
    run_sql(dsn, "ALTER TABLE t ENABLE ROW LEVEL SECURITY", f"CREATE POLICY p ON t TO {name} USING (state = 's')")
    low = Database(dsn.replace("//postgres:@", f"//{name}:@"), "roir tests")
    mine = "SELECT k FROM mine WHERE k = 5"
    try:
        seen, substitute = queries.ask(low, dry.source, mine)
        assert (seen.opened, substitute.use(low, mine, of_columns("k"))) == (60, Use(True, True))
        guarded, _ = queries.ask(low, dry.source, "SELECT k FROM public.t WHERE k = 5")
        assert guarded.columns == ("k", "state")
        with pytest.raises(InvalidInput, match="permission denied for table secret"):
            queries.ask(low, dry.source, "SELECT k FROM public.secret")
        run_sql(dsn, "DO $$ BEGIN EXECUTE format('REVOKE TEMP ON DATABASE %I FROM PUBLIC', current_database()); END $$")
        refused = substitute.use(low, mine, of_columns("k"))
        assert (refused.serves, refused.covers) == (None, None)
        assert refused.why.startswith("permission denied to create temporary tables")
    finally:
        run_sql(dsn, f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


@pytest.mark.parametrize("path", ["public", "evil, pg_catalog", "pg_catalog, evil"])
def test_no_function_or_operator_of_the_callers_path_runs_beside_the_query(
    database: Database, dsn: str, path: str
) -> None:
    """Found: the caller's path is set before the transaction is read only, and `format` was found by it: a role that
    may create functions in `public` got the caller's rights.
    """
    table(dsn, 20)
    dry = forecast.run(database, IndexDefinition.parse("ix", "public.t", "k", None), BuildOptions())
    assert dry.worth is not None
    schema = "public" if path == "public" else "evil"
    ran = "LANGUAGE sql AS $$ SELECT nextval('public.ran')"
    functions = {
        "format(text, text, text)": "text",
        "concat_ws(text, text, text, text)": "text",
        "quote_ident(text)": "text",
        "set_config(text, text, boolean)": "text",
        "current_setting(text)": "text",
        "unnest(text[])": "text",
        "to_regclass(text)": "regclass",
        "bool_and(boolean)": "boolean",
        "same(regclass, regclass)": "boolean",
        "same(oid, oid)": "boolean",
        "same(text, text)": "boolean",
    }
    run_sql(
        dsn,
        "CREATE SCHEMA evil",
        "CREATE SEQUENCE public.ran",
        *(
            f"CREATE FUNCTION {schema}.{name} RETURNS {returns} {ran}::text::{returns} $$"
            for name, returns in functions.items()
            if returns != "boolean"
        ),
        *(
            f"CREATE FUNCTION {schema}.{name} RETURNS boolean {ran} > 0 $$"
            for name, returns in functions.items()
            if returns == "boolean"
        ),
        *(
            f"CREATE OPERATOR {schema}.{sign} (leftarg = {of}, rightarg = {of}, function = {schema}.same)"
            for of in ("regclass", "oid", "text")
            for sign in ("=", "<>")
        ),
        f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = {path}', current_database()); END $$",
    )
    found = of(worth.of_query(database, dry, dry.worth, "SELECT k FROM public.t WHERE k IN (5)", False))
    with database.transaction() as connection:
        assert not execute(connection, "SELECT is_called FROM public.ran").scalar_one()
    assert (found.asked.opened, found.serves) == (20, True)


def test_a_query_cannot_end_its_own_limit_of_time(database: Database, dsn: str) -> None:
    """Found: one that set statement_timeout in its first run had no limit in the second."""
    table(dsn, 20)
    limit = "current_setting('statement_timeout')"
    ends = f"CASE WHEN {limit} = '0' THEN pg_sleep(9)::text ELSE set_config('statement_timeout', '0', true) END"
    found = of(asked(database, f"SELECT {ends} FROM public.t WHERE id = 5", run=True)).asked
    assert (found.run_problem, found.run_rows) == (None, 1)
    assert found.run_ms is not None
    assert found.run_ms < 1_000
