"""The trust in an owner is checked under locks that keep the answer true, and for the objects that they lock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import psycopg2.errors
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import clean_up, drop, lifecycle
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import execute
from airflow_roir.engine.partitions import attach, detach, sync
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.verify import record
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.engine.verify.repairer import Repairer
from airflow_roir.errors import RoirError, SourceChanged
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.hostile import PLAIN, ROWS, Scene
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

UNLOCKED = """
SELECT r.oid::regclass::text
  FROM (SELECT unnest(%(oids)s::oid[]) AS oid UNION SELECT to_regclass(n) FROM unnest(%(names)s::text[]) n) r
 WHERE NOT EXISTS (SELECT FROM pg_locks l WHERE l.pid = pg_backend_pid() AND l.relation = r.oid AND l.granted)
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables of each question. Fails if a table isn't locked at the question."""
    real, seen = owner.is_trusted, []

    def watched(connection: Connection, source: Source, reads: Sequence[str] | None = None) -> bool:
        values = {"oids": list(source.relations) if reads is None else [], "names": list(reads or [])}
        unlocked = list(execute(connection, UNLOCKED, values).scalars())
        seen.append(" ".join(reads or [source.sql]))
        assert not unlocked, f"{seen[-1]}: {unlocked}"
        return real(connection, source, reads)

    monkeypatch.setattr(owner, "is_trusted", watched)
    return seen


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("partitioned", [False, True])
def test_it_is_asked_of_nothing_that_is_not_locked(scene: Scene, asked: list[str], partitioned: bool) -> None:
    """Every step of a life cycle does so."""
    by = "PARTITION BY RANGE (id)" if partitioned else ""
    scene.as_owner(f"CREATE TABLE evil.t (id int PRIMARY KEY, k text, v text) {by}")
    if partitioned:
        scene.as_owner(
            "CREATE TABLE evil.t1 PARTITION OF evil.t FOR VALUES FROM (1) TO (20)",
            "CREATE TABLE evil.t2 PARTITION OF evil.t FOR VALUES FROM (20) TO (100)",
        )
    scene.as_owner(ROWS)
    for scan in ("key", "block"):
        options: dict[str, Any] = {"include": "v", "scan": scan, "parallelism": 2, "segments": 2, "ranges": 2}
        steps.make_index(scene.database, "evil.ix", "evil.t", **options)
    one = steps.session(scene.dsn)
    base = sql(one, "SELECT 'roir_data.g' || max(id) FROM roir.generation")[0][0]
    sql(one, f"DELETE FROM {base} WHERE c2 = 3")
    sql(one, f"UPDATE {base} SET c3 = 'x' WHERE c2 = 4")
    sql(one, f"UPDATE {base} SET c1 = 'x' WHERE c2 = 5")
    one.commit()
    lifecycle.verify(scene.database, "evil.ix", VerifyOptions(repair=True), "test")
    lifecycle.verify(scene.database, "evil.ix", VerifyOptions(sample=50), "test")
    if partitioned:
        scene.as_owner(
            "CREATE TABLE evil.t3 (LIKE evil.t INCLUDING ALL)",
            "INSERT INTO evil.t3 SELECT i, i::text, 'new' FROM generate_series(101, 140) i",
            "CREATE TABLE evil.t4 (LIKE evil.t INCLUDING ALL)",
            "INSERT INTO evil.t4 SELECT i, i::text, 'new' FROM generate_series(201, 240) i",
            "ALTER TABLE evil.t ATTACH PARTITION evil.t4 FOR VALUES FROM (201) TO (300)",
            "ALTER TABLE evil.t DETACH PARTITION evil.t1",
        )
        sync.sync_partitions(scene.database, "evil.t", "test")
        attach.attach_partition(scene.database, "evil.t", "evil.t3", "FOR VALUES FROM (101) TO (200)", "test")
        detach.detach_partition(scene.database, "evil.t4", "test")
    clean_up.clean_up(scene.database)
    steps.assert_exact(scene.database, "evil.ix")
    drop.drop_index(scene.database, "evil.ix", "test")
    assert len(asked) > 20


def test_a_writer_whose_snapshot_is_older_than_the_gift_of_a_leaf_runs_nothing_as_the_tables_owner(
    scene: Scene,
) -> None:
    """The capture reads the leaf as the table's owner. In that snapshot the table's owner also owns the leaf."""
    run_sql(
        scene.dsn,
        "GRANT ALL ON SCHEMA public TO PUBLIC",
        "CREATE TABLE public.t (id int PRIMARY KEY, k text, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE public.t1 PARTITION OF public.t FOR VALUES FROM (1) TO (100)",
        "INSERT INTO public.t SELECT i, i::text, 'v' FROM generate_series(1, 40) i",
        f"ALTER TABLE public.t OWNER TO {scene.victim}; ALTER TABLE public.t1 OWNER TO {scene.victim}",
        f"GRANT ALL ON public.t TO {scene.owner}",
    )
    steps.make_index(scene.database, "public.ix", "public.t", include="v")
    with closing(steps.old_session(scene.dsn_of_owner)) as old:
        run_sql(scene.dsn, f"ALTER TABLE public.t1 OWNER TO {scene.owner}")
        scene.as_owner("CREATE INDEX ON public.t1 (k) WHERE evil.constant(1)")
        with pytest.raises(psycopg2.errors.SerializationFailure, match="altered"):
            sql(old, "DELETE FROM public.t WHERE id = 7")
    assert not scene.gains()
    run_sql(scene.dsn, f"ALTER TABLE public.t1 OWNER TO {scene.victim}")
    steps.assert_exact(scene.database, "public.ix")


@pytest.mark.sample(0)
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("write", ["INSERT INTO public.t VALUES (5, '25', 'v')", "UPDATE public.t1 SET k = '25'"])
def test_a_unique_key_is_asked_of_no_leaf_of_another_owner(scene: Scene, isolation: str, write: str) -> None:
    """It isn't known beforehand which leaf has the holder. Seen to run the code of a leaf's owner as the table's."""
    run_sql(
        scene.dsn,
        "GRANT ALL ON SCHEMA public TO PUBLIC",
        "CREATE TABLE public.t (id int PRIMARY KEY, k text, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE public.t1 PARTITION OF public.t FOR VALUES FROM (1) TO (10)",
        "CREATE TABLE public.t2 PARTITION OF public.t FOR VALUES FROM (10) TO (100)",
        "INSERT INTO public.t SELECT i, i::text, 'v' FROM generate_series(10, 40) i",
        "INSERT INTO public.t VALUES (1, '1', 'v')",
        *(f"ALTER TABLE public.{name} OWNER TO {scene.victim}" for name in ("t", "t1", "t2")),
        f"GRANT ALL ON public.t, public.t1 TO {scene.owner}",
    )
    steps.make_index(scene.database, "public.ix", "public.t", include="v", unique=True)
    run_sql(scene.dsn, f"ALTER TABLE public.t2 OWNER TO {scene.owner}")
    scene.as_owner("CREATE INDEX ON public.t2 (k) WHERE evil.constant(1)")
    with closing(steps.session(scene.dsn_of_owner, isolation)) as writer:
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match=r"public\.t2 belongs to"):
            sql(writer, write)
        writer.rollback()
        sql(writer, "INSERT INTO public.t VALUES (6, 'new', 'v')")
        writer.commit()
    assert not scene.gains()
    assert sql(steps.session(scene.dsn), "SELECT last_value, is_called FROM evil.as_another") == [(1, False)]
    run_sql(scene.dsn, f"ALTER TABLE public.t2 OWNER TO {scene.victim}; DROP INDEX public.t2_k_idx")
    steps.assert_exact(scene.database, "public.ix")


@pytest.mark.sample(0)
def test_a_snapshot_that_is_older_than_a_hand_over_trusts_nobody(scene: Scene) -> None:
    """The snapshot that a verification's workers share shows the former owner, whom we trust. Plans use the present
    one.

    Seen to run the new owner's code as us.
    """
    run_sql(scene.dsn, PLAIN, ROWS)
    [(us,)] = sql(scene_session := steps.session(scene.database.dsn), "SELECT current_user")
    scene_session.close()
    run_sql(scene.dsn, f'ALTER TABLE evil.t OWNER TO "{us}"')
    steps.make_index(scene.database, "evil.ix", "evil.t", include="v")
    record.begin(scene.database, "evil.ix", VerifyOptions(), "test")
    run = start_run(scene.database, "evil.ix", "test", take_over=True)
    one = verifying.worker(scene.database, run)
    one.sums.snapshot.share(one.verify_job.verification_id)
    run_sql(scene.dsn, f"ALTER TABLE evil.t OWNER TO {scene.owner}")
    scene.as_owner("CREATE INDEX ON evil.t (k) WHERE evil.constant(1)")
    with suppress(SourceChanged):
        while isinstance(claim := one.claim(), UnitClaim):
            one.unit(claim)
    one.close()
    one.connection.close()
    assert not scene.gains()


# Three ways in which a table of ours becomes the owner's between two steps.
GIVEN = (
    "ALTER TABLE evil.t OWNER TO {owner}; SET ROLE {owner}; "
    "CREATE INDEX ON evil.t (k) WHERE evil.constant(1); RESET ROLE",
    # The owner of a schema may drop its objects, and create other ones under their names.
    "SET ROLE {owner}; DROP TABLE evil.t CASCADE; CREATE TABLE evil.u (id int, k text, v text); "
    "INSERT INTO evil.u VALUES (7, '7', 'v'); CREATE VIEW evil.t AS SELECT id, k, v FROM evil.u WHERE evil.any(k); "
    "GRANT ALL ON evil.t, evil.u TO PUBLIC; RESET ROLE",
    "SET ROLE {owner}; DROP TABLE evil.t CASCADE; {table}; INSERT INTO evil.t VALUES (7, '7', 'v'); "
    "CREATE INDEX ON evil.t (k) WHERE evil.constant(1); GRANT ALL ON evil.t TO PUBLIC; RESET ROLE",
)


@pytest.mark.parametrize(
    "given", [*GIVEN[:2], pytest.param(GIVEN[2], marks=pytest.mark.sample(0))], ids=["owner", "view", "table"]
)
@pytest.mark.parametrize(
    "step", ["repair", *(pytest.param(s, marks=pytest.mark.sample(0)) for s in ("batch", "key", "verify"))]
)
def test_a_table_that_becomes_his_between_two_steps_is_not_read_as_us(scene: Scene, given: str, step: str) -> None:
    """Found: a repair asked once whether the owner is trusted, and read later, when a schema's owner had put something
    else under the name. It holds: asked under the lock in each transaction.
    """
    user = sql(steps.session(scene.database.dsn), "SELECT current_user")[0][0]
    run_sql(scene.dsn, PLAIN, ROWS, f"GRANT ALL ON SCHEMA evil TO {user}", f"ALTER TABLE evil.t OWNER TO {user}")
    _, run = steps.begin(scene.database, "evil.ix", "evil.t", include="v", scan="key", parallelism=1, ranges=1)
    one = steps.worker(scene.database, run)
    claim = one.claim()
    repairer = None
    name = "evil.t"
    if step in ("repair", "verify"):
        steps.finish_all(scene.database, run)
        connection = scene.database.engine.connect()
        with connection.begin():
            repairer = Repairer(connection, load_job(connection, run))
    taken = given.format(owner=scene.owner, table=PLAIN)

    def read() -> None:
        if repairer is not None and step == "repair":
            repairer.put([1, 2, 3])
            repairer.take_out([1, 2, 3])
        elif step == "verify":
            lifecycle.verify(scene.database, "evil.ix", VerifyOptions(), "test")
        elif step == "batch":
            one.step(claim)
        else:
            with one.connection.begin():
                # A batch has come as far by now: it knows a name.
                rows = owner.rows(one.connection, one.job.source, f"SELECT k FROM {name}", "k text", None, [name])
                rows.all()

    run_sql(scene.dsn, taken)
    with suppress(RoirError, DBAPIError):
        read()
    assert not scene.gains()
    one.connection.close()
    if repairer is not None:
        repairer.connection.close()
