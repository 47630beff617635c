"""Actors by their names in `owner`, `paused_by` and events: users, commands, DAG runs, switches, the pages."""

from __future__ import annotations

import re
from enum import Enum

from airflow_roir.operation import BY_DUPLICATES, BY_GOVERNOR, BY_MAX_DURATION, BY_WINDOW

# A DAG's switch; a user of the pages. The ids of DAGs have no space.
SWITCH = "airflow switch of DAG "
PAGE = "airflow user "
# A DAG run: its DAG, its id, and the map index of its task.
RUN = re.compile(rf"airflow (?!{PAGE[8:]}|{SWITCH[8:]})([\w.-]+) (.+?)(?: \[(\d+)\])?")
# The user of a command, `ann@desk`; a command that drives an operation adds its process.
COMMAND = re.compile(r".+@.+")


class Way(str, Enum):
    """The way by which an operation was paused. RUN: its own DAG run met an error, a mark or a timeout."""

    DUPLICATES = BY_DUPLICATES
    WINDOW = BY_WINDOW
    MAX_DURATION = BY_MAX_DURATION
    GOVERNOR = BY_GOVERNOR
    SWITCH = "switch"
    PAGE = "page"
    TASK = "task"
    RUN = "run"
    COMMAND = "command"
    SQL = "sql"


def way_of(paused_by: str, owner: str | None) -> Way:
    """The way of a pause. owner: of the operation."""
    if paused_by in (BY_DUPLICATES, BY_WINDOW, BY_MAX_DURATION, BY_GOVERNOR):
        return Way(paused_by)
    if paused_by.startswith(SWITCH):
        return Way.SWITCH
    if paused_by.startswith(PAGE):
        return Way.PAGE
    if RUN.fullmatch(paused_by):
        return Way.RUN if paused_by == owner else Way.TASK
    return Way.COMMAND if COMMAND.fullmatch(paused_by) else Way.SQL
