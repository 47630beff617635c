"""The first task of a build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, lifecycle
from airflow_roir.engine.control import operations, requests, sign_of_life
from airflow_roir.engine.forecast import objections
from airflow_roir.engine.verify import record
from airflow_roir.errors import Complaints, IllegalTransition, InvalidInput, NotFound, OperationRunning
from airflow_roir.links.buttons import IndexBuildLink
from airflow_roir.operation import Kind
from airflow_roir.options import BuildOptions
from airflow_roir.task.dag_switch import LEAVE_S, is_dag_paused, leave, look_again_s
from airflow_roir.task.fates import await_turn, look_at_others
from airflow_roir.task.form_values import optional_text, yes_or_no
from airflow_roir.task.given import given_to, names_of, takes
from airflow_roir.task.open_database import open_database
from airflow_roir.task.roir_operator import RoirOperator, failing_clearly, owner_of
from airflow_roir.task.shard_connections import add_shards
from airflow_roir.task.spark_task import spark_of
from airflow_roir.task.waiting_operator import wait_log

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_roir.engine.database import Database

OPTIONS = names_of(BuildOptions)
UNIQUENESS = ("unique", "nulls_not_distinct")


class PrepareIndexBuildOperator(RoirOperator):
    """Validates the definition, plans the ranges and starts the capture (docs/architecture.md#phases).

    Returns the operation's id. If the index has an unfinished operation, that one is adopted, with what it has built.

    table, keys, include: source table, key columns in order and included columns, as SQL identifiers, the columns
        comma-separated or as a list; each may be an expression, `lower(email) AS address`. If all are empty, an
        existing index is rebuilt with its own definition.
    where: the condition of a partial index, an SQL expression over the table's columns.
    unique, nulls_not_distinct: see `IndexDefinition`. A rebuild keeps both.
    shards: for an index over tables on other servers: the names of shards, as a list or comma-separated. A shard may be
        named only in the extra `roir_shards` of the index server's connection. A rebuild keeps its shards.
        shard_column: see `IndexDefinition`.
    Also the options of `BuildOptions` and `WorkOptions`, by their names: numbers and booleans may be given as text,
        durations as `2h`, too; None or '' takes the default there.
    spark, replica_conn_ids: those of the task that builds. This task only checks them, so that a wrong one fails before
        anything is changed. It doesn't know whether the machine that will build has a Java, or reaches the cluster.

    All of them are templated. If an input can't be used, the task fails without a retry and changes nothing. It waits,
    rescheduled, while another run drives the index's operation, or while a verification of the index is unfinished;
    one that this very run has left unfinished (its task was marked) is aborted.
    """

    operator_extra_links = (IndexBuildLink(),)
    template_fields: Sequence[str] = (
        *RoirOperator.template_fields,
        "table",
        "keys",
        "include",
        "where",
        *UNIQUENESS,
        *OPTIONS,
        "shards",
        "shard_column",
        "spark",
    )

    @takes(OPTIONS)
    def __init__(
        self,
        *,
        table: str | None = None,
        keys: str | Sequence[str] | None = None,
        include: str | Sequence[str] | None = None,
        where: str | None = None,
        unique: bool | str | None = None,
        nulls_not_distinct: bool | str | None = None,
        shards: str | Sequence[str] | None = None,
        shard_column: str | None = None,
        spark: str | None = None,
        replica_conn_ids: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.keys = keys
        self.include = include
        self.where = where
        self.unique = unique
        self.nulls_not_distinct = nulls_not_distinct
        self.shards = shards
        self.shard_column = shard_column
        self.spark = spark
        self.replica_conn_ids = tuple(replica_conn_ids)

    def execute(self, context: Context) -> int:
        """Prepares, unless the DAG was paused between scheduling and now."""
        ti = context["ti"]
        waits = wait_log(context, self.log)
        if is_dag_paused(ti):
            why = f"DAG {ti.dag_id} is paused; nothing is prepared yet. Unpause the DAG to continue"
            raise leave(look_again_s(waits.waits(why, why), LEAVE_S))
        with failing_clearly():
            definition, options, database = self.checked(waits.is_on)
            if definition.shards:
                add_shards(database, self.postgres_conn_id, definition.shards)
            try:
                self._end_verification(database, owner_of(ti))
                prepared = lifecycle.prepare(database, definition, options, owner_of(ti), report=self.log.info)
            except OperationRunning as reason:
                waited = waits.waits(reason.by, f"Waiting: {reason}")
                look_at_others(database, self.index, ti, self.log)
                raise leave(look_again_s(waited)) from None
            waits.over()
            await_turn(database, prepared.operation_id, self, ti)
        self.log.info(
            "%s operation %s on index %s",
            "Adopted" if prepared.adopted else "Prepared",
            prepared.operation_id,
            prepared.index,
        )
        return prepared.operation_id

    def checked(self, told: bool = False) -> tuple[IndexDefinition, BuildOptions, Database]:
        """The definition, the options and the database, if the fields have no error of their own; changes nothing.

        Raises one InvalidInput for all that is against the build otherwise. told: as for `given_to`.
        """
        wrong = Complaints()
        definition, options = self.definition(wrong), self.options(wrong, told)
        with _noted(wrong):
            spark_of(self.spark)
        for conn_id in self.replica_conn_ids:
            with _noted(wrong):
                open_database(conn_id, "roir governor", by_author=True)
        with _noted(wrong):
            database = self.get_database(again=told)
            # Shards may have to be added first.
            objections.settle(wrong, database, [] if definition.shards else [definition], options)
        wrong.settle()
        return definition, options, database

    def refuse(self, told: bool = False) -> None:
        """Raises one InvalidInput for all that is against the build, as `execute` would; changes nothing."""
        definition, options, database = self.checked(told)
        # Shards may have to be added first.
        if not definition.shards:
            objections.refuse(database, definition, options)

    def _end_verification(self, database: Database, owner: str) -> None:
        """Aborts a verification before the build that this run's own task has left unfinished: the task was marked, so
        no try of it will continue."""
        why = "its task ended before it, and the run continues with the build"
        try:
            row = operations.find_operation(database, self.index)
            if row.kind != Kind.VERIFY or row.owner != owner or row.status not in operations.LIVE:
                return
            with database.transaction() as connection:
                mode = record.unfinished(connection, row.id).mode
                if mode != "before" or sign_of_life.heart_beats(row, connection):
                    return
            requests.request_abort(database, self.index, owner, why, row.id)
            abort.finish_abort(database, row.id, owner, self.log.info)
        except (NotFound, IllegalTransition):
            # It has ended at this moment.
            return
        self.log.warning("Verification %s of index %s is aborted: %s", row.id, self.index, why)

    def definition(self, wrong: Complaints | None = None) -> IndexDefinition:
        """The definition that the rendered fields give. wrong: gets what is wrong with them; None: raises it."""
        complaints = Complaints() if wrong is None else wrong
        unique = dict.fromkeys(UNIQUENESS, False)
        for name in UNIQUENESS:
            with complaints.noted():
                unique[name] = bool(yes_or_no(name, getattr(self, name)))
        found = IndexDefinition.parse(
            self.index,
            optional_text(self.table),
            _columns(self.keys),
            _columns(self.include),
            **unique,
            shards=_columns(self.shards),
            shard_column=optional_text(self.shard_column),
            where=optional_text(self.where),
            complaints=complaints,
        )
        if wrong is None:
            complaints.settle()
        return found

    def options(self, wrong: Complaints | None = None, told: bool = False) -> BuildOptions:
        """The options that the rendered fields give, defaults for empty ones. wrong: as for `definition`.

        told: as for `given_to`.
        """
        return given_to(self, BuildOptions, wrong, told)


@contextmanager
def _noted(wrong: Complaints) -> Iterator[None]:
    """As `wrong.noted`, also for an error that fails a task without a retry."""
    with wrong.noted():
        try:
            yield
        except AirflowFailException as error:
            raise InvalidInput(str(error)) from error


def _columns(value: str | Sequence[str] | None) -> str | Sequence[str] | None:
    return optional_text(value) if value is None or isinstance(value, str) else value
