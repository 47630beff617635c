"""Each remedy that a refusal names is carried out as it is written; then what was refused works, and all is exact."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg2.extensions import parse_dsn

import airflow_roir
from airflow_roir.engine.control import requests
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.snapshot.operation import status
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.following import COMMANDS, Scene
from tests.engine.following import no_spark as no_spark
from tests.engine.refusals import BOUNDS, BUILD, IDLE, INIT, IX, OPERATIONS, TABLE, VERIFY, Case, T
from tests.engine.refusals_of_tables import PARTITIONS, READING, UNSUITED

pytestmark = [pytest.mark.sample(1), pytest.mark.usefixtures("no_spark")]

CASES = INIT | OPERATIONS | PARTITIONS | READING | UNSUITED


BY_US, BY_CHANCE = "a defect of ours alone would bring it", "it comes in the moment between two statements"
# Refusals that aren't walked here: the reason, or the test that does it.
ELSEWHERE = {
    "ranges are not done yet; run: roir resume": BY_US,
    "segments are not sealed yet; run: roir resume": BY_US,
    "units aren't done yet; run: roir resume": BY_US,
    "parts of the delta aren't folded yet; run: roir resume": BY_US,
    "units are not compared yet; run: roir resume": BY_US,
    "compaction is done or aborted, run: roir verify": BY_US,
    "of a published generation still has": BY_US,
    "rows shared a key while it was sealed": BY_CHANCE,
    "was dropped or reverted meanwhile; nothing was reverted": BY_CHANCE,
    "are being added or removed. Finish": BY_CHANCE,
    "Run roir clean-up, which adopts new names": BY_CHANCE,
    "the next roir clean-up adopts the new name": BY_CHANCE,
    "is unfinished, and over the shards": "test_prepare.py",
    "Run that roir attach-partition again, or cancel it": "test_attach_disturbed.py",
    "so its compaction can't continue": "test_compact_attacks.py",
    "The next roir clean-up continues": "test_removed_entries.py",
    "this run stops. Continue after the server's last commit": "test_failover.py",
    "there is no operation yet; roir build makes an index": "it names no index",
    "upgrade the schema with: roir init": "there is one version until 0.1.0 is released",
    "was restored without the section post-data": "test_restore.py",
    "Run roir init, then truncate": "test_restore.py",
    "is off, and a pooler or proxy before the database keeps it off": "of a pooler that the tests haven't",
    "Make a superuser the owner of type": "not walked: test_rights_ddl.py provokes it",
    "Give the table to another role": "not walked: it needs a member of a superuser that can't become it",
    "`roir status` shows whether an index lacks a change": "of a statement that works; test_guard.py provokes it",
    "Use roir.pause, roir.resume": "not walked: it names functions, and no call of them",
    "The next roir clean-up removes them, or run again: roir drop": "not walked: it needs a writer for a minute",
    "Partition the table by columns": "no table with a primary key is, and all of it has one",
    "Run: roir drop %s": "a warning, which status tells, too: test_remedies.py",
    "there are %s, and replicas": "a list of names",
    "Retry the transaction.": "test_old_readers.py",
    "`roir init` creates it": "test_operators.py",
    "had no part in it, so it has built nothing. Clear": "test_marks.py",
    "nothing is published: {}. Clear the build task": "test_operators.py",
    "Clear the prepare task with those that follow it": "test_marks.py",
    "Clear this run from its first task on": "test_operators.py",
    "start it again by roir resume": "test_spark_processes.py",
    "Run roir rows-view for its index": "test_rows_view.py",
    "has no unique index: build one by roir build --unique first": "test_on_conflict_cases.py",
    "Make sure that it finds each row once": "test_rows_view_writes.py",
    "a foreign key needs a unique index; build one: roir build": "test_reference.py",
    "Run roir reference as the tables' owner": "test_reference.py",
    "Remove the foreign key first: roir reference --remove": "test_reference.py",
    "or their parents, for longer than": "test_reference.py",
    "is unfinished; abort it: roir abort {}": "test_reference.py",
    "has no foreign key to index {}; `roir status` names all": "test_reference.py",
}
REMEDY = re.compile(
    rf"\broir (?:{'|'.join(command for command in COMMANDS if command != 'spark-server')})\b|SELECT roir\."
    r"|\b(?:GRANT|REVOKE|ALTER|REINDEX|DROP|CREATE) (?:[A-Z]{3,}|…|{)"
    r"|[Aa]bort (?:it|the operation)|\b[Rr]esume (?:it|the|to)|\bClear "
)
HINT = re.compile(r"(?:HINT =|hint :=)(.*?);\n", re.DOTALL)


def texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant):
        yield str(node.value)
    else:
        for part in ast.iter_child_nodes(node):
            yield from texts(part)


def refusals() -> Iterator[str]:
    """The texts of errors that name a remedy, and the hints of SQL, except those about shards."""
    root = Path(airflow_roir.__file__).parent
    for file in root.rglob("*.py"):
        if "shard" not in str(file):
            raised = (node.exc for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise))
            yield from (text for error in raised if error for text in texts(error) if REMEDY.search(text))
    for file in (root.parent / "migrations" / "sql").glob("*.sql"):
        if file.stem != "apart_reading":
            for hint in HINT.findall(file.read_text()):
                text = "".join(re.findall("'((?:[^']|'')*)'", hint)).replace("''", "'")
                yield from [text] if " " in text else []


@pytest.mark.sample(1)
def test_each_remedy_is_carried_out_by_a_case() -> None:
    says = [*(case.says for case in CASES.values()), *ELSEWHERE]
    said = list(refusals())
    assert [text for text in said if not any(part in text for part in says)] == []
    assert [part for part in ELSEWHERE if not any(part in text for text in said)] == []
    tests = {file.name for file in Path(__file__).parents[1].rglob("test_*.py")}
    assert {name for why in ELSEWHERE.values() for name in re.findall(r"test_\w+\.py", why)} <= tests


@pytest.fixture
def scene(dsn: str, stranger: str) -> Iterator[Scene]:
    worker = str(parse_dsn(stranger)["user"])
    names = {
        "worker": worker,
        "other": f"{worker}_other",
        "database": str(parse_dsn(dsn)["dbname"]),
    }
    run_sql(dsn, f"CREATE ROLE {names['other']} LOGIN")
    yield Scene(dsn, names)
    run_sql(dsn, f"DROP SUBSCRIPTION IF EXISTS s_{names['database']}")
    run_sql(dsn, "DROP SCHEMA IF EXISTS roir, roir_data CASCADE")
    run_sql(dsn, f"DROP OWNED BY {names['other']} CASCADE", f"DROP ROLE {names['other']}")


def refused(scene: Scene, case: Case) -> str:
    """The message of the case's refusal."""
    scene.names["attached"] = f" '{case.attached_to}' n '{BOUNDS}'"
    run_sql(scene.dsn, *TABLE)
    unique = case.starts.endswith("unique")
    if case.starts in ("built", "unique"):
        steps.make_index(scene.database, IX, T, "k", "v", unique=unique)
    elif case.starts != "table":
        steps.begin(scene.database, IX, T, "k", "v", unique=unique)
        requests.pause(scene.database, IX, "somebody")
        run_sql(scene.dsn, IDLE)
    for step in case.given:
        scene.do(step)
    scene.who = case.who
    return scene.refused(case.refused, re.split("%|{}", case.says)[-1 if "{}" in case.says else 0])


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", CASES)
def test_the_remedy_of_a_refusal_helps(scene: Scene, name: str) -> None:
    """Found: refusals named commands that can't be run as they are: `roir resume`, `roir abort`, `roir build` without
    an index, `roir drop INDEX`, `ALTER TABLE … SET LOGGED`, `ALTER TABLE … OWNER TO` "on such partitions". It holds:
    the command with its names, quoted for a shell or for SQL.
    """
    case = CASES[name]
    found = scene.remedies(refused(scene, case), case.fills)
    assert len(found) == case.found, found
    carried_out = found if case.take is None else [found[number] for number in case.take]
    words = case.after if carried_out else (*case.words, *case.after)
    for step in case.words if carried_out else ():
        scene.do(f"admin>> {step}")
    for step in carried_out[:1]:
        scene.do(step)
    for step in words:
        scene.do(step if callable(step) else f"admin>> {step}")
    for step in carried_out[1:]:
        scene.do(step)
    scene.do(case.again or case.refused)
    if case.ends:
        assert status(scene.database) == []
    elif case.whole:
        run_sql(scene.dsn, f"UPDATE {T} SET k = 'x' WHERE id = 13", f"DELETE FROM {T} WHERE d = 12")
        steps.assert_exact(scene.database, "w" if " w " in str(case.refused) else IX)


# For each case in which a build ends with an error: the steps that the words ask for, which come before the commands,
# and the step that must work in the end.
TOLD: dict[str, tuple[tuple[str, ...], str]] = {
    "gone during a build": ((), VERIFY),
    "came during a build": ((), VERIFY),
    "capture of a former owner": ((), VERIFY),
    "altered while built": ((), f"{BUILD} --ignore-row-security"),
    "label renamed while built": (("ALTER TYPE mood RENAME VALUE 'z' TO 'a'",), "roir verify w"),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", TOLD)
def test_what_the_page_says_of_an_error_helps(scene: Scene, name: str) -> None:
    """Found: the page's remedy for an error with the word "partition" in it was `roir sync-partitions TABLE`, of
    whatever table, and for rights of a partition, too. It holds: the command that the error itself names, with the
    table.
    """
    case, (words, again) = CASES[name], TOLD[name]
    refused(scene, case)
    index = "w" if again.endswith(" w") else IX
    error = progress(scene.database, index).errors[-1]
    for step in (*words, *scene.remedies(error.remedy, ()), again):
        scene.do(step)
    steps.assert_exact(scene.database, index)
