"""Changes of our objects in a shard, undone or not before the next poll: nothing is lost silently.

The oracle: after the poll the contents are exact, or the shard is in doubt. Each write that committed was announced,
or strict reads and enforcement are refused until `roir announce` begins them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from urllib.parse import urlsplit

import psycopg2
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from airflow_roir.shards.ship.feed import FeedShipper, InShard
from airflow_roir.shards.ship.feed_thread import note_failed, note_refused
from airflow_roir.shards.unique import enforce
from servers.postgres import COPIED
from servers.shards import Shards, drop_databases, make_databases, run_sql
from tests.shards import apart
from tests.shards.announced import index_dsn

pytestmark = pytest.mark.sample(2)

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE, v int)",
    "INSERT INTO t SELECT i, '{shard}-' || i, 0 FROM generate_series(1, 9) i",
)
NOTHING = "RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
SWALLOW = f"CREATE FUNCTION swallow() {NOTHING}"
SAVED = "SELECT set_config('x.src', {}, false)"
AGAIN = "DO $$ BEGIN EXECUTE current_setting('x.src'); END $$"
# Our objects, as statements name them.
TRIGGERS = {
    "the capture trigger": ("t", "roir_{o}"),
    "the trigger of TRUNCATE": ("t", "roir_{o}_t"),
    "the trigger that refuses TRUNCATE": ("t", "roir_{o}_w"),
    "the announcing trigger": ("roir_shard.{o}", "roir_announce"),
}
FUNCTIONS = ("touch", "emptied", "whole", "announce")
Case = tuple[tuple[str, ...], tuple[str, ...]]


def of_triggers() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for what, (table, name) in TRIGGERS.items():
        alter, back = f"ALTER TABLE {table} %s TRIGGER {name}", f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {name}"
        of = f"pg_get_triggerdef((SELECT oid FROM pg_trigger WHERE tgname = '{name}'))"
        found |= {
            f"{what}: DISABLE": ((alter % "DISABLE",), (back,)),
            f"{what}: ENABLE": ((alter % "ENABLE", "SET session_replication_role = replica"), (back,)),
            f"{what}: ENABLE REPLICA": ((alter % "ENABLE REPLICA",), (back,)),
            f"{what}: DROP": ((SAVED.format(of), f"DROP TRIGGER {name} ON {table}"), (AGAIN, back)),
            f"{what}: RENAME": (
                (f"ALTER TRIGGER {name} ON {table} RENAME TO other",),
                (f"ALTER TRIGGER other ON {table} RENAME TO {name}",),
            ),
        }
    return found


def of_functions() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for part in FUNCTIONS:
        name = f"roir_shard.{{o}}_{part}()"
        saved = SAVED.format(f"pg_get_functiondef('{name}'::regprocedure)")
        found |= {
            f"{part}: CREATE OR REPLACE": ((saved, f"CREATE OR REPLACE FUNCTION {name} {NOTHING}"), (AGAIN,)),
            f"{part}: SECURITY INVOKER": ((f"ALTER FUNCTION {name} SECURITY INVOKER",), (saved, AGAIN)),
            f"{part}: SET": ((saved, f"ALTER FUNCTION {name} SET search_path = public"), (AGAIN,)),
            f"{part}: OWNER": (
                (f"ALTER FUNCTION {name} OWNER TO somebody",),
                (f"ALTER FUNCTION {name} OWNER TO CURRENT_USER",),
            ),
            f"{part}: RENAME": (
                (f"ALTER FUNCTION {name} RENAME TO other",),
                (f"ALTER FUNCTION roir_shard.other() RENAME TO {{o}}_{part}",),
            ),
        }
    found["touch: SECURITY INVOKER"] = (
        ("ALTER FUNCTION roir_shard.{o}_touch() SECURITY INVOKER",),
        ("ALTER FUNCTION roir_shard.{o}_touch() SECURITY DEFINER",),
    )
    return found


OUTBOX: dict[str, Case] = {
    "the outbox: a trigger": (
        (SWALLOW, "CREATE TRIGGER s BEFORE INSERT OR UPDATE ON {b} FOR EACH ROW EXECUTE FUNCTION swallow()"),
        ("DROP TRIGGER s ON {b}",),
    ),
    "the outbox: a trigger of some rows": (
        (
            SWALLOW,
            "CREATE TRIGGER s BEFORE INSERT ON {b} FOR EACH ROW WHEN (NEW.c1 = 'new') EXECUTE FUNCTION swallow()",
        ),
        ("DROP TRIGGER s ON {b}",),
    ),
    "the outbox: a rule": (("CREATE RULE r AS ON INSERT TO {b} DO INSTEAD NOTHING",), ("DROP RULE r ON {b}",)),
    "the outbox: row security": (
        ("ALTER TABLE {b} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",),
        ("ALTER TABLE {b} DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY",),
    ),
    "the outbox: SET UNLOGGED": (("ALTER TABLE {b} SET UNLOGGED",), ("ALTER TABLE {b} SET LOGGED",)),
    "the outbox: RENAME": (("ALTER TABLE {b} RENAME TO other",), ("ALTER TABLE roir_shard.other RENAME TO {o}",)),
    "the outbox: SET SCHEMA": (("ALTER TABLE {b} SET SCHEMA public",), ("ALTER TABLE {o} SET SCHEMA roir_shard",)),
    "the outbox: OWNER": (("ALTER TABLE {b} OWNER TO somebody",), ("ALTER TABLE {b} OWNER TO CURRENT_USER",)),
    "the outbox: DISABLE TRIGGER ALL": (
        ("ALTER TABLE {b} DISABLE TRIGGER ALL",),
        ("ALTER TABLE {b} ENABLE ALWAYS TRIGGER roir_announce",),
    ),
    "the outbox: TYPE": (
        ("ALTER TABLE {b} ALTER c1 TYPE varchar(1)",),
        ("ALTER TABLE {b} ALTER c1 TYPE text",),
    ),
    "the outbox: TYPE of what waits": (
        (),
        ("ALTER TABLE {b} ALTER c1 TYPE text USING left(c1, 1)",),
    ),
    "the outbox: DEFAULT of version": (
        ("ALTER TABLE {b} ALTER version SET DEFAULT -1",),
        ("ALTER TABLE {b} ALTER version SET DEFAULT nextval('roir_shard.version')",),
    ),
    "the outbox: DEFAULT of xid": (
        ("ALTER TABLE {b} ALTER xid SET DEFAULT '3'",),
        ("ALTER TABLE {b} ALTER xid SET DEFAULT pg_current_xact_id()",),
    ),
    "the outbox: its index": (
        ("DROP INDEX roir_shard.{o}_key",),
        ("DELETE FROM {b} x WHERE x.version > 0",),
    ),
    "the outbox: its other index": (("DROP INDEX roir_shard.{o}_version",), ()),
    "the outbox: REVOKE": (
        ("REVOKE ALL ON {b} FROM CURRENT_USER", "REVOKE USAGE ON SCHEMA roir_shard FROM PUBLIC"),
        ("GRANT ALL ON {b} TO CURRENT_USER",),
    ),
    "the outbox: TRUNCATE": ((), ("TRUNCATE {b}",)),
    "the outbox: DELETE": ((), ("DELETE FROM {b}",)),
    "the outbox: DROP": (("DROP TABLE {b} CASCADE",), ()),
    "the sequence: RESTART": (("ALTER SEQUENCE roir_shard.version RESTART",), ()),
    "the sequence: INCREMENT": (
        ("ALTER SEQUENCE roir_shard.version INCREMENT -1 MINVALUE -99999",),
        ("ALTER SEQUENCE roir_shard.version INCREMENT 1 NO MINVALUE RESTART 100000",),
    ),
    "the view: CREATE OR REPLACE": (
        (
            SAVED.format("format('CREATE OR REPLACE VIEW {b}_source AS %s', pg_get_viewdef('{b}_source'::regclass))"),
            "DO $$ BEGIN EXECUTE replace(current_setting('x.src'), ';', ' WHERE s.id <> 20'); END $$",
        ),
        (AGAIN,),
    ),
    "the view: OWNER": (
        (
            "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
            "GRANT SELECT ON t TO nobody",
            "ALTER VIEW {b}_source OWNER TO nobody",
        ),
        ("ALTER VIEW {b}_source OWNER TO CURRENT_USER", "ALTER TABLE t DISABLE ROW LEVEL SECURITY"),
    ),
    "the view: DROP": (("DROP VIEW {b}_source",), ()),
    "the view: RENAME": (("ALTER VIEW {b}_source RENAME TO x",), ("ALTER VIEW roir_shard.x RENAME TO {o}_source",)),
    "the schema: RENAME": (("ALTER SCHEMA roir_shard RENAME TO x",), ("ALTER SCHEMA x RENAME TO roir_shard",)),
}
SWAPPED = (("c1", "c2"), ("c2", "c1"))
ANNOUNCING: dict[str, Case] = {
    "the foreign table: a trigger": (
        (SWALLOW, "CREATE TRIGGER s BEFORE INSERT ON {b}_intent FOR EACH ROW EXECUTE FUNCTION swallow()"),
        ("DROP TRIGGER s ON {b}_intent",),
    ),
    "the foreign table: OPTIONS": (
        ("ALTER FOREIGN TABLE {b}_intent OPTIONS (SET table_name 'elsewhere')",),
        ("ALTER FOREIGN TABLE {b}_intent OPTIONS (SET table_name 'g1_intent')",),
    ),
    "the foreign table: OPTIONS of a column": (
        tuple(f"ALTER FOREIGN TABLE {{b}}_intent ALTER {a} OPTIONS (ADD column_name '{b}')" for a, b in SWAPPED),
        tuple(f"ALTER FOREIGN TABLE {{b}}_intent ALTER {a} OPTIONS (DROP column_name)" for a, _ in SWAPPED),
    ),
    "the foreign table: DROP": (("DROP FOREIGN TABLE {b}_intent",), ()),
    "the foreign table: RENAME": (
        (
            "ALTER FOREIGN TABLE {b}_intent RENAME TO x",
            "CREATE TABLE {b}_intent (LIKE roir_shard.x)",
        ),
        ("DROP TABLE {b}_intent", "ALTER FOREIGN TABLE roir_shard.x RENAME TO {o}_intent"),
    ),
    "the foreign server: OPTIONS": (
        ("ALTER SERVER \"{s}\" OPTIONS (SET dbname '{d}')",),
        ("ALTER SERVER \"{s}\" OPTIONS (SET dbname '{x}')",),
    ),
    "the foreign server: RENAME": (
        ('ALTER SERVER "{s}" RENAME TO x',),
        ('ALTER SERVER x RENAME TO "{s}"',),
    ),
    "the foreign server: OWNER": (
        ('ALTER SERVER "{s}" OWNER TO somebody',),
        ('ALTER SERVER "{s}" OWNER TO CURRENT_USER',),
    ),
    "the login: DROP": (('DROP USER MAPPING FOR CURRENT_USER SERVER "{s}"',), ()),
}
SOURCE: dict[str, Case] = {
    "the table: DISABLE TRIGGER ALL": (
        ("ALTER TABLE t DISABLE TRIGGER ALL",),
        (
            "ALTER TABLE t ENABLE TRIGGER ALL",
            *(f"ALTER TABLE t ENABLE ALWAYS TRIGGER roir_{{o}}{part}" for part in ("", "_t", "_w")),
        ),
    ),
    "the table: DISABLE TRIGGER USER": (
        ("ALTER TABLE t DISABLE TRIGGER USER",),
        tuple(f"ALTER TABLE t ENABLE ALWAYS TRIGGER roir_{{o}}{part}" for part in ("", "_t", "_w")),
    ),
    "the table: replica": (("SET session_replication_role = replica",), ()),
    "the table: local": (("SET session_replication_role = local",), ()),
    "the table: a trigger": (
        (
            "CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN IF NEW.id = 20 THEN NEW.id := 21; END IF; NEW.v := 7; RETURN NEW; END'",
            "CREATE TRIGGER a BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION other()",
        ),
        ("DROP TRIGGER a ON t",),
    ),
    "the table: a rule": (("CREATE RULE r AS ON DELETE TO t DO INSTEAD NOTHING",), ("DROP RULE r ON t",)),
    "the table: row security": (
        ("ALTER TABLE t ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",),
        ("ALTER TABLE t DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY",),
    ),
    "the table: SET UNLOGGED": (("ALTER TABLE t SET UNLOGGED",), ("ALTER TABLE t SET LOGGED",)),
    "the table: RENAME": (("ALTER TABLE t RENAME TO s",), ("ALTER TABLE s RENAME TO t",)),
    "the table: a child": (("CREATE TABLE child () INHERITS (t)",), ("DROP TABLE child",)),
    "nothing": ((), ()),
}
CASES = of_triggers() | of_functions() | OUTBOX | ANNOUNCING | SOURCE
WRITES = (
    "INSERT INTO t VALUES (20, 'new', 1)",
    "UPDATE t SET k = 'moved' WHERE id = 1",
    "UPDATE t SET v = 5 WHERE id = 2",
    "DELETE FROM t WHERE id = 3",
)
INTENTS = "SELECT count(*) FROM roir_data.g1_intent WHERE c2 = 's0'"
STRICT = "SELECT strict_from IS NOT NULL AND doubtful_at IS NULL FROM roir.feed"


@pytest.fixture(scope="module")
def saved(contrib: str) -> Iterator[tuple[Shards, Callable[[], None]]]:
    """A unique index over one shard, which is announced and enforced; and what puts both databases back to it."""
    made = make_databases(contrib, "done", 1, "roir_template")
    made.run(*TABLE)
    registry.add(made.database, "s0", made.dsns["s0"], index_dsn=index_dsn(made))
    prepared, run = apart.begin(made, unique=True)
    apart.finish_all(made, run)
    announce.announce(made.database, "public.ix", "server")
    assert enforce.enforce_index(made.database, "public.ix")
    made.ask("CREATE TABLE roir_data.elsewhere (LIKE roir_data.g1_intent)")
    apart.ship_all(made, prepared.generation_id)
    for role in ("somebody SUPERUSER", "nobody"):
        made.ask(f"CREATE ROLE {role}")
    names = [urlsplit(dsn).path[1:] for dsn in (made.index, *made.dsns.values())]
    for name in names:
        run_sql(contrib, f"CREATE DATABASE {name}_saved TEMPLATE {name} {COPIED}")

    def put_back() -> None:
        for name in names:
            run_sql(
                contrib,
                f"DROP DATABASE {name} WITH (FORCE)",
                f"CREATE DATABASE {name} TEMPLATE {name}_saved {COPIED}",
            )
        made.ask("UPDATE roir.feed SET strict_history = roir.server_history()")
        made.ask("UPDATE roir.generation SET unique_history = roir.server_history()")
        assert made.ask(STRICT) == [(True,)]
        assert made.ask("SELECT roir.unique_problem(1)") == [(None,)]

    yield made, put_back
    for name in names:
        run_sql(contrib, f"DROP DATABASE {name}_saved WITH (FORCE)")
    drop_databases(contrib, made)
    for role in ("somebody", "nobody"):
        run_sql(contrib, f"DROP ROLE {role}")


def names_of(made: Shards) -> dict[str, str]:
    """The values of the placeholders in cases."""
    [(outbox,)] = made.ask("SELECT outbox FROM roir.feed")
    [(server,)] = made.ask("SELECT srvname::text FROM pg_foreign_server", shard="s0")
    there, here = (urlsplit(dsn).path[1:] for dsn in (made.dsns["s0"], made.index))
    return {"{b}": f"roir_shard.{outbox}", "{o}": outbox, "{s}": server, "{d}": there, "{x}": here}


def written(made: Shards, done: list[str], truncates: bool, undone: list[str]) -> bool:
    """Does it, writes, undoes it, in one session; returns whether a write committed that no intent names."""
    with closing(psycopg2.connect(made.dsns["s0"])) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        for statement in done:
            cursor.execute(statement)
        unannounced = False
        for statement in (*WRITES, *(["TRUNCATE t"] if truncates else [])):
            before = made.ask(INTENTS)
            try:
                cursor.execute(statement)
            except psycopg2.Error:
                continue
            wrote = statement == "TRUNCATE t" or cursor.rowcount > 0
            unannounced |= wrote and made.ask(INTENTS) == before
        cursor.execute("RESET session_replication_role")
        for statement in undone:
            cursor.execute(statement)
    return unannounced


def shipped(made: Shards) -> None:
    """Ships as the service does; a pass that fails says so, and the next one is tried."""
    [(feed,)] = made.ask("SELECT id FROM roir.feed")
    for _ in range(3):
        shipper = FeedShipper(made.database, feed, "test")
        assert shipper.claim(take_over=True)
        try:
            shipper.ship_pass()
        except InShard as error:
            note_failed(shipper, error)
        except DBAPIError as error:
            if note_refused(made.database, feed, error) is None:
                raise
        finally:
            shipper.release()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("undone", [True, False], ids=["undone", "left"])
@pytest.mark.parametrize("what", CASES)
def test_what_is_done_in_a_shard_loses_nothing_without_a_word(
    saved: tuple[Shards, Callable[[], None]], what: str, undone: bool
) -> None:
    made, put_back = saved
    put_back()
    names = names_of(made)

    def named(statements: tuple[str, ...]) -> list[str]:
        for one, name in names.items():
            statements = tuple(statement.replace(one, name) for statement in statements)
        return list(statements)

    do, undo = CASES[what]
    truncates = "TRUNCATE" in what or "emptied" in what or "whole" in what or what.startswith("the table: DISABLE")
    unannounced = written(made, named(do), truncates, named(undo) if undone else [])
    shipped(made)
    [(doubted, strict)] = made.ask("SELECT doubtful_at IS NOT NULL, strict_from IS NOT NULL FROM roir.feed")
    [(away,)] = made.ask("SELECT problem IS NOT NULL FROM roir.shard")
    if not doubted and not away:
        apart.assert_exact(made, 1)
    assert not (unannounced and strict and not doubted), "a write wasn't announced, and nobody says so"
    [(mode,)] = made.ask("SELECT unique_mode FROM roir.generation")
    assert mode == "refuse" or doubted or not strict
    assert not (unannounced and mode == "refuse")
