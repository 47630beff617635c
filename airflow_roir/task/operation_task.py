"""The part that build, finalize and verify share: they take turns, obey the switch and leave without using a try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, AirflowTaskTimeout
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, parse_name
from airflow_roir.engine.control import admission, expected, operations, requests, sign_of_life
from airflow_roir.engine.control.expected import SWITCHED_OFF
from airflow_roir.engine.database import is_transient
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.errors import IllegalTransition, NotFound
from airflow_roir.links.buttons import IndexBuildLink, show_link
from airflow_roir.operation import BUILDS, BY_WINDOW, Kind, Phase, Status
from airflow_roir.task.dag_switch import LEAVE_S, LOOK_AGAIN_S, actor_of_switch, is_dag_paused, leave
from airflow_roir.task.fates import START_S, Cause, expect, is_last_try, leaves
from airflow_roir.task.form_values import whole_number
from airflow_roir.task.next_step import Done, Fail, Go, Wait, decide, was_aborted
from airflow_roir.task.open_database import open_database
from airflow_roir.task.roir_operator import NO_RETRY, owner_of
from airflow_roir.task.ui_requests import Watcher
from airflow_roir.task.wait_for_job import Background, Interrupted, follow
from airflow_roir.task.waiting_operator import WaitingOperator
from airflow_roir.task.wrong_rows import push_duplicates, waits_for_healing

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from airflow_roir.engine.control.operations import OperationRow
    from airflow_roir.engine.database import Database

# A task that waits for a window looks again after this time at the latest, since the windows may change.
WINDOW_S = 300
# The seconds that a task which Airflow ends may take to write whether it comes back.
SAID_S = 0.5
# The reasons for which Airflow ends a task, if it isn't known in time which one it is.
ENDS = "a shutdown, a mark, a clear, or the end of its time"


class DrivingOperator(WaitingOperator):
    """Base of the operators that drive an operation through some of its phases.

    operation_id: the id that the prepare task returned (templated). The task drives this operation and no other. If it
        is given and renders to nothing, since the XCom is gone, the task drives the unfinished operation that its own
        DAG run has begun or adopted, or fails. If it isn't given at all, the task drives the index's unfinished build.
    throttle_query: the SQL of the throttle's signal `query`, which the operation's database runs as the role that
        builds. Not templated: it is code, and comes from the DAG's author alone.
    replica_conn_ids: Airflow connections to replicas that aren't the database's own; the names of the throttle's
        `replicas` are their ids. Not templated, either.
    """

    template_fields: Sequence[str] = (*WaitingOperator.template_fields, "operation_id")
    operator_extra_links: Any = (IndexBuildLink(),)
    done_phases: frozenset[Phase] = frozenset()
    # The operations that this task may drive.
    kinds: tuple[Kind, ...] = BUILDS

    def __init__(
        self,
        *,
        operation_id: int | str | None = None,
        throttle_query: str | None = None,
        replica_conn_ids: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.operation_id = operation_id
        self._is_told = operation_id is not None
        self.throttle_query = throttle_query
        self.replica_conn_ids = tuple(replica_conn_ids)
        self._killed = False
        # Why Airflow ends the task, as far as that is known.
        self._cause: str | None = None

    def pre_execute(self, context: Any) -> None:
        """Shows the link to the page now: Airflow would do it at the end, but the page is for the time before."""
        super().pre_execute(context)
        self._context = context
        show_link(self, context["ti"])

    def surroundings(self) -> Surroundings:
        """The settings that the throttle needs besides its limits: the DAG's; where it has none, the environment's.

        Raises InvalidInput, and AirflowFailException for a connection that doesn't exist or can't be used.
        """
        found = Surroundings.of_environment()
        replicas = {name: open_database(name, "roir governor", by_author=True).dsn for name in self.replica_conn_ids}
        return Surroundings({**found.replicas, **replicas}, self.throttle_query or found.query)

    def on_kill(self) -> None:
        """Only notes the kill: this runs as a signal handler on the main thread, and `execute` goes on afterwards."""
        self._killed = True

    def settle_operation(self, database: Database, ti: RuntimeTaskInstanceProtocol) -> None:
        """Finds out which operation this task drives, and keeps its id in `operation_id`.

        Raises AirflowFailException if no operation is this run's, if the operation is of another kind, and if it was
        completed without this DAG run: a task that has done nothing must not succeed.
        """
        owner = owner_of(ti)
        begun = whole_number("operation_id", self.operation_id)
        if begun is None:
            begun = self.operation_id = self._find(database, owner)
        row = self.read(database)
        has_ended = row.status == Status.COMPLETED or operations.has_outcome(row)
        if has_ended and not has_part(database, row, owner):
            raise AirflowFailException(
                f"index {self.index}: operation {begun} was completed by {row.owner}, and this run ({owner}) had no "
                "part in it, so it has built nothing. Clear its first task, and it begins an operation of its own"
            )

    def _find(self, database: Database, owner: str) -> int:
        """The operation of a task without an id. If the task should have got one, an ended operation doesn't count."""
        try:
            newest = operations.find_operation(database, self.index)
        except NotFound:
            newest = None
        if newest is not None and newest.kind in self.kinds:
            is_own, is_live = has_part(database, newest, owner), newest.status in operations.LIVE
            fits = (is_own and is_live) if self._is_told else (is_own or is_live)
            if fits:
                return int(newest.id)
        if self._is_told:
            raise AirflowFailException(
                f"index {self.index}: the operation's id is missing. The XCom of the prepare task is gone, or isn't "
                "there yet: it was deleted, or a task was marked as success before prepare ended. This run "
                f"({owner}) has no unfinished build of the index. Clear the prepare task with those that follow it "
                "(Downstream): it adopts the index's unfinished build, or begins one"
            )
        raise AirflowFailException(f"index {self.index} has no unfinished build. Prepare one first")

    def read(self, database: Database) -> OperationRow:
        """The operation as it is now. Raises AirflowFailException if it ended unfinished and another one has begun."""
        begun = whole_number("operation_id", self.operation_id)
        assert begun is not None, "settle_operation comes before"
        with database.transaction() as connection:
            check_schema(connection)
            row = operations.operation_of(connection, begun, parse_name(self.index, "index"))
        if row is None:
            raise AirflowFailException(
                f"index {self.index} has no operation {begun} any more: the server has lost its last commits, by a "
                "failover to a replica or a restore. Clear this run from its first task on, and it begins again"
            )
        if row.kind not in self.kinds:
            raise AirflowFailException(
                f"index {self.index}: operation {begun} is a {Kind(row.kind).noun}, and this task drives only "
                f"{' or '.join(kind.noun for kind in self.kinds)}. Give it the id that its prepare task returned"
            )
        try:
            newest = operations.find_operation(database, self.index)
        except NotFound:
            # The abort of a create operation removes the index, too.
            if operations.has_outcome(row):
                return row
            if aborted := self.aborted(database, row):
                raise AirflowFailException(was_aborted(row.id, aborted)) from None
            raise
        if newest.id == begun or (row.status == Status.COMPLETED and row.index_id == newest.index_id):
            return row
        if operations.has_outcome(row):
            return row
        aborted = self.aborted(database, row)
        raise AirflowFailException(
            f"operation {begun} of index {self.index} has ended{f' (aborted by {aborted})' if aborted else ''}, and "
            f"operation {newest.id} has begun since; this run has nothing more to do"
        )

    def take_turn(self, database: Database, ti: RuntimeTaskInstanceProtocol) -> OperationRow | None:
        """The operation, if this task is to drive it; None if the task's work is done already.

        Raises AirflowRescheduleException to wait, AirflowFailException if waiting can't help.
        """
        dag_paused = bool(is_dag_paused(ti))
        row = self.read(database)
        with database.transaction() as connection:
            driven = sign_of_life.heart_beats(row, connection) and row.owner != owner_of(ti)
        driver = row.owner if driven else None
        if operations.has_outcome(row):
            self.end_wait()
            self.log.info("Operation %s, a census, has ended", row.id)
            return None
        aborted = self.aborted(database, row)
        match decide(row, self.done_phases, actor_of_switch(ti.dag_id), dag_paused, driver, aborted, window_opens=True):
            case Done():
                self.end_wait()
                self.log.info("Operation %s has finished this task already: it is in phase %s", row.id, row.phase)
                turn = None
            case Fail(why):
                raise AirflowFailException(why)
            case Wait(why, by_switch):
                if by_switch and row.status == Status.RUNNING:
                    # No run drives it: let the status say so, and stop the operation's clock.
                    self.request_pause(database, ti)
                if waits_for_healing(row):
                    push_duplicates(database, ti, row)
                self.wait_for(database, why, LEAVE_S if by_switch else LOOK_AGAIN_S)
            case Go():
                self._await_admission(database, row)
                self.end_wait()
                expect(database, row.id, self, ti, START_S, is_last_try(ti))
                turn = self.read(database)
        return turn

    def _await_admission(self, database: Database, row: OperationRow) -> None:
        """Waits, rescheduled, for the operation's window or for its place in the queue."""
        wait = admission.ask(database, row.id)
        if wait is None:
            return
        again = WINDOW_S if wait.by == BY_WINDOW else LOOK_AGAIN_S
        seconds = int(min(again, again if wait.seconds is None else wait.seconds + 1))
        # A task that asks seldom would lose its place, which its reason names.
        self.wait_for(database, wait.why, most=seconds, by="queue" if wait.is_queued else None)

    def request_pause(self, database: Database, ti: RuntimeTaskInstanceProtocol) -> None:
        """Writes the pause that the DAG's switch means; workers leave at the end of their batch."""
        actor = actor_of_switch(ti.dag_id)
        try:
            operation = whole_number("operation_id", self.operation_id)
            row = requests.pause(database, self.index, actor, SWITCHED_OFF, operation)
        except IllegalTransition:
            # The operation has ended at this moment.
            return
        except DBAPIError as error:
            # The next turn of the loop tries again; the operation's driver has the same error.
            if not is_transient(error):
                raise
            self.outage.away(reason_of(error))
            return
        self.outage.back()
        self.log.debug("Operation %s is %s", row.id, row.status)

    def drive(
        self,
        wait: Callable[[float], bool],
        database: Database,
        ti: RuntimeTaskInstanceProtocol,
        watcher: Watcher,
        turn: Callable[[], object] = lambda: None,
    ) -> None:
        """Follows a job to its end; see `follow`. A task that Airflow ends leaves, which costs no try."""
        try:
            follow(
                wait,
                watcher,
                is_killed=lambda: self._killed,
                request_pause=lambda: self.request_pause(database, ti),
                turn=turn,
            )
        except AirflowTaskTimeout:
            self._cause = f"its task {ti.task_id} has reached its execution_timeout"
            if is_last_try(ti):
                self.give_up(database, ti)
            raise
        except Interrupted:
            if not self._killed:
                raise
            cause = self._say_whether_it_returns(database, ti)
            way = f"clear it with those that follow it (Downstream), or: roir resume {argument(self.index)}"
            if cause is None:
                why, on = ENDS, f"this task looks again in {LEAVE_S} s, and continues; if it was marked, {way}"
            else:
                why, on = cause.text, "its next try continues" if cause.comes_back else f"to continue, {way}"
            self.log.info("Airflow has ended this task (%s). Everything committed stays; %s", why, on)
            if cause is not None and not cause.comes_back:
                # Airflow's server has the task's end already, and refuses any other: this one logs no error.
                raise AirflowSkipException(cause.text) from None
            # If the task was marked all the same, Airflow's server refuses this, and the user's choice stays.
            raise leave(LEAVE_S) from None

    def _say_whether_it_returns(self, database: Database, ti: RuntimeTaskInstanceProtocol) -> Cause | None:
        """Writes that this run looks again, or that it has ended; soon, since Airflow sends SIGKILL next.

        Returns why Airflow ends the task, if that is known in time."""
        said = Background(lambda: leaves(database, self._known(), self, ti, LEAVE_S))
        cause = said.result() if said.wait(SAID_S) else None
        self._cause = None if cause is None else cause.text
        return cause

    def _known(self) -> int:
        operation = whole_number("operation_id", self.operation_id)
        assert operation is not None, "settle_operation comes before"
        return operation

    def give_up(self, database: Database, ti: RuntimeTaskInstanceProtocol) -> None:
        """Writes that no further try will drive the operation."""
        with suppress(DBAPIError):
            expected.has_ended(database, self._known(), owner_of(ti))

    def note_cause(self, database: Database, ti: RuntimeTaskInstanceProtocol) -> None:
        """Writes why the run has paused its operation, once it has: a mark, a timeout. Airflow sends SIGKILL soon."""
        cause = self._cause
        if cause is not None:
            Background(lambda: expected.note_cause(database, self._known(), owner_of(ti), cause)).wait(SAID_S)

    def leave_or_fail(
        self,
        database: Database,
        ti: RuntimeTaskInstanceProtocol,
        failure: str,
        asked_to: bool,
        permanent: bool = False,
    ) -> NoReturn:
        """Ends a stretch whose job ended before its work was done.

        failure: the message if the job failed; raised as AirflowException, so that the next try continues.
        permanent: every other try would fail in the same way, so that it is raised as AirflowFailException.
        asked_to: the job ended because the operation was paused, or because another run drives it.
        """
        row = self.read(database)
        switch = actor_of_switch(ti.dag_id)
        if row.status == Status.PAUSED and row.paused_by == switch:
            self.wait_for(database, f"paused by {switch}: unpause to resume", LEAVE_S)
        if row.status == Status.PAUSED and row.paused_by == row.owner:
            failure = row.pause_reason or failure
        other = row.owner if asked_to and row.status == Status.RUNNING and row.owner != owner_of(ti) else None
        match decide(row, frozenset(), switch, dag_paused=False, driver=other, aborted=self.aborted(database, row)):
            case Fail(why):
                raise AirflowFailException(why)
            case Wait(why):
                if waits_for_healing(row):
                    push_duplicates(database, ti, row)
                self.wait_for(database, why)
            case Go() | Done() if asked_to:
                # The reason is gone again, or the heartbeat is of a try that was killed moments ago.
                self.wait_for(database, "trying again shortly", most=LOOK_AGAIN_S)
        if permanent or is_last_try(ti):
            self.give_up(database, ti)
        said = f"operation {row.id} on index {self.index}, phase {row.phase}: {failure}"
        if permanent:
            raise AirflowFailException(f"{said}. {NO_RETRY}")
        raise AirflowException(said)


def has_part(database: Database, row: OperationRow, owner: str) -> bool:
    """True if a DAG run has begun, adopted or driven an operation. owner: its name, see `owner_of`."""
    if owner in (row.created_by, row.owner):
        return True
    with database.transaction() as connection:
        return operations.is_actor(connection, row.id, owner)
