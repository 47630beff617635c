"""The last line of a command that a signal ends: the state of the operation that it drove, and how that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_roir.cli.app import say
from airflow_roir.definition import argument

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database


# The exit code of a command that Ctrl-C ended, as shells have it.
INTERRUPTED = 130
# The commands that begin an operation.
BEGINNING = ("build", "verify", "compact", "reference")
_begins = False


def begins() -> None:
    """Note that from now on this process's command may have begun an operation."""
    global _begins
    _begins = True


def of_interrupt(arguments: Sequence[str]) -> str:
    """The last line of a command with these arguments that Ctrl-C ended; '' for one that begins no operation."""
    if not any(one in BEGINNING for one in arguments):
        return ""
    if _begins:
        return "interrupted; roir status shows whether an operation was begun"
    return "interrupted; nothing was begun"


@dataclass
class LastLine:
    """The operation that a command drives. operation_id: None until it drives one."""

    database: Database | None = None
    index: str = ""
    operation_id: int | None = None
    is_said: bool = False

    def drives(self, database: Database, index: str, operation_id: int) -> None:
        """Note the operation."""
        self.database, self.index, self.operation_id = database, index, operation_id

    def say(self) -> bool:
        """Say the state, as this moment's committed rows have it. True if the operation is seen to be paused."""
        from sqlalchemy.exc import SQLAlchemyError

        from airflow_roir.engine.snapshot.operation import operation_soon
        from airflow_roir.engine.snapshot.words import paused_by, state_of, way_on
        from airflow_roir.errors import RoirError
        from airflow_roir.operation import Status

        if self.database is None or self.operation_id is None:
            return False
        try:
            now = operation_soon(self.database, self.operation_id)
        except (SQLAlchemyError, RoirError):
            self.say_unread()
            return False
        if now.status == Status.PAUSED:
            self._say(now.index, f"{paused_by(now)}; {way_on(now)}", known=True)
        elif now.status == Status.RUNNING:
            self._say(now.index, _continued(now.index), known=True)
        else:
            self._say(now.index, str(state_of(now)), known=True)
        return bool(now.status == Status.PAUSED)

    def say_unread(self) -> None:
        """Say how to go on, without the state."""
        if self.operation_id is not None and not self.is_said:
            self._say(self.index, _continued(self.index), known=False)

    def _say(self, index: str, text: str, known: bool) -> None:
        self.is_said = True
        operation = f", operation {self.operation_id}" if known else ""
        say(f"ended by a signal. Index {index}{operation}: {text}")


def _continued(index: str) -> str:
    return f"nothing that was committed is lost; continue with: roir resume {argument(index)}"
