"""A look at an index, like that of status, beside a command: it shows the state before or after, and nothing else.

A statement sees rows by its snapshot, but names, definitions and privileges as they are by now. In a transaction of one
snapshot that moment lasts as long as the command.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, has_vanished
from airflow_roir.engine.health import faults
from tests.engine import operators
from tests.engine.meeting import WAITS, Meeting
from tests.engine.operators import COMMANDS
from tests.engine.steps import sql
from tests.engine.test_two_operators import scenes
from tests.engine.test_two_operators import templates as templates

pytestmark = pytest.mark.sample(3)


def told(connection: Connection) -> set[str]:
    """The warnings of status. There are none if an object that the snapshot has is gone."""
    try:
        with connection.begin_nested():
            return set(faults.warnings(connection))
    except DBAPIError as error:
        if not has_vanished(error):
            raise
        return set()


CASES = [(scene, command) for command in COMMANDS for scene in scenes(command)]


@pytest.mark.sample(0)
@pytest.mark.parametrize(("scene", "command"), CASES, ids=["-".join(case) for case in CASES])
def test_a_look_beside_a_command_tells_nothing_else(
    server: str, templates: dict[str, str], scene: str, command: str
) -> None:
    """Seen to fail if a segment's name, or a trigger's function, is looked up beside rows of the snapshot."""
    with operators.cloned(server, templates[scene]) as dsn:
        looker = Database(dsn, "looker")
        looks: list[Connection] = []

        def look(*_: Any) -> None:
            looks.append(looker.engine.connect().execution_options(isolation_level="REPEATABLE READ"))
            looks[-1].exec_driver_sql("SELECT 1")

        meeting = Meeting(dsn, command, command)
        with looker.transaction() as connection:
            known = told(connection)
        event.listen(meeting.database.engine, "commit", look)
        meeting.run_alone()
        with looker.transaction() as connection:
            known |= told(connection)
        wrong = {line for one in looks for line in told(one)} - known
        for one in looks:
            one.close()
        meeting.close()
        looker.engine.dispose()
    assert looks
    assert wrong == set()


@pytest.mark.sample(0)
def test_a_look_that_a_drop_overtakes_looks_again(server: str, templates: dict[str, str]) -> None:
    """The look waits for the view's definition until the drop has committed. The server then has no such relation."""
    with operators.cloned(server, templates["left"]) as dsn:
        meeting = Meeting(dsn, "drop", "drop")
        looker = Database(dsn, "second")
        found: list[object] = []

        def look() -> None:
            try:
                with looker.transaction() as connection:
                    found.append(faults.warnings(connection))
            except Exception as error:
                found.append(error)

        looking: list[threading.Thread] = []

        def gap(*_: Any) -> None:
            looking.append(threading.Thread(target=look))
            looking[-1].start()
            while looking[-1].is_alive() and not sql(meeting.watch, WAITS, "second")[0][0]:
                pass

        event.listen(meeting.database.engine, "commit", gap)
        meeting.run_alone()
        for one in looking:
            one.join()
        meeting.close()
        looker.engine.dispose()
    assert len(found) == len(looking)
    assert [one for one in found if one != []] == []
