"""Builds several indexes at once: prepares all of them, then a command of its own builds each, by one shared scan.

Each has a process of its own: the end, a pause or an abort of one leaves the others alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import typer
from sqlalchemy.exc import SQLAlchemyError

from airflow_roir.cli.app import print_json, say, show
from airflow_roir.cli.ending import SIGNALS
from airflow_roir.cli.given import in_flags
from airflow_roir.cli.last_line import begins
from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import lifecycle, prepare
from airflow_roir.engine.control import expected, operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.repeat import meanwhile
from airflow_roir.engine.verify import record
from airflow_roir.errors import RoirError
from airflow_roir.options import VERIFY_BEFORE, BuildOptions
from airflow_roir.spark import guard

# The worst first.
EXIT_CODES = (1, 2, 4, 3, 0)
# An operation that is prepared is kept from looking abandoned for this time, again and again.
KEPT_S = 60


def build_together(
    database: Database,
    definitions: Sequence[IndexDefinition],
    options: BuildOptions,
    without_spark: bool,
    master: str | None,
    conf: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Prepares the indexes one after the other, then builds them side by side. Exits with the worst of their codes."""
    from airflow_roir.cli.spark import spark_of

    spark_of(without_spark, database.dsn, master, conf).check()
    codes: list[int] = []
    prepared: dict[int, str] = {}

    def keep() -> None:
        # Those that are prepared wait for the others.
        for operation in list(prepared):
            with suppress(SQLAlchemyError):
                expected.expect(database, operation, operations.default_actor(), KEPT_S)

    begins()
    with meanwhile(keep, KEPT_S / 3, "roir-prepared"):
        for definition in definitions:
            name = str(definition.name)
            try:
                if options.verify in VERIFY_BEFORE and prepare.is_rebuild(database, definition):
                    _compare(database, name, options, without_spark, master, conf)
                found = lifecycle.prepare(
                    database, definition, options, report=_said_of(name), on_spark=not without_spark
                )
            except RoirError as error:
                say(in_flags(f"{name}: {error}"))
                codes.append(error.exit_code)
                continue
            if found.adopted:
                say(f"{name}: continuing unfinished operation {found.operation_id}")
            prepared[found.operation_id] = found.index
        keep()
    given = [
        *(["--without-spark"] if without_spark else []),
        *(["--master", master] if master else []),
        *(part for one in conf or () for part in ("--conf", one)),
    ]
    with _all(database, [[name, *given, *(["--json"] if as_json else [])] for name in prepared.values()]) as children:
        for child in children:
            child.hear_out()
    codes += [child.code for child in children]
    if as_json:
        print_json([fact for child in children for fact in child.facts()])
    else:
        for child in children:
            show(child.said.rstrip())
    raise typer.Exit(next((code for code in EXIT_CODES if code in codes), 1))


def _said_of(index: str) -> Callable[[str], None]:
    return lambda line: say(f"{index}: {line}")


def _compare(
    database: Database,
    index: str,
    options: BuildOptions,
    without_spark: bool,
    master: str | None,
    conf: Sequence[str] | None,
) -> None:
    from airflow_roir.cli.execute import verify_before
    from airflow_roir.cli.spark import spark_of

    with spark_of(without_spark, database.dsn, master, conf) as spark:
        begun = record.begin(database, index, options.for_comparison(), operations.default_actor(), "before", say)
        say(f"{index} before its rebuild: {verify_before(database, begun.index, spark)}")


class Child:
    """A `roir resume` of one index, whose lines are shown. said: its standard output; code: its exit code."""

    def __init__(self, database: Database, arguments: Sequence[str]) -> None:
        self.index = arguments[0]
        self.said = ""
        self.code = 1
        # In a session of its own: so it gets a Ctrl-C of the terminal once, from this process.
        pipe, self._life = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "airflow_roir.cli", "resume", *arguments],
            env={**os.environ, "ROIR_DSN": database.dsn, guard.STARTER: str(pipe)},
            pass_fds=(pipe,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.close(pipe)
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._relay, self._keep)]
        for thread in self._threads:
            thread.start()

    def _relay(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            # The reader may be gone; the child must not wait for that.
            with suppress(OSError):
                say(f"{self.index}: {line.rstrip().removeprefix('roir: ')}")

    def _keep(self) -> None:
        assert self.process.stdout is not None
        self.said = self.process.stdout.read()

    def hear_out(self) -> None:
        """Waits until it has ended. A Ctrl-C goes to all children: each pauses; a second one stops them at once."""
        self.code = self.process.wait()
        os.close(self._life)
        for thread in self._threads:
            thread.join()

    def facts(self) -> list[Any]:
        """The JSON that it has printed; empty if it didn't come so far."""
        try:
            return [json.loads(self.said)]
        except ValueError:
            return []


@contextmanager
def _all(database: Database, arguments: Sequence[Sequence[str]]) -> Iterator[list[Child]]:
    children: list[Child] = []

    def pass_on(number: int, _frame: Any) -> None:
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)}
    for number, handler in before.items():
        # A signal that the starter ignores (nohup, a script's background) stays ignored, by the children too.
        if handler != signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        children += [Child(database, one) for one in arguments]
        yield children
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.terminate()
        for number, handler in before.items():
            signal.signal(number, handler)
