"""DBAs, owners and settings that disturb a compaction: it ends, or leaves units out and says why. Nothing is lost."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import psycopg2.errors
import pytest

from airflow_roir.engine import abort, clean_up, lifecycle
from airflow_roir.engine.compact import choosing, compaction
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.compact.worker import CompactWorker
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import LockNotAcquired
from airflow_roir.generation_state import UnitStatus
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.compacting import act, begin, compact, is_right, left_over, segments, stages, worker, writes
from tests.engine.compacting import scene as plain
from tests.engine.hostile import DOORS, Scene
from tests.engine.interposed import before, changed
from tests.engine.steps import session, sql
from tests.engine.test_compact_attacks import until

pytestmark = pytest.mark.sample(2)


def left_out(database: Database, index: str = "ix") -> list[str]:
    """The reasons why units of the last compaction were left out."""
    report = compaction.report_of(database, operations.find_operation(database, index).id)
    assert report.status == "completed"
    return [unit["note"] for unit in report.units if unit["status"] == "left"]


# -- what hangs on segments

FOREIGN_KEY = "CREATE TABLE f (a text, b int, c int, FOREIGN KEY (a, b, c) REFERENCES {} (c1, c2, c3))"
# Each obstacle, and a part of its message.
OBSTACLES = {
    "view": ("CREATE VIEW mine AS SELECT c2 FROM roir_data.g1_s001", r"view public\.mine"),
    "materialized view": ("CREATE MATERIALIZED VIEW mine AS TABLE roir_data.g1_s001", r"view public\.mine"),
    "foreign key": (FOREIGN_KEY.format("roir_data.g1_s001"), r"constraint .* on table public\.f"),
    "foreign key to the base": (
        FOREIGN_KEY.format("roir_data.g1") + "; INSERT INTO f SELECT * FROM roir_data.g1 WHERE c3 % 40 > 3",
        r"constraint .* on table public\.f",
    ),
    "function": ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT c2 FROM roir_data.g1_s001; END", "function"),
    "column": ("CREATE TABLE f (x roir_data.g1_s001)", r"column x of table public\.f"),
    "array": ("CREATE TABLE f (x roir_data.g1_s001[])", r"column x of table public\.f"),
    "NOT NULL": ("ALTER TABLE roir_data.g1 ALTER c2 SET NOT NULL", "NOT NULL of c2|c2_not_null"),
    "constraint of the base": ("ALTER TABLE roir_data.g1 ADD CONSTRAINT mine CHECK (c2 > -1000)", "constraint.*mine"),
}


@pytest.mark.parametrize("when", ["waiting", "folding"])
@pytest.mark.parametrize("what", OBSTACLES)
def test_what_depends_on_a_segment_leaves_its_unit_out(dsn: str, what: str, when: str) -> None:
    """It is reported before anything is copied; if it comes meanwhile, without a lock. The other units are done."""
    statement, said = OBSTACLES[what]
    database = plain(dsn, 3, 300)
    run = begin(database, act("rewrite", 1), act("rewrite", 0))
    going = stages(database, run)
    until(going, f"0 {when}")
    run_sql(dsn, statement)
    writes(dsn, 40)
    seen = list(going)
    assert when == "folding" or "0 copying" not in seen
    notes = left_out(database)
    assert notes
    assert all(re.search(said, note) for note in notes), notes
    assert 1 in segments(dsn)
    is_right(database)


# Each of these keeps entries from being written, or may do so.
ALTERED = {
    "trigger": "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
    "CREATE TRIGGER mine BEFORE INSERT ON roir_data.g1_s001 FOR EACH ROW EXECUTE FUNCTION no()",
    "rule": "CREATE RULE mine AS ON DELETE TO roir_data.g1_s001 DO ALSO NOTHING",
    "unlogged": "ALTER TABLE roir_data.g1_s001 SET UNLOGGED",
    "column": "ALTER TABLE roir_data.g1 ADD COLUMN mine int",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("when", ["waiting", "folding"])
@pytest.mark.parametrize("what", ALTERED)
def test_what_is_warned_of_is_not_hidden_by_new_segments(dsn: str, what: str, when: str) -> None:
    """Entries may be missing, and the altered segment is the only sign of it: a swap would drop that sign."""
    database = plain(dsn, 3, 300)
    going = stages(database, begin(database, act("rewrite", 1)))
    until(going, when)
    run_sql(dsn, ALTERED[what], "INSERT INTO t VALUES (5000, '0', 1)")
    for _ in going:
        pass
    [note] = left_out(database)
    assert "altered by others" in note
    assert left_over(dsn) == []
    with database.transaction() as connection:
        [warning] = faults.warnings(connection)
    assert "roir_data.g1" in warning


# Objects that are dropped with the segment, or that the new segment gets from the base, don't keep a unit from its
# swap.
HANGERS = {
    "index": "CREATE INDEX mine ON roir_data.g1_s001 (c2)",
    "statistics": "CREATE STATISTICS mine ON c1, c2 FROM roir_data.g1_s001",
    "settings": "ALTER TABLE roir_data.g1_s001 SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01)",
    "rights": "GRANT SELECT ON roir_data.g1_s001 TO PUBLIC",
    "publication": "CREATE PUBLICATION p FOR TABLE roir_data.g1_s001",
    "check": "ALTER TABLE roir_data.g1_s001 ADD CONSTRAINT mine CHECK (c2 > 0)",
    "of the base": "CREATE MATERIALIZED VIEW mine AS TABLE roir_data.g1",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("what", HANGERS)
def test_what_goes_with_its_segment(dsn: str, what: str) -> None:
    database = plain(dsn, 3, 300)
    run_sql(dsn, HANGERS[what])
    compact(database, act("rewrite", 1), between=lambda stage: writes(dsn, 40))
    assert left_out(database) == []
    assert 1 not in segments(dsn)
    is_right(database)


@pytest.mark.parametrize("unique", ["", "UNIQUE "], ids=["", "unique"])
def test_an_index_of_a_dba_is_not_built_under_the_lock(dsn: str, unique: str) -> None:
    """An index on the base is one on each segment: an attach builds a missing one, while all writers wait."""
    database = plain(dsn, 3, 300)
    run_sql(dsn, f'CREATE {unique}INDEX "my index" ON roir_data.g1 (c2 DESC, c1, c3) WHERE c2 > 0')
    run = begin(database, act("rewrite", 1), act("rewrite", 0))
    going = stages(database, run)
    indexes = "SELECT indexrelid::bigint FROM pg_index WHERE indrelid = to_regclass(%s)::oid ORDER BY 1"
    with session(dsn) as user:
        for number, final in enumerate(("g1_s004", "g1_s000")):
            until(going, f"{number} folding")
            made = sql(user, indexes, f"roir_data.g1_s00{4 + number}")
            user.commit()
            assert len(made) == 2
            for stage in going:
                if not stage.startswith(f"{number} "):
                    break
            assert sql(user, indexes, f"roir_data.{final}") == made
            user.commit()
        for _ in going:
            pass
        [(valid,)] = sql(user, "SELECT indisvalid FROM pg_index WHERE indexrelid = 'roir_data.\"my index\"'::regclass")
    assert valid
    is_right(database)


# -- whose code runs as whom


@pytest.mark.parametrize("door", DOORS)
def test_no_step_gives_an_owner_rights(scene: Scene, door: str) -> None:
    scene.as_owner(*DOORS[door])
    steps.make_index(scene.database, "evil.ix", "evil.t", include="v", parallelism=2, segments=3, ranges=3)
    actions = [act("rewrite", 0), act("split", 1, parts=2)]
    if len(segments(scene.dsn)) > 3:
        actions.append(act("merge", 2, 3))
    for stage in stages(scene.database, begin(scene.database, *actions, index="evil.ix")):
        assert not scene.gains(), stage
        scene.as_owner("UPDATE evil.t SET v = v", "DELETE FROM evil.t WHERE ctid = (SELECT min(ctid) FROM evil.t)")
    assert not scene.gains()
    steps.assert_exact(scene.database, "evil.ix")
    assert left_over(scene.dsn) == []


@pytest.mark.parametrize("when", ["before", "copying", "folding"])
@pytest.mark.parametrize(
    "action", [act("rewrite", 1), act("merge", 1, 2), act("split", 2, parts=2)], ids=lambda action: action.kind.value
)
def test_bounds_that_come_to_hold_values_of_a_domain_are_not_read(scene: Scene, action: Action, when: str) -> None:
    """A superuser's type may be given away after the build. Each write to new segments would run its checks."""
    scene.create_word()
    scene.as_owner(
        "CREATE TABLE evil.t (id int PRIMARY KEY, k public.word[], v text)",
        "INSERT INTO evil.t SELECT i, ARRAY[i::text]::public.word[], 'v' FROM generate_series(1, 60) i",
    )
    steps.make_index(scene.database, "evil.ix", "evil.t", include="v", parallelism=2, segments=3, ranges=3)
    going = stages(scene.database, begin(scene.database, action, index="evil.ix"))
    if when != "before":
        until(going, when)
    scene.give_word_away()
    for stage in going:
        assert not scene.gains(), stage
    assert not scene.gains()
    [note] = left_out(scene.database, "evil.ix")
    assert "the checks of public.word" in note
    assert left_over(scene.dsn) == []
    steps.assert_exact(scene.database, "evil.ix")


# -- the trigger of a unit

SILENCERS = {
    "disabled": "ALTER TABLE roir_data.g1_s001 DISABLE TRIGGER ALL",
    "disabled, then enabled": "ALTER TABLE roir_data.g1_s001 DISABLE TRIGGER ALL; {}; "
    "ALTER TABLE roir_data.g1_s001 ENABLE TRIGGER ALL",
    "dropped": "DROP FUNCTION roir_data.g1_u1_touch() CASCADE",
}


@pytest.mark.parametrize("how", SILENCERS)
def test_a_unit_whose_trigger_was_silent_begins_again(dsn: str, how: str) -> None:
    """Also if the unit is compared already, and waits for its swap."""
    database = plain(dsn, 3, 300)
    going = stages(database, begin(database, act("rewrite", 1)))
    with session(dsn) as reader:
        sql(reader, "TABLE ix")
        until(going, "folding")
        # The unit is compared, and the swap has found the reader.
        until(going, "folding")
    run_sql(dsn, SILENCERS[how].format("DELETE FROM t WHERE id % 40 = 6"), "DELETE FROM t WHERE id % 40 = 5")
    assert "0 waiting" in list(going)
    assert 1 not in segments(dsn)
    is_right(database)


# -- what a DBA has chosen


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "action", [act("rewrite", 1), act("merge", 1, 2), act("split", 1, parts=2)], ids=lambda action: action.kind.value
)
def test_new_segments_are_kept_where_the_old_ones_were(dsn: str, action: Action) -> None:
    """They get the old segments' settings and tablespaces, not a (full) default of the role or the database."""
    [(tag,)] = sql(session(dsn), "SELECT current_database()")
    database = plain(dsn, 3, 300)
    made = [f"CREATE TABLESPACE \"{name} {tag}\" LOCATION ''" for name in ("table", "index")]
    run_sql(dsn, "SET allow_in_place_tablespaces = on", *made)
    try:
        run_sql(
            dsn,
            f'ALTER TABLE roir_data.g1_s001 SET TABLESPACE "table {tag}"',
            f'ALTER INDEX roir_data.g1_s001_key SET TABLESPACE "index {tag}"',
            "ALTER TABLE roir_data.g1_s001 SET (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.01)",
        )
        compact(database, action, between=lambda stage: writes(dsn, 40))
        kept = sql(
            session(dsn),
            "SELECT DISTINCT t.spcname, i.spcname, c.reloptions FROM roir.segment s "
            "JOIN pg_class c ON c.oid = to_regclass(format('roir_data.g1_s00%s', s.ordinal)) "
            "LEFT JOIN pg_tablespace t ON t.oid = c.reltablespace JOIN pg_index x ON x.indrelid = c.oid "
            "JOIN pg_class k ON k.oid = x.indexrelid LEFT JOIN pg_tablespace i ON i.oid = k.reltablespace "
            "WHERE s.ordinal > 3",
        )
        assert kept == [
            (f"table {tag}", f"index {tag}", ["fillfactor=60", "autovacuum_vacuum_scale_factor=0.01"]),
        ]
        is_right(database)
    finally:
        database.engine.dispose()
        run_sql(dsn, "DROP SCHEMA roir, roir_data CASCADE")
        for name in ("table", "index"):
            run_sql(dsn, f'DROP TABLESPACE "{name} {tag}"')


# -- who has what a unit has made


@pytest.mark.parametrize("relation", ["g1_s004", "g1_u1_touched"])
def test_who_holds_what_a_unit_has_made_is_named(dsn: str, relation: str) -> None:
    """A dump holds it like this, or an autovacuum, which is then cancelled."""
    database = plain(dsn, 3, 300)
    run = begin(database, act("rewrite", 1))
    going = stages(database, run)
    until(going, "folding")
    with session(dsn) as dump:
        [(pid,)] = sql(dump, "SELECT pg_backend_pid()")
        sql(dump, f"LOCK TABLE roir_data.{relation} IN ACCESS SHARE MODE")
        one = worker(database, run)
        claim = one.claim()
        assert isinstance(claim, UnitClaim)
        with pytest.raises(LockNotAcquired, match=f"blocked by pid {pid} "):
            one.advance(claim)
        one.connection.close()
        said: list[str] = []
        ended = abort.abort(database, "ix", "test", "", said.append, 0.1)
        assert ended.status == "aborting"
        assert any(f"pid {pid} " in line for line in said), said
    clean_up.clean_up(database)
    assert segments(dsn) == [0, 1, 2, 3]
    is_right(database)


# -- a segment of one key


@pytest.mark.parametrize("bytes_after", [1000, 760, 740])
def test_a_segment_of_one_key_is_not_copied_for_nothing(dsn: str, bytes_after: int) -> None:
    """The next night it would be too big again, and can't be split either. It is rewritten if it wastes a quarter."""
    database = plain(dsn, 3, 300)
    assert sql(session(dsn), "SELECT DISTINCT c1 FROM roir_data.g1_s003") == [("4",)]
    actions = [replace(act("split", 3, parts=2), bytes_after=bytes_after), act("split", 1, parts=2)]
    seen = list(stages(database, begin(database, *actions)))
    notes = left_out(database)
    if bytes_after > 750:
        assert ["too few keys" in note for note in notes] == [True]
        assert "0 copying" not in seen
        assert segments(dsn) == [0, 6, 7, 2, 3]
    else:
        assert notes == []
        assert segments(dsn) == [0, 6, 7, 2, 4]
    writes(dsn, 40)
    is_right(database)


def test_a_choice_asks_for_no_split_again_that_had_too_few_keys(dsn: str) -> None:
    """The split would take the budget each night. A month later other keys may have come."""
    database = plain(dsn, 3, 300)
    # One key in many rows: the segment is too big.
    run_sql(dsn, "INSERT INTO t SELECT n, '4', n FROM generate_series(100001, 120000) n", "VACUUM ANALYZE roir_data.g1")

    def splits() -> list[Action]:
        choice = choosing.choose(database, "ix", segment_bytes=200_000, horizon_days=365)
        return [one for one in choice.actions if one.kind is Kind.SPLIT]

    [asked] = splits()
    assert asked.ordinals == (3,)
    for _ in stages(database, begin(database, asked)):
        pass
    assert ["too few keys" in note for note in left_out(database)] == [True]
    assert splits() == []
    run_sql(dsn, "UPDATE roir.operation SET started_at = started_at - interval '31 days' WHERE kind = 'compact'")
    assert [one.ordinals for one in splits()] == [(3,)]


# -- two units at a time


def test_a_long_comparison_of_nulls_gives_way_to_every_swap_of_its_compaction(dsn: str) -> None:
    """An attach locks the default segment too. A comparison that insisted on it would hold up its own operation."""
    plain(dsn, 3, 300)
    database = Database(dsn, "roir tests", limits=Limits(table_lock_ms=2000, seal_retreats=0))
    run = begin(database, act("rewrite", 0), act("rewrite", 1), parallelism=2, lock_timeout_ms=500, lock_patience_s=3)
    held: list[tuple[CompactWorker, UnitClaim]] = []
    for number in range(2):
        one = worker(database, run, number)
        found = one.claim()
        assert isinstance(found, UnitClaim)
        at: UnitClaim | None = found
        while at is not None and at.status is not UnitStatus.FOLDING:
            at, _ = one.advance(at)
        assert at is not None
        held.append((one, at))
    (nulls, of_nulls), (other, claim) = held
    swapping = threading.Thread(target=other.step, args=(claim,))
    summed = r"^SELECT count\(\*\), coalesce\(sum\("
    for_long = "SELECT (SELECT count(*) FROM (SELECT pg_sleep(20) OFFSET 0) s) - 1 + count(*), coalesce(sum("
    # The unit is compared already: only the swap is left.
    other._compared = True
    with changed(database, summed, for_long), before(database, "SELECT (SELECT", swapping.start):
        nulls.advance(of_nulls)
    swapping.join()
    assert 1 not in segments(dsn)
    for one, _ in held:
        one.connection.close()
    for _ in stages(database, run):
        pass
    is_right(database)


# -- transactions that are prepared

PREPARED = {
    "read": "SELECT count(*) FROM ix",
    "write": "UPDATE t SET v = -v WHERE id % 20 = 3; UPDATE t SET v = NULL WHERE id % 20 = 4 AND id > 200; "
    "DELETE FROM t WHERE id % 50 = 3; INSERT INTO t VALUES (5000, '2', 5000)",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("what", PREPARED)
@pytest.mark.parametrize("when", ["0 waiting", "0 copying", "0 indexing", "0 folding", "1 folding"])
def test_who_is_prepared_is_waited_for_by_name(dsn: str, when: str, what: str, end: str) -> None:
    """The capture waits for a prepared writer, and the swap for each. The steps in between don't wait."""
    database = plain(dsn, 3, 300)
    run = begin(database, act("merge", 1, 2), act("rewrite", 0))
    going = stages(database, run)
    until(going, when)
    gid = f"prepared in {dsn.split('?')[0].rsplit('/', 1)[1]}"
    user = session(dsn)
    sql(user, PREPARED[what])
    sql(user, f"PREPARE TRANSACTION '{gid}'")
    user.close()
    one = worker(database, run)
    claim = one.claim()
    assert isinstance(claim, UnitClaim)

    def go_on() -> None:
        at: UnitClaim | None = claim
        while at is not None:
            at, _ = one.advance(at)

    try:
        with pytest.raises(LockNotAcquired, match=gid):
            go_on()
    finally:
        one.connection.close()
        run_sql(dsn, f"{end} PREPARED '{gid}'")
    steps.assert_exact(database)
    for _ in stages(database, run):
        writes(dsn, 40)
    is_right(database)


# -- transactions that span the swap


def test_who_began_before_the_swap_reads_all_or_is_refused(dsn: str) -> None:
    """Kept plans read all. An older snapshot is refused, also that of a statement in a STABLE function."""
    database = plain(dsn, 3, 300)
    counted = "BEGIN RETURN (SELECT count(*) FROM public.ix); END"
    run_sql(
        dsn,
        f"CREATE FUNCTION kept() RETURNS bigint STABLE LANGUAGE plpgsql AS '{counted}'",
        f"CREATE FUNCTION fresh() RETURNS bigint VOLATILE LANGUAGE plpgsql AS '{counted}'",
    )
    user, holder, old, fresh, kept = (session(dsn) for _ in range(5))
    user.autocommit = True
    sql(user, "SET plan_cache_mode = force_generic_plan")
    sql(user, "PREPARE counted AS SELECT count(*) FROM ix")
    reads = ("EXECUTE counted", "SELECT kept()", "SELECT fresh()")
    before = [sql(user, read) for read in reads]
    sql(holder, "DECLARE c CURSOR WITH HOLD FOR TABLE ix")
    holder.commit()
    old.set_session(isolation_level="REPEATABLE READ")
    sql(old, "SELECT count(*) FROM pg_class")
    # A statement's snapshot lasts as long as its cursor, also in READ COMMITTED.
    sql(fresh, "DECLARE c CURSOR FOR SELECT fresh() FROM generate_series(1, 2)")
    sql(kept, "DECLARE c CURSOR FOR SELECT kept() FROM generate_series(1, 2)")
    compact(database, act("merge", 1, 2, 3))
    assert segments(dsn) == [0, 4]
    assert [sql(user, read) for read in reads] == before == [[(300,)]] * 3
    assert len(sql(holder, "FETCH ALL c")) == 300
    assert sql(fresh, "FETCH ALL c") == [(300,)] * 2
    for one, read in ((old, "TABLE ix"), (kept, "FETCH ALL c")):
        with pytest.raises(psycopg2.errors.SerializationFailure):
            sql(one, read)
    for one in (user, holder, old, fresh, kept):
        one.close()
    is_right(database)


# -- the choice

STATISTICS = {
    "none of rows": "UPDATE pg_class SET reltuples = -1, relpages = 0 WHERE {}",
    "no number": "UPDATE pg_class SET reltuples = 'NaN' WHERE {}",
    "no end": "UPDATE pg_class SET reltuples = 'Infinity' WHERE {}",
    "huge": "UPDATE pg_class SET reltuples = 3e38, relpages = 2147483647 WHERE {}",
    "below nothing": "UPDATE pg_class SET reltuples = -5, relpages = -3 WHERE {}",
    "none of columns": "DELETE FROM pg_statistic WHERE starelid IN (SELECT oid FROM pg_class WHERE {})",
    "wide NULLs": "UPDATE pg_statistic SET stawidth = 2147483647, stanullfrac = 1 "
    "WHERE starelid IN (SELECT oid FROM pg_class WHERE {})",
    "no share": "UPDATE pg_statistic SET stawidth = 0, stanullfrac = 'NaN' "
    "WHERE starelid IN (SELECT oid FROM pg_class WHERE {})",
    "forgotten": "SELECT pg_stat_reset()",
    "from another time": "UPDATE roir.segment SET sealed_at = now() + interval '400 years'",
}


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("what", STATISTICS)
def test_a_choice_by_odd_statistics(dsn: str, what: str) -> None:
    """With imported or damaged statistics the choice may be bad, but it ends."""
    database = plain(dsn, 3, 6000)
    run_sql(dsn, "UPDATE t SET v = v + 1", "DELETE FROM t WHERE id % 2 = 1")
    run_sql(dsn, STATISTICS[what].format("relname ~ '^g1_s'"))
    for budget in (None, Budget(bytes=1), Budget(seconds=1.0), Budget(bytes=10**18)):
        choosing.choose(database, "ix", budget, segment_bytes=None if budget else 1).as_dict()
    lifecycle.compact(database, "ix", Budget(bytes=10**18))
    is_right(database)
