"""Refusals of roir, the steps that lead to them, and the steps that work after the remedy
(`test_remedies_of_errors.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.verify import record
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.following import Scene
from tests.engine.steps import sql
from tests.engine.test_collations import VERSIONED

# Names that need quotes in a shell and in SQL.
T, IX = '"T x"', '"I x"'
TABLE = (
    f"CREATE TABLE {T} (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
    *(f'CREATE TABLE "P {n}" PARTITION OF {T} FOR VALUES FROM ({n}0) TO ({n + 1}0)' for n in range(3)),
    f"INSERT INTO {T} SELECT i % 30, i, i::text, i FROM generate_series(1, 300) i",
    f"ANALYZE {T}",
)
BUILD = f"roir build '{IX}' --table '{T}' --keys k --include v"
REBUILD = f"roir build '{IX}'"
RESUME, VERIFY, DROP, ABORT = (f"roir {command} '{IX}'" for command in ("resume", "verify", "drop", "abort"))
BOUNDS = "FOR VALUES FROM (50) TO (60)"
ATTACHED = f" '{T}' n '{BOUNDS}'"
LOADED = (
    f"CREATE TABLE n (LIKE {T} INCLUDING ALL)",
    "INSERT INTO n SELECT 50, 7000 + i, 'k' || i, i FROM generate_series(1, 20) i",
)
ATTACH = f"ALTER TABLE {T} ATTACH PARTITION n {BOUNDS}"
BEGIN_ATTACH = f"SELECT roir.begin_attach('{T}', 'n', '{BOUNDS}')"
TWICE = "UPDATE n SET k = '7' WHERE id = 7001"
GUARD = "SELECT roir.guard()"
IDLE = "UPDATE roir.operation SET heartbeat_at = NULL"
# Roles: the control schema belongs to one that is no superuser.
WORKER = (
    "DROP SCHEMA roir, roir_data CASCADE",
    "GRANT CREATE ON DATABASE {database} TO {worker}",
    "GRANT CREATE, USAGE ON SCHEMA public TO {worker}",
    "worker>> roir init",
)


def owned(by: str) -> tuple[str, ...]:
    return tuple(f"ALTER TABLE {table} OWNER TO {{{by}}}" for table in (T, '"P 0"', '"P 1"', '"P 2"'))


def begin(scene: Scene) -> None:
    steps.begin(scene.database, IX, T, "k", "v")


def begin_comparing(scene: Scene) -> None:
    record.begin(scene.database, IX, VerifyOptions(), "test")


def finish(scene: Scene) -> None:
    lifecycle.finalize(scene.database, IX, "test")


def ended(status: str) -> str:
    """Ends the operation in a status from which it can't continue."""
    return f"UPDATE roir.operation SET status = '{status}', error = 'something' WHERE status IN ('running', 'paused')"


def begin_other(scene: Scene) -> None:
    steps.begin(scene.database, "w", "u", "k")


def start(scene: Scene) -> None:
    start_run(scene.database, IX, "test")


def built_badly(scene: Scene) -> None:
    """Folds entries of which one is missing, for the comparison before the publish."""
    steps.folded(scene.database, IX, T, "k", "v")
    scene.do("DELETE FROM roir_data.g1 WHERE ctid = '(0,1)'")


def handed_over(scene: Scene) -> None:
    """Runs the SQL that `roir role-sql` prints, as a superuser."""
    script = scene.do("worker>> roir role-sql {worker}")
    run_sql(scene.dsn, script, script)


def with_amcheck(scene: Scene) -> None:
    if not sql(steps.session(scene.dsn), "SELECT FROM pg_available_extensions WHERE name = 'amcheck'"):
        pytest.skip("this server has no contrib")


def with_collation(scene: Scene) -> None:
    """Names a collation whose library reports a version."""
    found = sql(steps.session(scene.dsn), VERSIONED)
    if not found:
        pytest.skip("no collation of this server tells the version of its library")
    scene.names["collation"] = found[0][0]


@dataclass(frozen=True)
class Case:
    """A refusal. says: a part of the message, as the source has it. given: the steps that lead to it. refused: the step
    that is refused, and works in the end; again: the step that works in its place.

    starts: `table`, `built`, `unique`, or `paused` in the build. who: does all steps but those in `given`. fills: the
    user's words for each … of the message. take: the remedies to follow, by default all; found: how many remedies the
    message names. words: steps that the message asks for in words alone, done before the remedies; after: the same,
    done after the first remedy. attached_to: the table that the user attaches to. ends: no index is left at the end.
    whole: the index that is left is compared.
    """

    says: str
    refused: Any
    given: tuple[Any, ...]
    starts: str = "built"
    who: str = "admin"
    fills: tuple[str, ...] = ()
    take: tuple[int, ...] | None = None
    found: int = 1
    words: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    again: Any = None
    attached_to: str = T
    ends: bool = False
    whole: bool = True


def case(says: str, refused: Any, *given: Any, **more: Any) -> Case:
    """A case, with its arguments in the order of its steps."""
    return Case(says, refused, given, **more)


INIT: dict[str, Case] = {
    "from an older server": case("; run: roir init", REBUILD, "UPDATE roir.home SET schema_oid = 1"),
    "no control schema": case(
        "has no control schema yet; create it", BUILD, "DROP SCHEMA roir, roir_data CASCADE", starts="table"
    ),
    "no right to make schemas": case(
        "has no right to create schemas in database",
        "roir init",
        "DROP SCHEMA roir, roir_data CASCADE",
        starts="table",
        who="worker",
        whole=False,
    ),
    "schema of another role": case(
        "has no rights on the control schema. Connect as",
        BUILD,
        *WORKER,
        *owned("other"),
        "GRANT CREATE, USAGE ON SCHEMA public TO {other}",
        starts="table",
        who="other",
    ),
    "schema of a superuser": case(
        "has no rights on the control schema, which the superuser",
        BUILD,
        *owned("worker"),
        "GRANT CREATE, USAGE ON SCHEMA public TO {worker}",
        starts="table",
        who="worker",
        take=(),
        words=(handed_over,),
    ),
    "entries dropped": case(
        "schema roir_data was dropped, with the entries", "roir queue", "DROP SCHEMA roir_data CASCADE", ends=True
    ),
    "schema before the first release": case(
        "from before 0.1.0, the first release", BUILD, "ALTER TABLE roir.home RENAME TO other", found=2
    ),
    "schema of another build": case(
        "was made by another build of airflow-roir", BUILD, "UPDATE roir.home SET made_by = 'another'", found=2
    ),
    "rows of roir's own tables lost": case(
        "the database was restored without the rows of roir",
        f"SELECT * FROM {IX}",
        "TRUNCATE roir.index CASCADE",
        after=("roir init", BUILD),
    ),
}

OPERATIONS: dict[str, Case] = {
    "no such index": case("`roir status` lists all indexes", "roir drop nowhere", again=DROP, ends=True),
    "not published": case(
        "isn't published yet; finish its operation first", f"roir compact '{IX}' --dry-run", starts="paused"
    ),
    "driven elsewhere, paused": case("wait for it, pause it", RESUME, begin, take=(0,), after=(IDLE,)),
    "driven elsewhere, taken over": case(
        "or take over (--take-over)", RESUME, begin, take=(), again=f"{RESUME} {{flag}}"
    ),
    "resume of what is completed": case("is completed: there is nothing to resume", RESUME, again=REBUILD),
    "resume of what was aborted": case("was aborted: there is nothing to resume", RESUME, begin, ABORT, again=VERIFY),
    "resume of an abort": case(
        "is being aborted and can't be resumed", RESUME, begin, ended("aborting"), again=REBUILD
    ),
    "resume of what failed": case("has failed and can't be resumed", RESUME, begin, ended("failed"), again=REBUILD),
    "build while verified, resumed": case("wait until it ends, resume", REBUILD, begin_comparing),
    "build over what failed": case("; abort it first: roir abort", REBUILD, begin, ended("failed")),
    "build over an abort": case("is being aborted; finish that first", REBUILD, begin, ended("aborting")),
    "verify over a failed verification": case("; abort it first: roir abort", VERIFY, begin_comparing, ended("failed")),
    "census beside a build, resumed": case(
        "is unfinished. Finish it",
        f"{BUILD} --unique --census",
        starts="paused unique",
        found=3,
        take=(0,),
        again=VERIFY,
    ),
    "census beside a build, aborted": case(
        "is unfinished. Finish it", f"{BUILD} --unique --census", starts="paused unique", found=3, take=(1,), ends=True
    ),
    "census of an index": case(
        "but a census removes all that it builds", f"{BUILD} --unique --census", again="roir status", starts="unique"
    ),
    "drop beside an operation": case("; abort it first: ", DROP, begin, ends=True),
    "drop of what others need": case(
        "can't be dropped: ",
        DROP,
        f"CREATE VIEW w AS SELECT * FROM {IX}",
        words=("DROP VIEW w",),
        again="roir status",
        ends=True,
    ),
    "phase not over": case("; finish that first: roir resume", finish, starts="paused", again=VERIFY),
    "revert of a dropped table": case(
        "its table was dropped; drop the index too",
        f"roir revert '{IX}'",
        f"DROP TABLE {T} CASCADE",
        again="roir status",
        ends=True,
    ),
    "build over a dropped table": case(
        "was dropped; drop its indexes, too", REBUILD, f"DROP TABLE {T} CASCADE", again="roir status", ends=True
    ),
    "resume over a dropped table": case(
        "was dropped; drop its indexes, too",
        RESUME,
        f"DROP TABLE {T} CASCADE",
        starts="paused",
        again="roir status",
        ends=True,
    ),
    "rebuild resumed over a dropped table": case(
        "was dropped; drop its indexes, too",
        RESUME,
        begin,
        IDLE,
        f"DROP TABLE {T} CASCADE",
        found=2,
        again="roir status",
        ends=True,
    ),
    "duplicates": case(
        "change or delete rows until no two share a key, then",
        f"{BUILD} --unique",
        f"UPDATE {T} SET k = '7' WHERE id IN (8, 9)",
        starts="table",
        found=2,
        after=(f"UPDATE {T} SET k = id::text WHERE id IN (8, 9)",),
        again=VERIFY,
    ),
    "a driver of what failed": case("failed: {}. Abort it: ", start, begin, ended("failed"), again=REBUILD),
    "a driver of what is aborted": case(
        "; roir clean-up finishes that", start, begin, ended("aborting"), again=REBUILD
    ),
    "another version's checkpoints": case(
        "began with checkpoint format",
        RESUME,
        "UPDATE roir.operation SET format_version = 99",
        starts="paused",
        found=0,
        words=(ABORT,),
        again=BUILD,
    ),
    "differs once it is built": case(
        "Then compare again (roir resume",
        RESUME,
        built_badly,
        IDLE,
        starts="table",
        found=2,
        take=(1,),
        again=BUILD,
    ),
    "windows by a command": case(
        "is no window; write CRON",
        f"roir change '{IX}' --windows now",
        starts="paused",
        found=0,
        again=f"roir change '{IX}' --windows '{{example}}'",
        whole=False,
    ),
    "windows by SQL": case(
        "write CRON for DURATION in ZONE: 0 22",
        f"SELECT roir.change('{IX}', windows => 'now')",
        starts="paused",
        found=0,
        again=f"SELECT roir.change('{IX}', windows => '{{example}}')",
        whole=False,
    ),
    **{
        f"throttle {wrong}": case(
            says,
            f"SELECT roir.change('{IX}', throttle => '{wrong}')",
            starts="paused",
            found=0,
            again=f"SELECT roir.change('{IX}', throttle => '{right}')",
            whole=False,
        )
        for wrong, says, right in (
            ("much", "for example: replica_lag=100MB", "{example}"),
            ("replicas=,", "write it as replicas=r1,r2, or", "replicas={example}"),
            ("replica_lag=much", "write it as 100MB", "replica_lag={example}"),
            ("commit_latency=much", "write it as 20ms", "commit_latency={example}"),
            ("lock_waits=much", "write it as 4", "lock_waits={example}"),
        )
    },
}
