"""Runs Spark for one command: a driver that starts while the command still prepares, and drives several operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer

from airflow_roir.cli.app import say
from airflow_roir.cli.ending import Ended, ending
from airflow_roir.cli.last_line import LastLine
from airflow_roir.errors import JavaMissing, OperationPaused
from airflow_roir.spark.driver_process import (
    TERMINATE_S,
    Driver,
    driver_command,
    driver_environment,
    driver_order,
    later,
)
from airflow_roir.spark.java import OF_A_COMMAND, use_java
from airflow_roir.spark.log_file import spark_log
from airflow_roir.spark.options import SECRETS_GO, SparkOptions, is_connect


class CommandSpark:
    """A context manager, which ends Spark's driver.

    master, conf: as the command line gives them. Raises typer.BadParameter.
    """

    def __init__(self, dsn: str, master: str | None, conf: Sequence[str] | None) -> None:
        self._options = spark_options(master, conf)
        self._dsn = dsn
        # Called with each line of the driver, in a thread.
        self.relay: Callable[[str], None] = tell
        self._driver: Driver | None = None
        # The index and the owner of the order that it has now.
        self._ordered: tuple[str, str] | None = None
        self._ending = ExitStack()
        self._is_released = False
        self._waiting_log: Path | None = None
        self.last_line = LastLine()

    def start(self, operation_id: int | None = None) -> None:
        """Starts Spark, if it doesn't run. Raises JavaMissing.

        operation_id: if it is known already: its stretches share a log.
        """
        if self._driver is None or self._driver.wait(0) is not None:
            self._driver = self._new(operation_id)

    def check(self) -> None:
        """Raises JavaMissing if a driver couldn't start here. To be called before anything is prepared."""
        if not is_connect(self._options.master):
            use_java(instead=OF_A_COMMAND)

    def _new(self, operation_id: int | None) -> Driver:
        self.check()
        log = spark_log(f"of-{os.getpid()}" if operation_id is None else operation_id)
        if operation_id is None:
            self._waiting_log = log
        return Driver(
            driver_command(self._options, later(log)),
            driver_environment(self._dsn),
            lambda line: self.relay(line),
            takes_orders=True,
        )

    def drive(self, operation_id: int, index: str, owner: str, take_over: bool) -> Driver:
        """Lets it drive an operation; returns the driver, to wait for. Raises JavaMissing, SparkFailed."""
        self.start(operation_id)
        assert self._driver is not None
        log = spark_log(operation_id)
        self._waiting_log = None
        self._ordered = (index, owner)
        wish: dict[str, Any] = {"take_over": take_over, "lift_pause": False, "log": log}
        self._driver.order(driver_order(index, owner, operation=operation_id, **wish))
        return self._driver

    def release(self) -> None:
        """Ends Spark in the background: nothing more is to be driven."""
        self._is_released = True
        if self._driver is not None:
            self._driver.release()

    def rest(self) -> None:
        """Lets Spark end while its command waits; `drive` starts another one."""
        if self._driver is not None:
            self._driver.release()
            self._driver.wait(TERMINATE_S)
            self._driver.kill()
            self._driver = None
        if self._waiting_log is not None:
            self._waiting_log.unlink(missing_ok=True)
            self._waiting_log = None

    def __enter__(self) -> CommandSpark:
        self._ending.enter_context(ending(self._end_at_once))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with self._ending:
            if self._driver is not None:
                if self._is_released:
                    self._driver.wait(TERMINATE_S)
                self._driver.kill()
                if self._ordered is not None:
                    self._driver.settle(self._dsn, *self._ordered)
            if self._waiting_log is not None:
                # No operation has begun. A driver that had to be killed has left the log.
                self._waiting_log.unlink(missing_ok=True)
            if kind is Ended and self.last_line.say():
                raise SystemExit(OperationPaused.exit_code) from None

    def _end_at_once(self) -> None:
        if self._driver is not None:
            self._driver.kill(0)
        self.last_line.say_unread()


class NoSpark:
    """In place of Spark for a command without it: its workers are threads of the command."""

    def __init__(self) -> None:
        self._ending = ExitStack()
        self.last_line = LastLine()

    def start(self, operation_id: int | None = None) -> None:
        """Does nothing: there is no Spark to start."""

    def check(self) -> None:
        """Does nothing: no Java is needed."""

    def release(self) -> None:
        """Does nothing: there is no Spark to end."""

    rest = release

    def __enter__(self) -> NoSpark:
        self._ending.enter_context(ending(self.last_line.say_unread))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with self._ending:
            if kind is Ended and self.last_line.say():
                raise SystemExit(OperationPaused.exit_code) from None


def spark_of(without: bool, dsn: str, master: str | None, conf: Sequence[str] | None) -> CommandSpark | NoSpark:
    """The place where a command works: Spark, or threads of its own. Raises typer.BadParameter."""
    if not without:
        return CommandSpark(dsn, master, conf)
    if master or conf:
        raise typer.BadParameter("--without-spark works by threads of this command: leave out --master and --conf")
    return NoSpark()


def spark_or_threads(without: bool, dsn: str, master: str | None, conf: Sequence[str] | None) -> CommandSpark | NoSpark:
    """As `spark_of`, for a command that another one's message names: threads, in a line, on a machine without Java.

    If a Spark is named, by an option or SPARK_HOME, the command raises JavaMissing as it starts it.
    """
    spark = spark_of(without, dsn, master, conf)
    if isinstance(spark, CommandSpark) and not (master or conf or os.environ.get("SPARK_HOME")):
        try:
            spark.check()
        except JavaMissing:
            say("no Java for Spark here: working by threads of this command, as with --without-spark")
            return NoSpark()
    return spark


def spark_options(master: str | None, conf: Sequence[str] | None) -> SparkOptions:
    """The options of Spark as the command line gives them. Raises typer.BadParameter."""
    if wrong := [setting for setting in conf or () if "=" not in setting]:
        raise typer.BadParameter(f"--conf takes key=value, not {wrong[0]!r}")
    options = SparkOptions(master, dict(setting.split("=", 1) for setting in conf or ()))
    if secrets := options.secrets():
        say(f"all users of this machine can see what is among the arguments: {', '.join(secrets)}. {SECRETS_GO}")
    return options


def tell(line: str) -> None:
    """Prints a line of the driver."""
    say(line.removeprefix("roir: "))
