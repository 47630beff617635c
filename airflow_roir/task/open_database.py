"""Opens the database of an Airflow connection, for all operators."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException

from airflow_roir.errors import InvalidInput
from airflow_roir.hooks.allowed import allowed_connections
from airflow_roir.hooks.roir import RoirHook

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database


def open_database(postgres_conn_id: str, application_name: str, by_author: bool = False) -> Database:
    """The engine's handle of a connection; opens no session yet. application_name: shown in `pg_stat_activity`.
    by_author: the DAG's author has named it, so a form can't have.

    Raises AirflowFailException, since no retry can help, for a connection that `[roir] connections` doesn't allow, that
    isn't defined or can't serve a build. Later steps find a server that is away, for which the task's retries wait, and
    a missing control schema, which fails at once, too.
    """
    if not isinstance(postgres_conn_id, str) or not postgres_conn_id.strip():
        raise AirflowFailException(
            f"the database is {postgres_conn_id!r}; give the id of an Airflow connection (postgres_conn_id)"
        )
    allowed = allowed_connections()
    if allowed and not by_author and postgres_conn_id not in allowed:
        raise AirflowFailException(
            f"connection {postgres_conn_id!r} isn't among those of [roir] connections in Airflow's configuration"
        )
    try:
        return RoirHook(postgres_conn_id).get_database(application_name)
    except AirflowNotFoundException:
        raise AirflowFailException(
            f"there is no Airflow connection {postgres_conn_id!r}. Add it (Admin, Connections; or: airflow connections "
            f"add {shlex.quote(postgres_conn_id)} --conn-type postgres --conn-host … --conn-login … --conn-password … "
            "--conn-schema DATABASE), or name another one in the form"
        ) from None
    except InvalidInput as error:
        raise AirflowFailException(str(error)) from error
