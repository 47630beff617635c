"""The part that build and verify share: Spark's driver as a process beside the task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowNotFoundException
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control import live_options, operations, requests
from airflow_roir.engine.control.slow_options import slow_operation
from airflow_roir.engine.database import is_transient
from airflow_roir.engine.retry.trouble import is_permanent, reason_of
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.errors import IllegalTransition, InvalidInput, OperationPaused, OperationQueued, OperationRunning
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.hooks.spark import resolve_spark
from airflow_roir.links.buttons import IndexBuildLink, LiveOptionsLink
from airflow_roir.operation import Status
from airflow_roir.options import VerifyOptions, options_of
from airflow_roir.signals import throttle_text
from airflow_roir.spark.driver_process import (
    INTERRUPTED,
    PERMANENT,
    Driver,
    driver_command,
    driver_environment,
    driver_order,
)
from airflow_roir.spark.log_file import spark_log
from airflow_roir.task.failure import message_of
from airflow_roir.task.form_values import optional_text
from airflow_roir.task.live_options import IN_EFFECT, OFF, TEXTS, Apply, LiveOptions, write
from airflow_roir.task.metrics import sending
from airflow_roir.task.operation_task import DrivingOperator
from airflow_roir.task.progress import Progress
from airflow_roir.task.roir_operator import NO_RETRY, failing_clearly, owner_of
from airflow_roir.task.ui_requests import Watcher

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from airflow_roir.engine.control.operations import OperationRow
    from airflow_roir.engine.database import Database
    from airflow_roir.spark.options import SparkOptions

DONE = 0
# Replaced in a folder's name, so that every file system takes it and the path leads nowhere else.
UNSAFE = re.compile(r"[^\w.~:+=@-]|^\.+$")


def spark_of(where: str | None) -> SparkOptions:
    """The place where Spark runs. Raises AirflowFailException, since no retry can help, if it isn't allowed or doesn't
    exist."""
    given = optional_text(where)
    try:
        return resolve_spark(given)
    except AirflowNotFoundException:
        raise AirflowFailException(
            f"spark is {given!r}, and there is no Airflow connection of that id. Give local, local[4] or the id of a "
            "connection of type spark, or add that connection (Admin, Connections). "
            "All that was built stays: trigger a run for the same index, and it continues"
        ) from None
    except InvalidInput as error:
        raise AirflowFailException(str(error)) from error


class SparkDrivingOperator(DrivingOperator):
    """Base of the operators that drive an operation on Spark.

    spark: the id of an Airflow connection that holds a Spark's address, an address that `[roir] spark_masters` lists,
        or `local[n]`; None or 'local' runs Spark inside the driver (templated). See `hooks.spark`.

    The operation's row holds the options that can change while it runs. The task shows them in its Task State Store,
    where they can be edited. The newest change wins: the task carries an edit to the row, and a change of the row (by
    `control_index`, `roir change`, SQL) to the store.
    """

    template_fields: Sequence[str] = (*DrivingOperator.template_fields, "spark")
    operator_extra_links = (LiveOptionsLink(), IndexBuildLink())
    # The options that the Task State Store holds for the user to change, each a column of the operation's row.
    live_options: tuple[str, ...] = tuple(one.name for one in options_of(VerifyOptions) if one.live and one.in_store)

    def __init__(self, *, spark: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spark = spark
        self._driver: Driver | None = None
        self._options = LiveOptions()
        self._change: Apply = lambda **_values: {}
        self._left_early = False
        self._settled: Mapping[str, Any] | None = None

    def offer_live_options(self, context: Context, database: Database) -> None:
        """Settles the live options between the operation and the Task State Store; shows the button."""
        ti, store = context["ti"], context["task_state_store"]
        # Now, and not at the end as Airflow would: the button is for the time while the task runs.
        link = LiveOptionsLink()
        ti.xcom_push(key=link.xcom_key, value=link.get_link(self, ti_key=ti))
        row = self.read(database)
        actor = f"task state store of DAG {ti.dag_id}"
        self._options = LiveOptions(
            store.get(IN_EFFECT),
            refused=lambda refusal: live_options.refuse_option(database, self.index, actor, refusal),
        )

        def change(**values: int | str) -> Mapping[str, int | str]:
            if "throttle" in values:
                # The store shows all limits, so a limit that is missing was removed.
                values["throttle"] = f"off {values['throttle']}"
            changed = requests.change_options(database, self.index, actor=actor, operation=row.id, **values)
            for line in slow_operation(database, changed):
                self.log.warning("%s", line)
            return self._options_of(changed)

        self._change = change
        if row.status in (Status.RUNNING, Status.PAUSED):
            stored = {key: store.get(key) for key in (*self.live_options, IN_EFFECT)}
            write(store, self._options.settle(stored, self._options_of(row), self._change))

    def _options_of(self, row: OperationRow) -> dict[str, int | str]:
        shown: dict[str, int | str] = {key: getattr(row, key) or 0 for key in self.live_options if key not in TEXTS}
        texts = {"throttle": throttle_text(row.throttle), "windows": row.windows}
        return shown | {key: texts[key] or OFF for key in self.live_options if key in TEXTS}

    @failing_clearly()
    def drive_on_spark(self, context: Context, database: Database, row: OperationRow) -> None:
        """Drives the operation, as `take_turn` returned it, until the driver's phases are done, or leaves it.

        Raises AirflowRescheduleException, AirflowFailException, AirflowException (the next try continues).
        """
        ti, store = context["ti"], context["task_state_store"]
        target = spark_of(self.spark)
        with failing_clearly():
            known = self.surroundings()
            owner = owner_of(ti)
            if row.status == Status.PAUSED:
                # Now, and not when the driver is up: a pause that comes in between must not be lifted with this one.
                requests.resume(database, self.index, owner, row.id)
            # A fresh heartbeat under our own name is of a try that was killed moments ago.
            take_over, log = row.owner == owner, spark_log(row.id, log_folder_of(ti))
            wish: dict[str, Any] = {"take_over": take_over, "lift_pause": False, "log": log, "operation": row.id}
            before = operation_status(database, row.id)
        self.log.info("Operation %s, phase %s: starting Spark's driver", row.id, row.phase)
        dsn = RoirHook(self.postgres_conn_id).get_dsn()
        command = driver_command(target, driver_order(self.index, owner, **wish))
        self._driver = Driver(command, driver_environment(dsn, surroundings=known), forward=self._tell)
        try:
            progress = Progress(lambda: operation_status(database, row.id), self.log.info, before=before)
            with (
                sending(database, row.id, ti) as send,
                Watcher(ti, store, (*self.live_options, IN_EFFECT)) as watcher,
            ):

                def turn() -> None:
                    self._turn(database, watcher, progress, row.id, owner)
                    send()

                self.drive(self._driver_ended, database, ti, watcher, turn)
        except AirflowException:
            raise
        except Exception as error:
            # Before the driver's last lines, which say only that it was interrupted.
            permanent = is_permanent(error)
            way = NO_RETRY if permanent else "The next try continues"
            self.log.error("The task ends: %s. Everything committed stays. %s", message_of(error), way)
            if permanent:
                self.give_up(database, ti)
            raise
        finally:
            self._driver.kill()
            if not self._left_early:
                self._driver.settle(dsn, self.index, owner)
            self.note_cause(database, ti)
        with failing_clearly():
            code = self._driver.wait(0)
            if code == InvalidInput.exit_code:
                self.give_up(database, ti)
                raise AirflowFailException(self._ending())
            if code != DONE:
                asked = (OperationPaused.exit_code, OperationRunning.exit_code, OperationQueued.exit_code)
                asked_to = self._left_early or code in asked
                self.leave_or_fail(database, ti, self._ending(), asked_to, permanent=code == PERMANENT)
            now = self.read(database)
            if now.status == Status.RUNNING and now.phase not in self.done_phases:
                self.log.warning("The server has lost its last commits, by a failover or a restore; this run continues")
                self.leave_or_fail(database, ti, self._ending(), asked_to=True)

    def on_kill(self) -> None:
        """Notes the kill and asks the driver's process group to end."""
        super().on_kill()
        if self._driver is not None:
            self._driver.terminate()

    def _tell(self, line: str) -> None:
        said = line.removeprefix("roir: ")
        # A command's advice: in Airflow the task's own end says how to continue.
        self.log.info("%s", "Spark's driver was interrupted" if said.startswith(f"{INTERRUPTED}; ") else said)

    def _driver_ended(self, seconds: float) -> bool:
        assert self._driver is not None
        return self._driver.wait(seconds) is not None

    def _turn(self, database: Database, watcher: Watcher, progress: Progress, operation_id: int, owner: str) -> None:
        try:
            assert self._driver is not None
            asks = self._driver.is_starting or self.outage.is_on
            has_paused = asks and operations.has_paused(database, operation_id, owner)
            if asks:
                self.outage.back()
            if self._driver.is_starting and has_paused:
                # The driver would look at the pause only once Spark is up, which takes a minute on a busy machine.
                self._left_early = True
                self._driver.kill()
                operations.has_paused(database, operation_id, owner)
                return
            stored = watcher.found()
            # Once per look.
            if stored is not None and stored is not self._settled:
                with database.transaction() as connection:
                    row = operations.read_operation(connection, operation_id)
                if row.status in (Status.RUNNING, Status.PAUSED):
                    watcher.write(self._options.settle(stored, self._options_of(row), self._change))
                self._settled = stored
            progress.turn()
        except IllegalTransition:
            # Another user has ended the operation at this moment; the driver is about to report that.
            return
        except DBAPIError as error:
            # The next turn tries again; the driver has the same error, its own patience, and says so once Spark is up.
            if not is_transient(error):
                raise
            if self._driver is not None and self._driver.is_starting:
                self.outage.away(reason_of(error))

    def _ending(self) -> str:
        assert self._driver is not None
        return (
            f"Spark's driver ended with exit code {self._driver.wait(0)}: "
            f"{self._driver.last_line or 'it logged nothing'}"
        )


def log_folder_of(ti: RuntimeTaskInstanceProtocol) -> Path:
    """The folder beside the task's log, by Airflow's default template of names; another template doesn't move it."""
    names = (f"dag_id={ti.dag_id}", f"run_id={ti.run_id}", f"task_id={ti.task_id}")
    folder = Path(conf.get("logging", "base_log_folder"))
    return folder.joinpath(*(UNSAFE.sub("_", name) for name in names))
