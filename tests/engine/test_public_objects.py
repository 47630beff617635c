"""Every object of ours that a role other than ours can name, every verb, and what it can break.

The rights that the server reports are compared with the rights that are meant. A new object, or a right that isn't
listed, fails the test. Everything that is possible is tried.
"""

from __future__ import annotations

from contextlib import suppress

import psycopg2
import pytest

from airflow_roir.engine import clean_up, lifecycle
from airflow_roir.engine.health import faults
from airflow_roir.operation import Phase, Status
from airflow_roir.options import LIVE_OPTIONS, VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.public import World, documented
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

# Functions that run with our rights and that PUBLIC may call. They report the state of a generation, or are event
# triggers, which can't be called.
TELLING = {"apart", "fresh", "is_doubtful", "is_in_mode", "is_strict", "published", "ticks", "refuse_ddl",
           "refuse_drop", "refuse_concurrent_detach"}  # fmt: skip
OWNERS = {
    "roir_data.gN": "SELECT, INSERT, UPDATE, DELETE",
    "roir_data.gN_delta": "SELECT, INSERT, UPDATE, DELETE",
    "roir_data.gN_source": "SELECT, UPDATE",
    "roir_data.gN_s000": "SELECT, UPDATE, DELETE",
    "roir_data.gN_s001": "SELECT, UPDATE, DELETE",
    "roir_data.gN_s002": "SELECT, UPDATE, DELETE",
}
REST = "roir_data.gN_s000"
CONTROL = "roir.{}".format
# The rights of each role on relations, beside those of PUBLIC. The grants of the documentation are read there.
MEANT: dict[str, dict[str, str]] = {
    "PUBLIC": {},
    "app": {},
    "reader": {"ix": "SELECT"},
    "alice": OWNERS,
    "bob": {},
    "watcher": dict.fromkeys(
        map(
            CONTROL,
            (
                "resumable_operations",
                "index",
                "event",
                "progress_sample",
                "throttle_time",
                "signal_sample",
                "duplicate",
            ),
        ),
        "SELECT",
    ),
    "monitor": {
        **dict.fromkeys(
            map(
                CONTROL,
                (
                    "schema_version",
                    "home",
                    "index",
                    "generation",
                    "source_partition",
                    "operation",
                    "shown_operation",
                    "verification",
                    "lock_wait",
                    "throttle_time",
                    "signal_sample",
                    "setting",
                    "shard_lag",
                ),
            ),
            "SELECT",
        ),
        **dict.fromkeys(map(CONTROL, ("segment", "compaction_unit")), "SELECT of columns"),
    },
    "pauser": {
        "roir.operation": "SELECT, UPDATE of columns",
        "roir.index": "SELECT",
        "roir.resumable_operations": "SELECT",
        "roir.event": "INSERT",
    },
}


def furnish(world: World) -> None:
    """Creates all kinds of objects: a published index, a unique one, one that is being built; and all grants."""
    steps.make_index(world.database, "public.ix", "public.t", segments=2)
    steps.make_index(world.database, "public.ux", "public.t", "v", unique=True, segments=2)
    steps.begin(world.database, "public.iy", "public.t", "v", segments=2)
    world.run(
        "GRANT ALL ON t TO app",
        "GRANT SELECT ON ix TO reader",
        *(grant for role in ("watcher", "monitor", "pauser") for grant in documented(role)),
    )


def test_every_role_has_what_is_meant(world: World) -> None:
    """Before alice, bob has owned the table."""
    world.run("ALTER TABLE t OWNER TO bob")
    furnish(world)
    world.run("ALTER TABLE t OWNER TO alice")
    clean_up.clean_up(world.database)
    one = world.session("super")
    for role, meant in MEANT.items():
        found = world.rights("public" if role == "PUBLIC" else role)
        found = {name: verbs for name, verbs in found.items() if name[0] != "function"}
        wanted = {("relation", name): verbs for name, verbs in meant.items()}
        wanted |= {("schema", name): "USAGE" for name in ("roir", "roir_data")}
        if role == "alice":
            # The default segment of a unique generation is written directly.
            assert found.pop(("relation", REST)) in (meant[REST], OWNERS["roir_data.gN"])
            del wanted["relation", REST]
        assert found == wanted, role
        defining = sql(
            one,
            "SELECT p.proname FROM pg_proc p WHERE p.pronamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) "
            "AND p.prosecdef AND has_function_privilege(%s, p.oid, 'EXECUTE')",
            "public" if role == "PUBLIC" else world.roles[role],
        )
        names = {name.rstrip("0123456789") for (name,) in defining}
        # These run as the capture's owner.
        assert names - TELLING <= ({"capture_", "read_", "note_taken"} if role == "alice" else set()), role
    one.close()


CALLS = """
SELECT format('SELECT * FROM %%s(%%s)', p.oid::regproc,
              (SELECT string_agg(format('%%s::%%s', CASE
                   WHEN t.typname IN ('text', 'name') THEN quote_literal(%s::text)
                   WHEN t.typname LIKE 'reg%%' OR t.typname = 'oid' THEN quote_literal('roir_data.g1')||'::regclass'
                   WHEN t.typname = 'bool' THEN 'true' WHEN t.typcategory = 'N' THEN '1' ELSE 'NULL' END,
                   format_type(t.oid, NULL)), ', ' ORDER BY a.n)
                 FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY a (type, n) JOIN pg_type t ON t.oid = a.type))
  FROM pg_proc p
 WHERE p.pronamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) AND p.prokind = 'f'
   AND p.prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype) ORDER BY p.oid
"""
PAUSING = ("pause", "resume", "change", "abort")
TEXTS = ("ix", "public.ux", "roir_data.g1", "'; DROP TABLE public.t; --", "true", "x", "")
STATE = """
SELECT md5(string_agg(x.line, ' ' ORDER BY x.line)) FROM (
    SELECT concat('index ', i) AS line FROM roir.index i UNION ALL SELECT concat('g ', g) FROM roir.generation g
    UNION ALL SELECT concat('o ', o) FROM roir.operation o UNION ALL SELECT concat('r ', r) FROM roir.scan_range r
    UNION ALL SELECT concat('c ', c.oid, c.relname, c.relowner, c.relacl) FROM pg_class c
               WHERE c.relnamespace <> 'pg_toast'::regnamespace
    UNION ALL SELECT concat('f ', p.oid, p.proname, p.proowner, p.proacl, p.prosrc) FROM pg_proc p
    UNION ALL SELECT concat('t ', t.oid, t.tgname, t.tgenabled) FROM pg_trigger t
    UNION ALL SELECT concat('e ', b) FROM roir_data.g1 b UNION ALL SELECT concat('u ', b) FROM roir_data.g2 b
    UNION ALL SELECT concat('row ', t) FROM t) x
"""


@pytest.mark.sample(0)
def test_no_function_changes_anything_for_who_may_not(world: World) -> None:
    """Each role calls each function with hostile arguments, and commits. A pauser may pause."""
    furnish(world)
    admin = world.session("super")
    admin.autocommit = True
    before = sql(admin, STATE)
    called = 0
    for role in ("app", "reader", "watcher", "monitor", "pauser"):
        one = world.session(role)
        one.autocommit = True
        sql(one, "SET lock_timeout = '50ms'; SET statement_timeout = '5s'")
        for text in TEXTS:
            for (call,) in sql(admin, CALLS, text):
                if role == "pauser" and any(f"roir.{verb}(" in call for verb in PAUSING):
                    continue
                called += 1
                with suppress(psycopg2.Error):
                    sql(one, call)
                assert not one.closed, call
        assert sql(admin, STATE) == before, role
        one.close()
    assert called > len(TEXTS) * 5 * 80
    admin.close()


OLD = "GRANT SELECT, UPDATE ON roir.operation TO pauser"
VALUES = {
    "text": ("'x'", "NULL"),
    "bigint": ("{column} + 1", "{column} - 1", "1", "2"),
    "integer": ("7",),
    "jsonb": ("'{{}}'", """'{{"x": 1}}'"""),
    "timestamp with time zone": ("now()", "'infinity'"),
    "double precision": ("1",),
    "boolean": ("NOT {column}",),
}
STATUSES = tuple(status.value for status in Status)
PHASES = tuple(phase.value for phase in Phase)
HIS = ("status", "paused_at", "paused_by", "pause_reason", "queued_at", "queued_seen_at", "notice", "phase_seconds",
       "ticked_at", "heartbeat_at", "working_since", "awaited_until", "run_ended_at", *LIVE_OPTIONS, "granted",
       "granted_at")  # fmt: skip


@pytest.mark.sample(0)
@pytest.mark.parametrize("grants", ["documented", "old"])
def test_a_pauser_changes_of_an_operation_what_a_pause_changes(world: World, grants: str) -> None:
    """Sets each column to each value. Another generation's id, a later phase and a former epoch are refused."""
    furnish(world)
    if grants == "old":
        world.run(OLD, "GRANT INSERT, DELETE ON roir.scan_range TO pauser")
    admin = world.session("super")
    columns = sql(
        admin,
        "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute "
        "WHERE attrelid = 'roir.operation'::regclass AND attnum > 0 AND NOT attisdropped",
    )
    done: dict[str, set[str]] = {}
    for column, kind in columns:
        values = {"status": tuple(map(repr, STATUSES)), "phase": tuple(map(repr, PHASES))}.get(column, VALUES[kind])
        for value in values:
            for others in ("", ", status = 'paused'", ", status = 'aborting'"):
                if others and column == "status":
                    continue
                change = f"UPDATE roir.operation SET {column} = {value.format(column=column)}{others} WHERE id = 3"
                sql(admin, "SELECT 1")
                was = sql(admin, f"SELECT {column}::text FROM roir.operation WHERE id = 3")
                if world.outcome("pauser", change) == "done" and was != sql(
                    admin, f"SELECT ({value.format(column=column)})::text FROM roir.operation WHERE id = 3"
                ):
                    done.setdefault(column, set()).add(f"{value}{others}")
    admin.close()
    assert done.pop("status") == {"'paused'", "'aborting'"}
    # Only together with an abort, and never back.
    assert done.pop("epoch", set()) <= {"{column} + 1, status = 'aborting'"}
    assert all("aborting" in change for change in done.pop("owner", ()))
    assert set(done) <= set(HIS)


@pytest.mark.sample(0)
@pytest.mark.parametrize("grants", ["documented", "old"])
def test_a_pauser_pauses_resumes_changes_and_aborts(world: World, grants: str) -> None:
    furnish(world)
    steps.make_index(world.database, "public.ix", None, None)
    if grants == "old":
        world.run(OLD)
    one = world.session("pauser")
    one.autocommit = True
    for call in ("pause('public.iy')", "change('public.iy', parallelism => 2, throttle => 'replica_lag=5MB')",
                 "resume('public.iy', batch_rows => 5000)", "pause('public.iy', 'for now')"):  # fmt: skip
        sql(one, f"SELECT roir.{call}")
    assert world.outcome("pauser", "UPDATE roir.operation SET generation_id = 1, index_id = 1 WHERE id = 3") == "42501"
    sql(one, "SELECT roir.abort('public.iy')")
    one.close()
    assert clean_up.clean_up(world.database).operations_aborted == 1
    one = world.session("super")
    assert sql(one, "SELECT id, status FROM roir.generation ORDER BY id") == [
        (1, "retired"), (2, "active"), (3, "dropped"), (4, "active")]  # fmt: skip
    one.close()


HANDOVERS = {
    "ALTER TABLE": ("ALTER TABLE t OWNER TO bob",),
    "REASSIGN OWNED": ("REASSIGN OWNED BY alice TO bob",),
    "by way of another": ("ALTER TABLE t OWNER TO reader", "REASSIGN OWNED BY reader TO bob"),
    "there and back": ("ALTER TABLE t OWNER TO bob", "ALTER TABLE t OWNER TO alice", "REASSIGN OWNED BY alice TO bob"),
}
WRITES = ("DELETE FROM roir_data.g1", "SELECT FROM roir_data.g1_source", "UPDATE roir_data.g1_source SET c1 = 'x'",
          "SELECT FROM roir_data.g1", "DELETE FROM roir_data.g3", "SELECT FROM roir_data.g3_source",
          "INSERT INTO roir_data.g3_delta SELECT FROM t", "DELETE FROM roir_data.g1_s001")  # fmt: skip


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("how", HANDOVERS)
def test_a_former_owner_keeps_no_right(world: World, how: str, guarded: bool) -> None:
    """With event triggers ALTER TABLE takes them at once. Else the status names the former owner until the clean-up."""
    if guarded:
        world.run("SELECT roir.guard()")
    furnish(world)
    before = [world.outcome("alice", statement) for statement in WRITES]
    assert before.count("42501") == 0
    world.run("GRANT CREATE ON SCHEMA public TO reader", "GRANT reader TO builder", *HANDOVERS[how])
    world.run("GRANT SELECT ON roir_data.g1 TO monitor")
    at_once = guarded and how == "ALTER TABLE"
    with world.database.transaction() as connection:
        told = [line for line in faults.warnings(connection) if "roir clean-up" in line]
    if at_once:
        assert told == []
    else:
        last = "reader" if guarded and how == "by way of another" else "alice"
        assert any(world.roles[last] in line for line in told)
        report = clean_up.clean_up(world.database)
        assert not [line for line in report.waiting if "index" in line]
    assert [world.outcome("alice", statement) for statement in WRITES] == ["42501"] * len(WRITES)
    assert {kind for kind, _ in world.rights("alice")} == {"schema", "function"}
    assert world.outcome("monitor", "SELECT FROM roir_data.g1") == "done", "an administrator's"
    run_sql(
        world.dsn_of("bob"),
        "UPDATE t SET k = 'bob' WHERE id < 20",
        "DELETE FROM t WHERE id = 30",
        "INSERT INTO t VALUES (1000, 'new', 1000)",
    )
    for index in ("public.ix", "public.ux"):
        found = lifecycle.verify(world.database, index, VerifyOptions(), "test")
        assert (found.missing, found.different, found.extra) == (0, 0, 0)
    clean_up.clean_up(world.database)
    with world.database.transaction() as connection:
        assert [line for line in faults.warnings(connection) if "roir clean-up" in line] == []


def test_the_first_clean_up_after_a_handover_beside_an_unregistered_partition(world: World) -> None:
    """Seen to advise dropping the index if partitions are looked at before the new owner has its rights."""
    alice = world.dsn_of("alice")
    run_sql(
        alice,
        "CREATE TABLE p (id int PRIMARY KEY, k text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
        "INSERT INTO p SELECT i, i::text FROM generate_series(1, 50) i",
    )
    steps.make_index(world.database, "public.ip", "public.p")
    run_sql(
        alice,
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)",
        "INSERT INTO p SELECT i, i::text FROM generate_series(101, 150) i",
    )
    world.run("REASSIGN OWNED BY alice TO bob")
    report = clean_up.clean_up(world.database)
    assert not [line for line in report.warnings if "roir drop" in line], report
    assert not [line for line in report.waiting if "p2" in line], report
    assert not clean_up.clean_up(world.database).warnings
    steps.assert_exact(world.database, "public.ip")
