"""The base of our tasks: an index, a connection, and errors that say whether a retry can help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_roir.engine.retry.trouble import is_permanent
from airflow_roir.errors import RoirError
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.one_line import one_line
from airflow_roir.options import LIVE, LIVE_OPTIONS
from airflow_roir.task.failure import message_of
from airflow_roir.task.form_values import optional_text
from airflow_roir.task.given import takes, value_of
from airflow_roir.task.open_database import open_database
from airflow_roir.task.shard_connections import keep_connections

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from airflow_roir.engine.database import Database

NO_RETRY = "A retry can't help: remove the cause, then clear the task"


class RoirOperator(BaseOperator):
    """Base of the operators that work on one index.

    index: the index's name as `psql` reads it, quoted or not (templated).
    postgres_conn_id: the Airflow connection of its database (templated).
    """

    template_fields: Sequence[str] = ("index", "postgres_conn_id")
    ui_color = "#dcebfa"

    def __init__(self, *, index: str, postgres_conn_id: str = RoirHook.default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.index = index
        self.postgres_conn_id = postgres_conn_id

    def get_database(self, again: bool = False) -> Database:
        """The engine's handle of the task's connection; `pg_stat_activity` shows the task's name.

        The first line of the task's log names the index: otherwise runs look alike. again: the task waits, and its log
        has that line.
        """
        operation = optional_text(getattr(self, "operation_id", None))
        if not again:
            self.log.info(
                "Index %s, %sconnection %s",
                one_line(str(self.index)),
                f"operation {one_line(operation)}, " if operation else "",
                one_line(str(self.postgres_conn_id)),
            )
        database = open_database(self.postgres_conn_id, f"roir airflow {self.task_id}")
        keep_connections(database, self.postgres_conn_id, self.log.warning)
        return database


def owner_of(ti: RuntimeTaskInstanceProtocol) -> str:
    """The name under which a DAG run drives an operation. It is the same for every try and every task of the run, so
    that a retry at once takes over from a try that was killed. In a mapped group each index has a name of its own:
    otherwise the two tasks of an index that is given twice would take over from each other all the time."""
    mapped = "" if ti.map_index is None or ti.map_index < 0 else f" [{ti.map_index}]"
    return f"airflow {ti.dag_id} {ti.run_id}{mapped}"


@contextmanager
def failing_clearly() -> Iterator[None]:
    """Fails the task without a retry if none can help (`is_permanent`); any other error counts as a try."""
    try:
        yield
    except Exception as error:
        if not is_permanent(error):
            raise
        way = "" if isinstance(error, RoirError) else f". {NO_RETRY}"
        raise AirflowFailException(f"{message_of(error)}{way}") from error


class OptionsOperator(RoirOperator):
    """Base of the operators with options that can change while an operation lives: None or '' keeps the operation's
    own."""

    template_fields: Sequence[str] = (*RoirOperator.template_fields, *LIVE_OPTIONS)

    @takes(LIVE_OPTIONS)
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def given_options(self) -> dict[str, Any]:
        """The options as numbers and texts. Raises InvalidInput."""
        return {name: value_of(option, getattr(self, name)) for name, option in LIVE.items()}
