"""Looks at all that a first build by a connection needs, as `roir doctor` does, for the page *Indexes*."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from airflow_roir.engine.forecast import set_up as of_database
from airflow_roir.engine.forecast.set_up import OK, UNKNOWN
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.errors import RoirError
from airflow_roir.page import databases
from airflow_roir.page import set_up as of_airflow
from airflow_roir.spark import machine

# It opens several sessions, and may wait for a server's time-outs.
PATIENCE_S = 30.0
NOTE = (
    "{machine} is the API server's. A build needs these on the machines that run tasks: if those are others, run "
    "roir doctor there"
)


def look(connection_id: str) -> dict[str, Any]:
    """The findings, for JSON; note: what they can't say. Raises no error of the database or of the connection."""
    try:
        database = databases.open_database(connection_id, "first build")
    except (databases.NoConnection, databases.NotPostgres):
        # Airflow's part says so.
        found = []
    except RoirError as error:
        found = [of_database.refused("session", error)]
    else:
        # Replicas that a task names have secrets, which are not here.
        told = partial(databases.trouble, connection_id)
        found = of_database.look(database, surroundings=Surroundings(), told=told)
    found += of_airflow.look(connection_id, with_errors=False)
    # Another machine may have what this one lacks.
    found += [one if one.verdict == OK else replace(one, verdict=UNKNOWN) for one in machine.look()]
    return {"found": [one.as_dict() for one in found], "note": NOTE.format(machine=machine.name().capitalize())}
