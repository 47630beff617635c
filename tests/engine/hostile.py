"""A hostile owner's scene: code that attacks wherever it runs, and the checks whether the owner has gained by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

# Every function that a read may call runs this one. It records its role and takes all that it can get. None of its
# effects may last.
TRY = """
CREATE FUNCTION evil.try() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    -- Effects that a rollback can't undo.
    PERFORM evil.who();
    BEGIN ALTER ROLE {owner} CREATEROLE; PERFORM nextval('evil.gains');
    EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE 'SET LOCAL ROLE NONE';
        IF current_user OPERATOR(pg_catalog.<>) '{owner}' THEN PERFORM nextval('evil.gains'); END IF;
    EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN PERFORM FROM victims.secret; PERFORM nextval('evil.gains');
    EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN INSERT INTO evil.later VALUES (1);
    EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE 'CREATE TEMP TABLE IF NOT EXISTS mine (id int)'; INSERT INTO mine VALUES (1);
    EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN EXECUTE format('DECLARE c%s CURSOR WITH HOLD FOR SELECT evil.note()', nextval('evil.cursors'));
    EXCEPTION WHEN OTHERS THEN NULL; END;
    BEGIN PERFORM set_config('search_path', 'evil, pg_catalog', false);
    EXCEPTION WHEN OTHERS THEN NULL; END;
    RETURN true;
END $$
"""
# Records the calling role. Sequences keep the record even if the transaction rolls back.
WHO = """
CREATE FUNCTION evil.who() RETURNS bigint LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT nextval(CASE WHEN current_user = '{owner}' THEN 'evil.as_owner' ELSE 'evil.as_another' END)
$$
"""
# Code that runs later, at our COMMIT, through a cursor or a deferred trigger.
NOTE = """
CREATE FUNCTION evil.note() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF current_user OPERATOR(pg_catalog.<>) '{owner}' THEN PERFORM nextval('evil.as_another'); END IF;
    BEGIN ALTER ROLE {owner} CREATEROLE; PERFORM nextval('evil.gains');
    EXCEPTION WHEN OTHERS THEN NULL; END;
    RETURN true;
END $$
"""
SCENE = (
    "CREATE SCHEMA evil AUTHORIZATION {owner}",
    "CREATE SCHEMA victims AUTHORIZATION {victim}",
    "GRANT USAGE ON SCHEMA victims TO PUBLIC",
    "SET ROLE {victim}; CREATE TABLE victims.secret AS SELECT 'secret' AS secret; RESET ROLE",
)
HIS = (
    *(f"CREATE SEQUENCE evil.{name}" for name in ("as_owner", "as_another", "gains", "cursors")),
    *(f"GRANT ALL ON SEQUENCE evil.{name} TO PUBLIC" for name in ("as_owner", "as_another", "gains", "cursors")),
    "GRANT USAGE ON SCHEMA evil TO PUBLIC",
    "CREATE TABLE evil.later (id int)",
    "GRANT ALL ON evil.later TO PUBLIC",
    WHO,
    TRY,
    NOTE,
    "CREATE FUNCTION evil.constant(int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT evil.try()'",
    "CREATE FUNCTION evil.any(text) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN RETURN evil.try(); END $$",
    "CREATE FUNCTION evil.number(text) RETURNS int IMMUTABLE LANGUAGE plpgsql AS "
    "$$ BEGIN PERFORM evil.try(); RETURN 1; END $$",
    "CREATE FUNCTION evil.fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.note(); RETURN NULL; END $$",
    "CREATE CONSTRAINT TRIGGER later AFTER INSERT ON evil.later DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION evil.fire()",
    "CREATE DOMAIN evil.word AS text CHECK (evil.any(VALUE))",
    "CREATE TYPE evil.pair AS (a int, b text)",
    "CREATE FUNCTION evil.told(evil.pair) RETURNS text IMMUTABLE LANGUAGE plpgsql AS "
    "$$ BEGIN PERFORM evil.try(); RETURN ($1).a::text; END $$",
    "CREATE CAST (evil.pair AS text) WITH FUNCTION evil.told(evil.pair)",
    # ANALYZE calls this function for a range.
    "CREATE FUNCTION evil.diff(int, int) RETURNS float8 IMMUTABLE LANGUAGE plpgsql AS "
    "$$ BEGIN PERFORM evil.try(); RETURN $1 - $2; END $$",
    "CREATE TYPE evil.span AS RANGE (subtype = int, subtype_diff = evil.diff)",
)
PLAIN = "CREATE TABLE evil.t (id int PRIMARY KEY, k text, v text)"
ROWS = "INSERT INTO evil.t (id, k, v) SELECT i, i::text, 'v' FROM generate_series(1, 40) i"
# For each door: the statements that create the table, and the last ones on it.
DOORS: dict[str, tuple[str, ...]] = {
    "primary key of an array of a domain": (
        "CREATE TABLE evil.t (id evil.word[] PRIMARY KEY, k text, v text)",
        "INSERT INTO evil.t SELECT ARRAY[i::text]::evil.word[], i::text, 'v' FROM generate_series(1, 40) i",
    ),
    "key of an array of a domain": (
        "CREATE TABLE evil.t (id int PRIMARY KEY, k evil.word[], v text)",
        "INSERT INTO evil.t SELECT i, ARRAY[i::text]::evil.word[], 'v' FROM generate_series(1, 40) i",
    ),
    "domain": (
        "CREATE TABLE evil.t (id int PRIMARY KEY, k evil.word, v text)",
        ROWS,
    ),
    "cast of a type": (
        "CREATE TABLE evil.t (id int PRIMARY KEY, k evil.pair, v evil.pair)",
        "INSERT INTO evil.t SELECT i, ROW(i, 'x')::evil.pair, ROW(i, 'y')::evil.pair FROM generate_series(1, 40) i",
    ),
    "difference of a range": (
        "CREATE TABLE evil.t (id int PRIMARY KEY, k text, v evil.span)",
        "INSERT INTO evil.t SELECT i, i::text, evil.span(i, i + 9) FROM generate_series(1, 40) i",
    ),
    "difference of a multirange": (
        "CREATE TABLE evil.t (id int PRIMARY KEY, k evil.span, v evil.span_multirange)",
        "INSERT INTO evil.t SELECT i, evil.span(i, i + 9), evil.span_multirange(evil.span(i, i + 9)) "
        "FROM generate_series(1, 40) i",
    ),
    "condition of an index": (PLAIN, ROWS, "CREATE INDEX ON evil.t (k) WHERE evil.constant(1)"),
    "expression of an index": (PLAIN, ROWS, "CREATE INDEX ON evil.t ((evil.number('constant')), k)"),
    "statistics": (
        PLAIN,
        ROWS,
        "CREATE STATISTICS evil.s ON (evil.number('constant')), k FROM evil.t",
        "ANALYZE evil.t",
    ),
    "check": (PLAIN, ROWS, "ALTER TABLE evil.t ADD CHECK (evil.constant(1))"),
    "policy": (PLAIN, ROWS, "CREATE POLICY p ON evil.t USING (evil.any(k))"),
    "generated column": (
        "CREATE TABLE evil.t (id int PRIMARY KEY, k text, v text, g int GENERATED ALWAYS AS (evil.number(k)) STORED)",
        ROWS,
    ),
    "partition's check": (
        "CREATE TABLE evil.t (id int PRIMARY KEY, k text, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE evil.t1 PARTITION OF evil.t FOR VALUES FROM (1) TO (20)",
        "CREATE TABLE evil.t2 PARTITION OF evil.t DEFAULT",
        ROWS,
        "ALTER TABLE evil.t ADD CHECK (evil.constant(1))",
    ),
}
# Reading runs no code of these.
QUIET = (
    "domain",
    "cast of a type",
    "policy",
    "generated column",
    "difference of a range",
    "difference of a multirange",
)
ROLES = ["superuser", pytest.param("member", marks=pytest.mark.sample(0))]


@dataclass
class Scene:
    """A hostile owner with a table. dsn: of a superuser; database: a connection by roir's role."""

    dsn: str
    database: Database
    owner: str
    victim: str

    def as_owner(self, *statements: str) -> None:
        """Runs statements in a session of the owner."""
        run_sql(self.dsn_of_owner, *statements)

    @property
    def dsn_of_owner(self) -> str:
        """The owner's DSN."""
        return make_dsn(**{**parse_dsn(self.dsn), "user": self.owner})

    def gains(self) -> list[str]:
        """The owner's gains: its code ran as another role, or the owner has a right that it lacked before."""
        one = steps.session(self.dsn)
        found = [
            f"{name}: {sql(one, f'SELECT last_value FROM evil.{name}')[0][0]}"
            for name in ("as_another", "gains")
            if sql(one, f"SELECT is_called FROM evil.{name}")[0][0]
        ]
        [(more,)] = sql(
            one,
            "SELECT rolsuper OR rolcreaterole OR rolcreatedb "
            "OR EXISTS (SELECT FROM pg_auth_members WHERE member = r.oid) "
            "OR has_schema_privilege(oid, 'roir_data', 'CREATE') "
            "OR has_table_privilege(oid, 'victims.secret', 'SELECT') "
            "FROM pg_roles r WHERE rolname = %s",
            self.owner,
        )
        one.close()
        return found + ["rights"] * bool(more)

    def tried(self) -> bool:
        """True if the owner's code has run since the last call."""
        one = steps.session(self.dsn)
        [(called,)] = sql(one, "SELECT is_called FROM evil.as_owner")
        sql(one, "SELECT setval('evil.as_owner', 1, false)")
        one.commit()
        one.close()
        return bool(called)

    def create_word(self) -> None:
        """Creates a superuser's domain, `public.word`, that the owner may use for columns."""
        run_sql(
            self.dsn,
            f"GRANT ALL ON SCHEMA public TO {self.owner}",
            "CREATE FUNCTION public.known(text) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'",
            "CREATE DOMAIN public.word AS text CHECK (public.known(VALUE))",
        )

    def give_word_away(self) -> None:
        """Gives the domain to the owner, so that its checks become the owner's code."""
        run_sql(
            self.dsn,
            f"ALTER DOMAIN public.word OWNER TO {self.owner}",
            f"ALTER FUNCTION public.known(text) OWNER TO {self.owner}",
        )
        self.as_owner(
            "CREATE OR REPLACE FUNCTION public.known(text) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS "
            "$$ BEGIN RETURN evil.try(); END $$"
        )


@pytest.fixture(params=ROLES)
def scene(request: pytest.FixtureRequest, dsn: str) -> Iterator[Scene]:
    [(tag,)] = sql(steps.session(dsn), "SELECT current_database()")
    names = {name: f"{name}_{tag}" for name in ("owner", "victim", "builder")}
    # This lets the planner evaluate each CHECK.
    run_sql(dsn, f"ALTER DATABASE {tag} SET constraint_exclusion = on")
    run_sql(dsn, *(f"CREATE ROLE {name} LOGIN" for name in names.values()))
    run_sql(dsn, *(statement.format(**names) for statement in SCENE))
    database = Database(dsn)
    if request.param == "member":
        user = names["builder"]
        run_sql(
            dsn,
            f"GRANT {names['owner']}, {names['victim']} TO {user}",
            "DROP SCHEMA roir, roir_data CASCADE",
            f"GRANT CREATE ON DATABASE {tag} TO {user}",
        )
        database = Database(make_dsn(**{**parse_dsn(dsn), "user": user}))
        install.init(database)
    made = Scene(dsn, database, names["owner"], names["victim"])
    made.as_owner(*(statement.replace("{owner}", made.owner) for statement in HIS))
    yield made
    for name in names.values():
        run_sql(dsn, f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")
