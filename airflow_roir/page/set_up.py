"""Looks whether Airflow is ready for a build: its jobs, our DAGs, its connection. Only reads Airflow's database.

`roir doctor` runs it as a process of its own: `python -m airflow_roir.page.set_up`, which prints JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version

from airflow.exceptions import AirflowNotFoundException
from airflow.jobs.job import Job
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.errors import ParseImportError
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_roir.engine.forecast.set_up import OK, PROBLEM, WARNING, Finding
from airflow_roir.page.settings import CLEAN_UP_DAG, DEFAULT_CONNECTION, build_dag


def look(connection_id: str = DEFAULT_CONNECTION, with_errors: bool = True) -> list[Finding]:
    """The findings about Airflow. with_errors: name the files that can't be imported, with their errors."""
    found = [Finding("Airflow", OK, version("apache-airflow"))]
    with create_session() as session:
        for job, verdict in (("SchedulerJob", PROBLEM), ("DagProcessorJob", WARNING), ("TriggererJob", WARNING)):
            newest = session.scalars(
                select(Job).where(Job.job_type == job).order_by(Job.latest_heartbeat.desc()).limit(1)
            ).first()
            name = job.removesuffix("Job")
            if newest is not None and newest.is_alive():
                found.append(Finding(name, OK, "runs"))
            else:
                command = {"DagProcessorJob": "dag-processor"}.get(job, name.lower())
                found.append(Finding(name, verdict, "doesn't run", f"airflow {command}"))
        for dag_id in (build_dag(), CLEAN_UP_DAG):
            dag = session.get(DagModel, dag_id)
            if dag is None or dag.is_stale:
                found.append(Finding(dag_id, PROBLEM, "Airflow has no such DAG", 'roir dags --to "$AIRFLOW_HOME/dags"'))
            elif dag.is_paused:
                found.append(Finding(dag_id, WARNING, "the DAG is paused", f"airflow dags unpause {dag_id}"))
            else:
                found.append(Finding(dag_id, OK, "the DAG is there, and not paused"))
        for error in session.scalars(select(ParseImportError).order_by(ParseImportError.filename)):
            if "airflow_roir" in (error.stacktrace or ""):
                if not with_errors:
                    # Only users who may see import errors may see them.
                    found.append(Finding("DAG file", PROBLEM, "one can't be imported", "Airflow's page Dags shows it"))
                    break
                says = f"can't be imported: {(error.stacktrace or '').strip().splitlines()[-1]}"
                found.append(
                    Finding(str(error.filename), PROBLEM, says, "Repair the file, or copy it again: roir dags")
                )
    found.append(_connection(connection_id))
    return [replace(one, where="Airflow") for one in found]


def _connection(connection_id: str) -> Finding:
    try:
        kind = Connection.get_connection_from_secrets(connection_id).conn_type
    except AirflowNotFoundException:
        add = f"airflow connections add {connection_id} --conn-uri postgresql://…, or name another in the form"
        return Finding(connection_id, WARNING, "Airflow has no such connection", add)
    except Exception as error:
        # A secrets backend may raise anything.
        return Finding(
            connection_id, PROBLEM, f"can't be read ({type(error).__name__})", "See the secrets backend's log"
        )
    if kind != "postgres":
        return Finding(connection_id, PROBLEM, f"the connection's type is {kind}", "Make its type postgres")
    return Finding(connection_id, OK, "the connection is there")


if __name__ == "__main__":
    # Airflow's own output may go to standard output: the answer is its last line.
    sys.stdout.write("\n" + json.dumps([one.as_dict() for one in look()]) + "\n")
