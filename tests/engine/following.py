"""A user who follows a refusal: takes the remedy from the message, and carries it out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg2
import pytest
from typer.main import get_command

from airflow_roir import cli
from airflow_roir.cli.app import say
from airflow_roir.cli.spark import CommandSpark
from airflow_roir.engine import lifecycle
from airflow_roir.engine.control.operations import read_operation
from airflow_roir.engine.control.run import driving, start_run
from airflow_roir.engine.database import Database
from airflow_roir.errors import RoirError
from airflow_roir.operation import LONG, Phase
from tests.conftest import run_sql
from tests.test_cli import ended_here

COMMANDS = [*get_command(cli.app).commands]  # type: ignore[attr-defined]
ARGUMENT = r"""'[^']*'|--[a-z-]+(?: off)?|(?:\w+|"[^"]*")\.(?:\w+|"[^"]*")"""
# In a message a command ends with its arguments. A statement ends with its sentence, or before a remark on it.
STEP = re.compile(
    rf"\broir (?P<command>{'|'.join(COMMANDS)})\b(?P<arguments>(?: (?:{ARGUMENT}))*)"
    r"|(?P<sql>(?:ALTER|GRANT|REVOKE|DROP (?:SCHEMA|TRIGGER|PUBLICATION)|CREATE [A-Z]+|REINDEX TABLE|SELECT roir\.)"
    r"[^;]+?)"
    r"(?=[;\n]|\.? *$|\. |, (?:or|then|from|with|which|that|REINDEX|and)\b| for the role)"
    r"|(?P<rows>roir\.rows\(.*\))",
    re.MULTILINE,
)
# An example that a message shows, and a flag that it names.
EXAMPLE = re.compile(
    r"(?:example: |in ZONE: |write it as (?:replicas=r1,r2, or )?)(?P<example>.+?)(?: or |$)", re.MULTILINE
)
FLAG = re.compile(r"--[a-z-]+(?: (?:auto|none|key))?")


class Refused(Exception):
    """The message that came instead of success."""


@dataclass
class Scene:
    """A database with its users: `admin`, a superuser; `worker`, roir's role; `owner` of the table.

    A step is a command, a statement, or a function of the test; before `>> ` it may name the user. names: the values of
    the words in braces.
    """

    dsn: str
    names: dict[str, str] = field(default_factory=dict)
    sessions: list[Any] = field(default_factory=list)
    who: str = "admin"

    def of(self, who: str) -> str:
        return self.dsn if who == "admin" else self.dsn.replace("//postgres:@", f"//{self.names[who]}:@")

    @property
    def database(self) -> Database:
        return Database(self.of(self.who), "roir tests")

    def do(self, step: Any) -> str:
        """Does a step and returns its output. Raises Refused."""
        if callable(step):
            try:
                return str(step(self))
            except RoirError as error:
                raise Refused(str(error)) from error
        who, _, text = step.rpartition(">> ")
        text, dsn = self.named(text), self.of(who or self.who)
        if text.startswith("roir "):
            return roir(dsn, *shlex.split(text)[1:])
        try:
            run_sql(dsn, text)
        except psycopg2.Error as error:
            raise Refused("\n".join(filter(None, (error.diag.message_primary, error.diag.message_hint)))) from error
        return ""

    def named(self, text: str) -> str:
        """The text with the values of the names in braces."""
        for name, value in self.names.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def refused(self, step: Any, says: str) -> str:
        """The refusal's message that has this part, with its hint. The example or flag that it shows becomes a name."""
        with pytest.raises(Refused) as refused:
            self.do(step)
        found = [one for one in re.split("^roir: ", str(refused.value), flags=re.MULTILINE) if says in one]
        assert found, refused.value
        for name, pattern in (("example", EXAMPLE), ("flag", FLAG)):
            if shown := pattern.search(found[-1]):
                self.names[name] = shown[name if name == "example" else 0]
        return found[-1]

    def remedies(self, said: str, fills: tuple[str, ...]) -> list[str]:
        """The steps that a message names. fills: the user's words for each … of the message."""
        for text in fills:
            said = said.replace("…", self.named(text), 1)
        found = [self._step(one) for one in STEP.finditer(said)]
        return [one for one in found if "…" not in one]

    def _step(self, one: re.Match[str]) -> str:
        if one["rows"] is not None:
            return f"{self.who}>> SELECT * FROM {one['rows']}"
        if (statement := one["sql"]) is not None:
            statement = statement[: -1 if statement.count(")") > statement.count("(") else None]
            return f"{self.who if statement.startswith('SELECT') else 'admin'}>> {statement}"
        known = self.names["attached"] if one["command"] == "attach-partition" and not one["arguments"] else ""
        return f"{self.who}>> roir {one['command']}{one['arguments']}{known}"


def roir(dsn: str, *arguments: str) -> str:
    """Runs the command in this process, as a user runs it. Raises Refused if its exit code isn't 0."""
    done = ended_here(dsn, *arguments)
    # Duplicates are an answer too.
    if done.returncode and arguments[0] != "duplicates":
        raise Refused(done.stdout + done.stderr)
    return str(done.stdout + done.stderr)


@dataclass
class _Driver:
    """Takes the place of Spark's driver: does the workers' phases in this process."""

    drive: Callable[[], None]
    is_starting: bool = False

    def wait_for_order(self, _seconds: float | None = None) -> int:
        try:
            self.drive()
        except RoirError as error:
            say(str(error))
            return error.exit_code
        return 0


def _work(database: Database, index: str, owner: str, operation: int, take_over: bool) -> None:
    run = start_run(database, index, owner, take_over, operation=operation)

    def phase() -> str:
        with database.transaction() as connection:
            return str(read_operation(connection, operation).phase)

    with driving(database, run):
        while (name := phase()) in LONG:
            work = lifecycle.PHASES[Phase(name)]
            for _ in work.work(database, run, 0):
                pass
            work.finish(database, run, lambda _line: None)


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the commands drive their operations in this process."""

    def drive(spark: CommandSpark, operation_id: int, index: str, owner: str, take_over: bool) -> _Driver:
        database = Database(spark._dsn, "roir tests")
        return _Driver(lambda: _work(database, index, owner, operation_id, take_over))

    monkeypatch.setattr(CommandSpark, "start", lambda *_: None)
    monkeypatch.setattr(CommandSpark, "check", lambda *_: None)
    monkeypatch.setattr(CommandSpark, "drive", drive)
