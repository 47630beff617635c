"""The command that only reads: status."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airflow_roir.cli.app import AsJson, app, database_of, print_json, say, show, status_table
from airflow_roir.errors import NotFound
from airflow_roir.operation import Status

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database
    from airflow_roir.engine.lock_waits import LockWait


@app.command()
def status(
    context: typer.Context,
    index: Annotated[str | None, typer.Argument(help="One index; by default all.")] = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until nothing runs.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Who did what to one index, when and why.")] = False,
) -> None:
    """Show the state of operations."""
    from airflow_roir.engine.status import status as read_status
    from airflow_roir.engine.status import waiting

    database = database_of(context)
    if history:
        if index is None:
            raise typer.BadParameter("--history needs the name of an index")
        print_history(database, index, as_json)
        return
    while True:
        waits = waiting(database, index)
        try:
            found = read_status(database, index)
        except NotFound:
            # An index that is prepared for the first time exists when it has its locks.
            if not waits:
                raise
            found = []
        if as_json:
            facts = {one.index: one.as_dict() for one in found}
            for wait in waits:
                if wait.index is not None:
                    facts.setdefault(wait.index, _not_begun(wait))
            for name, fact in facts.items():
                fact["waits"] = [wait.as_dict() for wait in waits if wait.index == name]
            print_json(next(iter(facts.values())) if index else list(facts.values()))
        else:
            if found or not waits:
                show(status_table(found))
            for wait in waits:
                say(str(wait))
            for one in found:
                if one.notice and one.status in (Status.RUNNING, Status.PAUSED):
                    say(f"index {one.index}: {one.notice}")
                for line in one.warnings:
                    say(f"warning: {line}")
                for name in one.partitions_gone:
                    say(
                        f"index {one.index}: partition {name} was dropped or detached without roir; "
                        "run roir sync-partitions on the table"
                    )
        if not watch or (not waits and all(one.status != Status.RUNNING for one in found)):
            return
        time.sleep(1.0)


def _not_begun(wait: LockWait) -> dict[str, Any]:
    """What JSON says of an index without an operation."""
    return {"index": wait.index, "operation_id": None, "status": "waiting", "phase": wait.command}


def print_history(database: Database, index: str, as_json: bool) -> None:
    from airflow_roir.engine import operations

    events = operations.events(database, index)
    if as_json:
        print_json(
            [
                {
                    "at": e.at.isoformat(),
                    "operation_id": e.operation_id,
                    "actor": e.actor,
                    "action": e.action,
                    "detail": e.detail,
                }
                for e in events
            ]
        )
        return
    for e in events:
        show(f"{e.at:%Y-%m-%d %H:%M:%S}  {e.action:20} {e.actor}  {e.detail or ''}")
