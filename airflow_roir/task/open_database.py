"""The one place where operators get their database from an Airflow connection."""

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
    """The engine's handle of a connection; opens nothing by itself. application_name: what `pg_stat_activity` shows.
    by_author: no form can have named it.

    Raises AirflowFailException, since no retry can help, for a connection that `[roir] connections` doesn't allow, that
    isn't defined or can't serve a build. A server that is away is met later, and is waited for by the task's retries.
    So is the lack of the control schema, which fails at once too.
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
