"""Settings: an index comes out the same, whatever a user, a role or a database has set.

Every setting that a user may change is set to each of its values: in the writer's session, as the role's default, as
the database's. All settings go through one life cycle together if possible; if that fails, alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

import psycopg2
import psycopg2.extensions
import pytest

from airflow_roir.engine import clean_up, lifecycle, switch
from airflow_roir.engine.build import Claim
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import SESSION_SETTINGS, Database, execute
from airflow_roir.engine.partitions import attach
from airflow_roir.engine.sessions import own_session
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.verify.report import report_of
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.operation import Status
from tests.conftest import database_dsn, run_sql
from tests.engine import steps, verifying
from tests.engine.interposed import before
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

# Types whose text depends on settings, each as a bound of partitions; and one whose text has a backslash and quotes.
BOUNDS = {
    "at": ("timestamptz", "2020-02-03 04:05:06.789+00"),
    "d": ("date", "2020-02-03"),
    "f": ("float8", "0.1234567890123456"),
    "s": ("float4", "0.12345678"),
    "i": ("interval", "1 year -2 days +03:04:05.678"),
    "b": ("bytea", "\\x5c27ff00"),
    "m": ("money", "1234.56"),
    "x": ("text", "a\\'b\"c"),
    "a": ("int[]", "{1,NULL}"),
}
COLUMNS = ", ".join(f"{name} {kind} NOT NULL" for name, (kind, _) in BOUNDS.items())


def literal(value: str) -> str:
    """A literal that means the same under every setting."""
    return "convert_from(decode('" + value.encode().hex() + "', 'hex'), 'UTF8')"


def rows(first: int, last: int) -> str:
    """Rows on both sides of each bound, and on the bound."""
    values = {
        "at": "timestamptz 'epoch' + interval '1 second' * (1580702706.789 + (n % 5 - 2) * 86400.123456)",
        "d": "date 'epoch' + 18295 + n % 5 - 2",
        "f": "0.1234567890123456::float8 + (n % 5 - 2) * 1e-16::float8",
        "s": "0.12345678::float4 + (n % 5 - 2) * 1e-8::float4",
        "i": "make_interval(1, 0, 0, n % 5 - 4, 3, 4, 5.678)",
        "b": "decode('5c27ff0' || n % 3, 'hex')",
        "m": "(1234.56 + n % 5 - 2)::numeric::money",
        "x": f"{literal(BOUNDS['x'][1])} || CASE n % 3 WHEN 0 THEN '' ELSE chr(92) || n % 3 END",
        "a": "CASE n % 3 WHEN 0 THEN ARRAY[1, NULL] WHEN 1 THEN ARRAY[1] ELSE ARRAY[NULL, 2] END",
    }
    made = ", ".join(values.values())
    names = ", ".join(f"'{name}'" for name in BOUNDS)
    return (
        f"INSERT INTO t (id, kind, k, v, {', '.join(values)}) "
        f"SELECT n, (ARRAY[{names}])[n % {len(BOUNDS)} + 1], "
        "CASE n % 6 WHEN 0 THEN NULL WHEN 1 THEN chr(92) || n % 9 ELSE 'k' || n % 9 END, n, "
        f"{made} FROM (SELECT n * 7 AS n FROM generate_series({first}, {last}) n) n "
    )


SETUP = (
    f"CREATE TABLE t (id int, kind text, k text, v int, {COLUMNS}, "
    f"PRIMARY KEY (id, kind, {', '.join(BOUNDS)})) PARTITION BY LIST (kind)",
    *(
        statement
        for name, (_, bound) in BOUNDS.items()
        for statement in (
            f"CREATE TABLE p_{name} PARTITION OF t FOR VALUES IN ('{name}') PARTITION BY RANGE ({name})",
            f"CREATE TABLE p_{name}_high PARTITION OF p_{name} "
            f"FOR VALUES FROM ('{bound.replace(chr(39), chr(39) * 2)}') TO (MAXVALUE)",
            f"CREATE TABLE p_{name}_low PARTITION OF p_{name} DEFAULT",
        )
    ),
    rows(1, 120),
    "ANALYZE t",
)
Settings = Mapping[str, str]


def set_all(user: psycopg2.extensions.connection, settings: Settings) -> None:
    """Sets what this role may set, in a user's session. Other settings stay as they are."""
    for name, value in settings.items():
        with suppress(psycopg2.Error):
            sql(user, "SELECT set_config(%s, %s, false)", name, value)
            user.commit()
        user.rollback()


class Writer:
    """A user's session under settings. Its statements are the same in every phase."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        self.session = steps.session(dsn)
        # The transaction's own modes aren't tested here, nor settings that prevent writes without an index too.
        self.session.set_session(isolation_level="READ COMMITTED", readonly=False, deferrable=False)
        set_all(self.session, settings)

    def write(self, round_: int) -> None:
        first = 1000 * (round_ + 1)
        for statement in (
            rows(first, first + 40),
            f"UPDATE t SET v = v + 1 WHERE id % 11 = {round_}",
            f"UPDATE t SET k = CASE WHEN k IS NULL THEN 'was null' ELSE NULL END WHERE id % 11 = {round_ + 4}",
            f"UPDATE t SET id = -id WHERE id % 13 = {round_}",
            f"DELETE FROM t WHERE id % 17 = {round_}",
            rows(first + 30, first + 50)
            + f"ON CONFLICT (id, kind, {', '.join(BOUNDS)}) DO UPDATE SET v = -1, k = 'up'",
            *(f"TRUNCATE p_{name}_{'high' if round_ % 2 else 'low'}" for name in BOUNDS),
            rows(first + 100, first + 130),
        ):
            sql(self.session, statement)
            self.session.commit()
        assert sql(self.session, "SELECT count(*) > 0 FROM t")[0][0]
        self.session.commit()


def life_cycle(dsn: str, settings: Settings, in_session: bool) -> None:
    """Goes from prepare to clean-up and verifies, with writes in each mode; a leaf leaves and comes back meanwhile."""
    database = Database(dsn, "roir tests")
    writer = Writer(dsn, settings if in_session else {})
    _, run = steps.begin(database, include="v", ranges=3, segments=2, batch_rows=25)
    worker = steps.worker(database, run)
    with worker.connection:
        claim = worker.claim()
        assert isinstance(claim, Claim)
        assert isinstance(worker.step(claim), Step)
    writer.write(0)
    run = start_run(database, "ix", "test", take_over=True)
    steps.build_all(database, run)
    steps.seal_all(database, run)
    writer.write(1)
    switch.switch(database, run)
    writer.write(2)
    steps.fold_and_publish(database, run)
    steps.assert_exact(database)
    writer.write(3)
    steps.assert_exact(database)
    for name in ("at", "x"):
        sql(writer.session, f"SELECT roir.detach_partition('p_{name}_high')")
        writer.session.commit()
        steps.assert_exact(database)
        clean_up.clean_up(database)
        bound = BOUNDS[name][1].replace("'", "''")
        attach.attach_partition(
            database, f"p_{name}", f"p_{name}_high", f"FOR VALUES FROM ('{bound}') TO (MAXVALUE)", "x"
        )
    steps.assert_exact(database)
    writer.write(0)
    # A user that may read no view can't read an index.
    set_all(writer.session, {"restrict_nonsystem_relation_kind": ""})
    read = sql(writer.session, "SELECT count(*), sum(v) FROM public.ix")
    assert read == sql(writer.session, "SELECT count(*), sum(v) FROM public.t"), "what this user's queries see"
    writer.session.rollback()
    report = clean_up.clean_up(database)
    assert not report.warnings
    steps.assert_exact(database)
    compared = verifying.begin(database)
    while operation_status(database, compared.operation_id).status == Status.RUNNING:
        verifying.go_through(database, compared)
    assert report_of(database, compared.operation_id).is_exact
    writer.session.close()


# Settings that end a user's statement or session, at values long enough for a statement here. A shorter value fails the
# statement without an index as well.
LONG = {
    name: ["0", "600000"]
    for name in (
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "idle_session_timeout",
        "transaction_timeout",
        "client_connection_check_interval",
        "tcp_user_timeout",
    )
}
VALUES = {
    **LONG,
    "DateStyle": ["ISO, DMY", "SQL, DMY", "SQL, MDY", "German, DMY", "Postgres, MDY", "Postgres, DMY", "ISO, YMD"],
    "TimeZone": ["Asia/Kolkata", "America/St_Johns", "Asia/Shanghai", "Pacific/Apia", "UTC", "<+0530>-05:30"],
    "timezone_abbreviations": ["India", "Australia", "Default"],
    "client_encoding": ["LATIN1", "SQL_ASCII", "WIN1252", "UTF8", "EUC_JP"],
    # With the table in it: else its bare name means nothing, to us neither.
    "search_path": ["pg_temp, public", "public, pg_catalog", "nowhere, public"],
    "default_table_access_method": ["heap", "heap2"],
    "default_tablespace": ["", "pg_default"],
    "temp_tablespaces": ["", "pg_default"],
    "default_text_search_config": ["pg_catalog.german", "pg_catalog.simple"],
    "lc_monetary": ["C", "C.UTF-8", "POSIX"],
    "lc_numeric": ["C", "C.UTF-8"],
    "lc_time": ["C", "C.UTF-8"],
    "lc_messages": ["C", "C.UTF-8"],
    "application_name": ["", "x'y\\z"],
    "createrole_self_grant": ["set", "inherit", ""],
    "restrict_nonsystem_relation_kind": ["view", "foreign-table", ""],
    "wal_consistency_checking": ["", "heap"],
    "backtrace_functions": ["", "exec_stmt"],
    "plpgsql.extra_errors": ["all", "none", "too_many_rows"],
    "plpgsql.extra_warnings": ["all", "none"],
    # More than a machine of ours has is refused by itself, or takes all the memory that there is.
    "work_mem": ["64", "4096", "65536"],
    "maintenance_work_mem": ["64", "1024", "65536"],
    "temp_buffers": ["100", "1024"],
    "hash_mem_multiplier": ["1", "3.7"],
    "logical_decoding_work_mem": ["64"],
    "max_stack_depth": ["1000", "2048"],
    "geqo_threshold": ["2", "12"],
    "geqo_pool_size": ["0", "7"],
    "geqo_generations": ["0", "3"],
    "log_min_duration_statement": ["-1", "0"],
    "temp_file_limit": ["-1", "100000"],
    "commit_delay": ["0", "100"],
    "vacuum_cost_delay": ["0", "0.5"],
    "deadlock_timeout": ["900", "1000"],
    "scram_iterations": ["1"],
}
# Settings that a test can't change, or that an open session can't.
LEFT_OUT = {
    "transaction_isolation": "this transaction's alone; `default_transaction_isolation` is the setting",
    "transaction_read_only": "likewise",
    "transaction_deferrable": "likewise",
    "local_preload_libraries": "a library that isn't there ends every session",
    "session_preload_libraries": "likewise",
    "dynamic_library_path": "where libraries are, for who may load some",
    "extension_control_path": "likewise",
    "extension_destdir": "likewise",
    "ignore_checksum_failure": "reads damaged pages: another table, not another index",
    "zero_damaged_pages": "likewise",
    "allow_system_table_mods": "for those who mean to break the catalogs",
    "debug_discard_caches": "only in servers that are built for it",
    "jit_dump_bitcode": "writes files",
    "tcp_keepalives_idle": "a socket's, and tests have none",
    "tcp_keepalives_interval": "likewise",
    "tcp_keepalives_count": "likewise",
    "event_triggers": "switches the guard off, which is told as a warning: tests/engine/test_guard.py",
    "session_replication_role": "a replica's writes: tests/engine/test_replication.py",
    "exit_on_error": "ends the session of who makes a mistake",
}


def settings_of(dsn: str) -> dict[str, list[str]]:
    """Every setting that a user may change, or may be granted, with its values."""
    connection = steps.session(dsn)
    sql(connection, "DO $$ BEGIN END $$")  # loads plpgsql, which has settings of its own
    found = sql(
        connection,
        "SELECT name, vartype, min_val, max_val, boot_val, enumvals FROM pg_settings "
        "WHERE context IN ('user', 'superuser') ORDER BY name",
    )
    connection.close()
    values: dict[str, list[str]] = {}
    for name, kind, low, high, boot, enum in found:
        if name in LEFT_OUT:
            continue
        if name in VALUES:
            values[name] = VALUES[name]
        elif kind == "bool":
            values[name] = ["on", "off"]
        elif kind == "enum":
            values[name] = list(enum)
        elif kind in ("integer", "real"):
            # The greatest there is takes memory, or time, that no test has.
            values[name] = list(
                dict.fromkeys([low, boot, high if float(high) <= 100_000 or kind == "real" else "9999"])
            )
        else:
            raise AssertionError(f"{name}: name odd values for it in VALUES, or say in LEFT_OUT why not")
    return values


def rounds(values: Mapping[str, list[str]]) -> list[dict[str, str]]:
    """Each value of each setting in one round, all settings together."""
    most = max(map(len, values.values()))
    return [{name: some[n % len(some)] for name, some in values.items()} for n in range(most)]


@pytest.fixture(scope="module")
def prepared(server: str) -> Iterator[str]:
    """The name of a database with the table, to be cloned."""
    name = "settings_template"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE roir_template")
    run_sql(
        database_dsn(server, name),
        *SETUP,
        "CREATE ACCESS METHOD heap2 TYPE TABLE HANDLER heap_tableam_handler",
    )
    yield name
    run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


_numbers = itertools.count(1)
WAYS = ("session", "role", "database")


def listed(setting: str, value: str) -> str:
    """The value as ALTER … SET takes it: a list is to be one, not one name with a comma in it."""
    lists = ("search_path", "DateStyle", "temp_tablespaces", "restrict_nonsystem_relation_kind")
    parts = value.split(",") if setting in lists else [value]
    return ", ".join("'" + part.strip().strip('"').replace("'", "''") + "'" for part in parts)


def go_through(server: str, template: str, way: str, settings: Settings) -> None:
    """Goes through one life cycle, in a database of its own, with settings made in one way."""
    name = f"settings_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        for setting, value in settings.items() if way != "session" else ():
            whom = f"DATABASE {name}" if way == "database" else f"ROLE postgres IN DATABASE {name}"
            with suppress(psycopg2.Error):
                run_sql(server, f"ALTER {whom} SET {setting} TO {listed(setting, value)}")
        life_cycle(database_dsn(server, name), settings, in_session=way == "session")
    finally:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


def guilty(server: str, template: str, way: str, settings: dict[str, str], size: int) -> dict[str, str]:
    """The smallest set of settings with which it fails: leaves out smaller and smaller pieces."""
    names = list(settings)
    for first in range(0, len(names), size):
        fewer = {name: value for name, value in settings.items() if name not in names[first : first + size]}
        if len(fewer) == len(settings):
            continue
        try:
            go_through(server, template, way, fewer)
        except Exception:
            settings = fewer
    return settings if size == 1 else guilty(server, template, way, settings, max(1, size // 4))


# The values that were found to matter, and others like them. The sweep tries all.
SAMPLE = {
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kolkata",
    "extra_float_digits": "0",
    "bytea_output": "escape",
    "array_nulls": "off",
    "standard_conforming_strings": "off",
    "quote_all_identifiers": "on",
    "transform_null_equals": "on",
    "default_transaction_isolation": "repeatable read",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "default_table_access_method": "heap2",
    "default_tablespace": "pg_default",
    "restrict_nonsystem_relation_kind": "view",
    "search_path": "pg_temp, public",
    "client_encoding": "LATIN1",
    "session_replication_role": "origin",
    "client_min_messages": "log",
    "enable_indexscan": "off",
    "enable_sort": "off",
    "plan_cache_mode": "force_generic_plan",
    "debug_parallel_query": "on",
    "lc_monetary": "C.UTF-8",
}


def _for(way: str, settings: Settings) -> dict[str, str]:
    """The settings without those that would keep this writer from writing at all, which other tests try."""
    if way != "session":
        return dict(settings)
    # A REPEATABLE READ writer may get 40001, and can't truncate a leaf: tests/engine/test_old_snapshots.py.
    return {name: value for name, value in settings.items() if not name.startswith("default_transaction")} | {
        "search_path": "pg_temp, public"
    }


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("way", ["session", "database"])
def test_settings_that_change_texts_or_meanings_change_no_index(server: str, prepared: str, way: str) -> None:
    """Found: `array_nulls`, `standard_conforming_strings`, `geqo` of a user's session failed a leaf's `TRUNCATE`. It
    holds: the functions that users call pin them.
    """
    go_through(server, prepared, way, _for(way, SAMPLE))


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("way", WAYS)
def test_no_setting_at_any_value_changes_an_index(server: str, prepared: str, way: str) -> None:
    values = settings_of(server)
    for number, settings in enumerate(rounds(values)):
        wanted = _for(way, settings)
        try:
            go_through(server, prepared, way, wanted)
        except Exception as error:
            few = guilty(server, prepared, way, wanted, len(wanted) // 4)
            raise AssertionError(f"round {number}, {way}: {few}: {error}") from error


# For each setting that our sessions pin, another value.
HOSTILE = {
    **SAMPLE,
    "xmloption": "document",
    "xmlbinary": "hex",
    "check_function_bodies": "off",
    "idle_in_transaction_session_timeout": "11s",
    "idle_session_timeout": "11s",
    "statement_timeout": "11s",
    "transaction_timeout": "11s",
    "lock_timeout": "11s",
    "exit_on_error": "on",
    "row_security": "on",
    "jit": "on",
    "geqo": "on",
    "session_replication_role": "replica",
}
PINNED = {
    **SESSION_SETTINGS,
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "default_tablespace": "",
    "session_replication_role": "origin",
    "client_encoding": "UTF8",
}


def test_no_default_of_a_database_reaches_into_our_sessions(dsn: str, server: str) -> None:
    """Found: `transaction_timeout` and its kin ended a seal; `default_tablespace = pg_default`, another access method,
    `geqo_threshold = 2` failed a build. It holds: pinned.
    """
    assert set(SESSION_SETTINGS) <= set(HOSTILE)
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT current_database()")
        [name] = cursor.fetchone() or ("",)
        cursor.execute("CREATE ACCESS METHOD heap2 TYPE TABLE HANDLER heap_tableam_handler")
    connection.close()
    known = settings_names(server)
    for setting, value in HOSTILE.items():
        if setting in known:
            run_sql(server, f"ALTER DATABASE {name} SET {setting} TO {listed(setting, value)}")
    database = Database(dsn, "roir tests")
    for connect in (database.connect, database.autocommit):
        with connect() as session:
            for setting, value in PINNED.items():
                if setting not in known:
                    continue
                now = execute(session, f"SHOW {setting}").scalar_one()
                same = f"SELECT '{now}'::interval = '{value}'::interval" if setting.endswith("timeout") else None
                assert execute(session, same).scalar_one() if same else now == value, setting
            assert execute(session, "SHOW transaction_isolation").scalar_one() == "read committed"
            # psycopg2's quoting survives these settings.
            odd = "a\\b'c\\"
            assert execute(session, "SELECT %(odd)s::text", {"odd": odd}).scalar_one() == odd


def settings_names(dsn: str) -> set[str]:
    return {name for (name,) in sql(steps.session(dsn), "SELECT lower(name) FROM pg_settings")} | {
        name for (name,) in sql(steps.session(dsn), "SELECT name FROM pg_settings")
    }


def test_functions_that_users_call_pin_what_ours_sessions_pin(dsn: str) -> None:
    """The others look a name up in the caller's search_path, deal with numbers, or are only called by us."""
    found = sql(
        steps.session(dsn),
        "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'roir'::regnamespace "
        "AND proname NOT IN ('published', 'is_doubtful', 'is_mine', 'is_in_mode', 'trusts', 'standing') "
        "AND EXISTS (SELECT FROM unnest(proconfig) c WHERE c LIKE 'search_path=%%')",
    )
    wanted = {"datestyle", "timezone", "intervalstyle", "extra_float_digits", "bytea_output", "array_nulls"}
    wanted |= {"standard_conforming_strings", "quote_all_identifiers", "transform_null_equals", "lc_monetary", "geqo"}
    ours = {name.lower(): value for name, value in SESSION_SETTINGS.items()}
    for name, config in found:
        pinned = {setting.split("=")[0].lower(): setting.split("=", 1)[1] for setting in config}
        for setting in wanted:
            assert pinned.get(setting, "").lower() == ours[setting].lower(), (name, setting)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_two_prepares_of_one_source_both_are_captured(dsn: str, server: str, isolation: str) -> None:
    """The second transaction has begun, with a snapshot, before the first one commits."""
    databases = hostile(dsn, server, isolation)
    run_sql(
        dsn, "CREATE TABLE u (id int PRIMARY KEY, k text)", "INSERT INTO u SELECT i, i FROM generate_series(1, 50) i"
    )
    with before(databases[0], "LOCK TABLE", lambda: steps.begin(databases[1], "ix2", "u")):
        steps.begin(databases[0], "ix1", "u")
    user = steps.session(dsn)
    user.set_session(isolation_level="READ COMMITTED")
    sql(user, "UPDATE u SET k = 'new' WHERE id % 2 = 0")
    user.commit()
    assert [sql(user, f"SELECT count(*) FROM roir_data.g{n}_delta")[0][0] > 0 for n in (1, 2)] == [True, True]
    user.rollback()
    for index in ("ix1", "ix2"):
        steps.finish_all(databases[0], start_run(databases[0], index, "test", take_over=True))
        steps.assert_exact(databases[0], index)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_two_switches_of_one_source_agree_with_its_capture(dsn: str, server: str, isolation: str) -> None:
    """Found: a default of role or database: of two prepares at `REPEATABLE READ` one generation wasn't captured; the
    same with two switches. It holds: sessions pin isolation, read only, deferrable before their first snapshot.
    """
    databases = hostile(dsn, server, isolation)
    run_sql(
        dsn, "CREATE TABLE u (id int PRIMARY KEY, k text)", "INSERT INTO u SELECT i, i FROM generate_series(1, 50) i"
    )
    runs = []
    for index in ("ix1", "ix2"):
        run = steps.sealed(databases[0], index, "u")
        runs.append(run)
    with before(databases[0], "LOCK TABLE", lambda: switch.switch(databases[1], runs[1])):
        switch.switch(databases[0], runs[0])
    user = steps.session(dsn)
    user.set_session(isolation_level="READ COMMITTED")
    sql(user, "UPDATE u SET k = 'new' WHERE id % 2 = 0")
    user.commit()
    assert [sql(user, f"SELECT count(*) FROM roir_data.g{n}_delta")[0][0] for n in (1, 2)] == [0, 0]
    user.rollback()
    for index, run in zip(("ix1", "ix2"), runs, strict=True):
        lifecycle.run_phases(databases[0], run)
        steps.assert_exact(databases[0], index)


def hostile(dsn: str, server: str, isolation: str) -> tuple[Database, Database]:
    """The databases of two processes, whose sessions would have that isolation by default."""
    name = dsn.split("?")[0].rsplit("/", 1)[1]
    run_sql(server, f"ALTER DATABASE {name} SET default_transaction_isolation TO '{isolation}'")
    return Database(dsn, "one"), Database(dsn, "other")


def test_a_time_out_of_open_transactions_does_not_end_the_look_for_a_pooler(dsn: str) -> None:
    """A busy machine delays the answer like this."""
    name = dsn.partition("?")[0].rpartition("/")[2]
    settings = {"default_transaction_read_only": "on", "idle_in_transaction_session_timeout": "'1ms'"}
    run_sql(dsn, *(f"ALTER DATABASE {name} SET {setting} = {value}" for setting, value in settings.items()))

    class Late(psycopg2.extensions.cursor):
        def fetchone(self) -> tuple[Any, ...] | None:
            row = super().fetchone()
            run_sql(dsn, "SELECT pg_sleep(0.05)")
            return row

    with closing(psycopg2.connect(dsn, cursor_factory=Late)) as connection:
        connection.autocommit = True
        assert own_session._server_pid(connection, alone=False) == connection.info.backend_pid
