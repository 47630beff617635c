"""Each remedy of a warning is carried out as it is written, and helps: the warning is gone, and the index is exact.

A remedy is taken from the message itself: roir's commands and SQL, in their order, until no warning is left. If the
message asks for something in words alone (`rename it back`), the case has its own statement for that.
"""

from __future__ import annotations

import re
from contextlib import closing, suppress
from dataclasses import dataclass

import psycopg2
import pytest
from psycopg2.extensions import parse_dsn
from typer.main import get_command
from typer.testing import CliRunner

from airflow_roir.cli import app
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.snapshot.operation import status
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_partitions import make

pytestmark = pytest.mark.sample(1)

COMMANDS = list(get_command(app).commands)  # type: ignore[attr-defined]
# In a message a command ends with its argument, a statement with its sentence or a semicolon.
STEP = re.compile(
    rf"\broir (?P<command>{'|'.join(COMMANDS)})\b(?: (?P<name>[\w.\"]+\w\"?))?(?: (?P<flag>--[a-z-]+))?"
    r"|(?P<sql>(?:ALTER TABLE|ALTER PUBLICATION|GRANT|DROP TRIGGER|SELECT roir\.)[^;…]+?)(?=;|\. |$)"
)
WRITES = {"missed": ("UPDATE t SET v = -1 WHERE d = 11", "DELETE FROM t WHERE d = 12"), "none missed": ()}


@dataclass
class Case:
    """done: the statements that cause the warning; by_hand: those that its words ask for; ends: the index is gone at
    the end; include: columns of the index, and of the one that is built after a drop; commands_do: the commands help
    without the words.

    Names in braces are those of `names`.
    """

    done: tuple[str, ...]
    by_hand: tuple[str, ...] = ()
    ends: bool = False
    include: tuple[str | None, str | None] = ("v", "v")
    commands_do: bool = True


LAMED = (
    "CREATE TRIGGER {row} AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW WHEN (false) EXECUTE FUNCTION {capture}()"
)
NOTHING = "CREATE OR REPLACE FUNCTION {capture}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
CASES: dict[str, Case] = {
    "table dropped": Case(("DROP TABLE t CASCADE",), ends=True),
    **{
        f"trigger {how} on {table}": Case((f"ALTER TABLE {table} {how}",))
        for table in ("t", "t1")
        for how in (
            "DISABLE TRIGGER {row}",
            "DISABLE TRIGGER {truncate}",
            "DISABLE TRIGGER ALL",
            "ENABLE TRIGGER {row}",
        )
    },
    "row trigger dropped": Case(("DROP TRIGGER {row} ON t",)),
    "truncate trigger dropped": Case(("DROP TRIGGER {truncate} ON t1",)),
    "trigger lamed": Case(("DROP TRIGGER {row} ON t", LAMED)),
    "function replaced": Case((NOTHING,)),
    "source view dropped": Case(("DROP VIEW roir_data.g1_source",)),
    "source view hides": Case(
        ("CREATE OR REPLACE VIEW roir_data.g1_source AS {source_view} WHERE false",),
        by_hand=("DROP VIEW roir_data.g1_source",),
    ),
    "partition came empty": Case(("CREATE TABLE n PARTITION OF t FOR VALUES FROM (50) TO (60)",)),
    "partition came filled": Case(
        (
            "CREATE TABLE n (LIKE t INCLUDING ALL)",
            "INSERT INTO n SELECT 50, 7000 + i, 'k', i FROM generate_series(1, 20) i",
            "ALTER TABLE t ATTACH PARTITION n FOR VALUES FROM (50) TO (60)",
        )
    ),
    "attach begun": Case(
        ("CREATE TABLE n (LIKE t INCLUDING ALL)", "SELECT roir.begin_attach('t', 'n', 'FOR VALUES FROM (50) TO (60)')")
    ),
    "column renamed": Case(
        ("ALTER TABLE t RENAME v TO w",), by_hand=("ALTER TABLE t RENAME w TO v",), include=("v", "w")
    ),
    "type of a column": Case(("DROP VIEW roir_data.g1_source", "ALTER TABLE t ALTER v TYPE bigint")),
    "primary key": Case(("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (d, id, v)",), include=("v", None)),
    "primary key made again": Case(("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (d, id)",)),
    "column dropped": Case(("ALTER TABLE t DROP v CASCADE",), include=("v", None)),
    "entries dropped": Case(("DROP TABLE roir_data.g1 CASCADE",)),
    "unique index of the entries": Case(("DROP INDEX {unique}",)),
    "segment detached": Case(("ALTER TABLE roir_data.g1 DETACH PARTITION {segment}",)),
    "segment unlogged": Case(("ALTER TABLE {segment} SET UNLOGGED",)),
    "segment renamed": Case(
        ("ALTER TABLE {segment} RENAME TO other",), by_hand=("ALTER TABLE roir_data.other RENAME TO {segment_name}",)
    ),
    "rule on the entries": Case(
        ("CREATE RULE no AS ON DELETE TO roir_data.g1 DO INSTEAD NOTHING",), by_hand=("DROP RULE no ON roir_data.g1",)
    ),
    "trigger on a segment": Case(
        (
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
            "CREATE TRIGGER no BEFORE DELETE ON {segment} FOR EACH ROW EXECUTE FUNCTION no()",
        ),
        by_hand=("DROP TRIGGER no ON {segment}",),
    ),
    "row security of the entries": Case(
        ("ALTER TABLE {segment} ENABLE ROW LEVEL SECURITY",),
        by_hand=("ALTER TABLE {segment} DISABLE ROW LEVEL SECURITY",),
    ),
    "view gone": Case(("DROP VIEW ix",)),
    "view renamed": Case(("ALTER VIEW ix RENAME TO other",), by_hand=("ALTER VIEW other RENAME TO ix",)),
    "view is a table": Case(("DROP VIEW ix", "CREATE TABLE ix (k int)"), by_hand=("DROP TABLE ix",), commands_do=False),
    "view altered": Case(("CREATE OR REPLACE VIEW ix AS {view} LIMIT 3",)),
    "row security of the table": Case(
        ("ALTER TABLE t ENABLE ROW LEVEL SECURITY",),
        by_hand=("ALTER TABLE t DISABLE ROW LEVEL SECURITY",),
        commands_do=False,
    ),
    "publication of all tables": Case(
        ("CREATE PUBLICATION p FOR ALL TABLES",), by_hand=("DROP PUBLICATION p",), commands_do=False
    ),
    "publication of a schema": Case(("CREATE PUBLICATION p FOR TABLES IN SCHEMA roir_data, public",)),
    "functions closed": Case(("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA roir FROM PUBLIC",)),
    "another owner": Case(
        (
            "ALTER TABLE t OWNER TO {role}",
            "ALTER TABLE t0 OWNER TO {role}",
            "ALTER TABLE t1 OWNER TO {role}",
            "ALTER TABLE t2 OWNER TO {role}",
        )
    ),
    "a partition of another's": Case(("ALTER TABLE t1 OWNER TO {role}",)),
}


@dataclass
class Follower:
    """Carries out the messages."""

    database: Database
    case: Case

    def told(self) -> list[str]:
        with self.database.transaction() as connection:
            return faults.warnings(connection)

    def build(self, include: str | None) -> None:
        steps.make_index(self.database, "public.ix", "public.t", "k", include)

    def run(self, step: re.Match[str]) -> bool:
        """True if nothing more is to be done. Raises AssertionError if a command of the message fails."""
        if (statement := step["sql"]) is not None:
            run_sql(self.database.dsn, statement)
            return True
        match step["command"]:
            case "attach-partition":
                # The user has begun the attach, and knows its arguments.
                self.roir("attach-partition", "t", "n", "FOR VALUES FROM (50) TO (60)")
            case "build":
                steps.make_index(self.database, step["name"], None, None)
            case "drop":
                self.roir("drop", step["name"])
                if not self.case.ends:
                    self.build(self.case.include[1])
            case "verify":
                return self.roir("verify", "--without-spark", *filter(None, (step["flag"], step["name"]))) == 0
            case command:
                self.roir(command, *filter(None, (step["flag"], step["name"])))
        return True

    def roir(self, *arguments: str) -> int:
        """The exit code of a command. A verification may find differences; no other command may fail."""
        done = CliRunner().invoke(app, arguments, env={"ROIR_DSN": self.database.dsn})
        assert done.exit_code == 0 or arguments[0] == "verify", (arguments, done.output, done.exception)
        return done.exit_code


NAMES = """
SELECT format('%%s', v.function::regproc) AS capture, pg_get_viewdef('roir_data.g1_source') AS source_view,
       pg_get_viewdef('ix') AS view, s.segment::regclass::text AS segment, s.relname AS segment_name,
       (SELECT indexrelid::regclass::text FROM pg_index
         WHERE indrelid = 'roir_data.g1'::regclass AND indisunique LIMIT 1)
  FROM (SELECT tgfoid AS function FROM pg_trigger WHERE tgrelid = 't'::regclass AND tgname = %s) v,
       (SELECT inhrelid AS segment, relname FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
         WHERE inhparent = 'roir_data.g1'::regclass ORDER BY 2 LIMIT 1) s
"""


def names(dsn: str, stranger: str) -> dict[str, str]:
    """The names that the statements of the cases use."""
    row, truncate = steps.capture_triggers(dsn)
    with closing(steps.session(dsn)) as user:
        [found] = sql(user, NAMES, row)
    keys = ("capture", "source_view", "view", "segment", "segment_name", "unique")
    of_view = {key: text.strip().rstrip(";") if "view" in key else text for key, text in zip(keys, found, strict=True)}
    return of_view | {"row": row, "truncate": truncate, "role": str(parse_dsn(stranger)["user"])}


ALL = [
    (name, writes, by_hand)
    for name, case in CASES.items()
    for writes in WRITES
    for by_hand in ([True, False][: 1 + case.commands_do] if case.by_hand else [False])
]


@pytest.mark.sample(0)
@pytest.mark.parametrize(("name", "writes", "by_hand"), ALL)
def test_the_remedy_of_a_warning_helps(
    database: Database, dsn: str, stranger: str, name: str, writes: str, by_hand: bool
) -> None:
    """Found: a view that somebody had replaced by one with `LIMIT` or `OFFSET`: only `roir verify` found it. It holds:
    status, too.
    """
    case = CASES[name]
    make(dsn)
    follower = Follower(database, case)
    follower.build(case.include[0])
    assert follower.told() == []
    named = names(dsn, stranger)
    run_sql(dsn, *(statement.format(**named) for statement in case.done))
    for statement in WRITES[writes]:
        # A write that is refused isn't missed.
        with suppress(psycopg2.Error):
            run_sql(dsn, statement)
    assert follower.told(), "status is silent"
    heard = []
    while found := follower.told():
        assert found[0] not in heard, "its remedy didn't help"
        said = found[0]
        heard.append(said)
        if by_hand and len(heard) == 1:
            run_sql(dsn, *(statement.format(**named) for statement in case.by_hand))
            if said not in follower.told():
                # Follow the commands that come after the words; the alternative isn't needed.
                said = said.partition(". Then ")[2]
        for step in STEP.finditer(said):
            if follower.run(step) and found[0] not in follower.told():
                break
    if case.ends:
        assert status(database) == []
    else:
        run_sql(dsn, "UPDATE t SET k = 'x' WHERE d = 13", "UPDATE t SET id = 9000, k = 'y' WHERE id = 4", "TRUNCATE t2")
        steps.assert_exact(database)
