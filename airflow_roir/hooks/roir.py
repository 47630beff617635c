"""Makes the engine's `Database` of an ordinary Airflow Postgres connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret
from psycopg2 import ProgrammingError
from psycopg2.extensions import make_dsn

from airflow_roir.engine.database import SECRETS, Database
from airflow_roir.errors import InvalidInput

if TYPE_CHECKING:
    from airflow.sdk import Connection

# The extra that names the Airflow connections of an index server's shards, see `task.shard_connections`.
SHARDS_EXTRA = "roir_shards"
# Extras that configure Airflow's own Postgres hook; they mean nothing to libpq.
HOOK_EXTRAS = frozenset(
    {"cursor", "sqlalchemy_scheme", "sqlalchemy_query", "aws_conn_id", "azure_conn_id", "iam"}
    | {"redshift", "redshift-serverless", "cluster-identifier", "workgroup-name", SHARDS_EXTRA}
)


class RoirHook(BaseHook):
    """Gives the DSN and the `Database` of one Airflow connection of type `postgres`.

    postgres_conn_id: the connection's id. Its extras may be any libpq setting (`sslmode`, `sslrootcert`,
        `options`, `target_session_attrs`, `passfile` and so on); several hosts may be given as `a,b`.

    The password is never part of `repr`, and each secret made here is registered with Airflow's secrets masker, which
    hides it in the logs of tasks (from five characters on, Airflow's own limit).
    """

    conn_name_attr = "postgres_conn_id"
    default_conn_name = "postgres_default"
    conn_type = "postgres"
    hook_name = "PostgreSQL, for index builds"

    def __init__(self, postgres_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id

    def __repr__(self) -> str:
        return f"RoirHook(postgres_conn_id={self.postgres_conn_id!r})"

    def get_dsn(self) -> str:
        """The libpq connection string, every value quoted. A secret: hand it on in the environment only.

        Raises InvalidInput if the connection can't serve a build, AirflowNotFoundException if it isn't defined.
        """
        return dsn_of(self.get_connection(self.postgres_conn_id))

    def get_database(self, application_name: str = "roir airflow") -> Database:
        """The engine's handle. Opens no session yet.

        application_name: shown in `pg_stat_activity`.
        """
        return Database(self.get_dsn(), application_name=application_name)


def dsn_of(connection: Connection) -> str:
    """Builds the libpq connection string of an Airflow connection, and masks its secrets.

    Raises InvalidInput for a connection of another type, for extras that libpq doesn't know, and for tokens that expire
    during a build.
    """
    if connection.conn_type != RoirHook.conn_type:
        raise InvalidInput(
            f"connection {connection.conn_id!r} is of type {connection.conn_type!r}, and an index is built through one "
            "of type 'postgres'. Name another connection in the form, or change the type of this one"
        )
    extras = extras_of(connection)
    if extras.get("iam") or extras.get("azure_conn_id"):
        raise InvalidInput(
            f"connection {connection.conn_id!r} logs in with short-lived tokens, but workers open new connections "
            "for as long as a build lasts. Give it a password, a client certificate or a passfile"
        )
    settings: dict[str, Any] = {
        "host": connection.host,
        "port": connection.port,
        "user": connection.login,
        "password": connection.password,
        "dbname": connection.schema,
    }
    settings |= {name: value for name, value in extras.items() if name not in HOOK_EXTRAS}
    settings = {name: str(value) for name, value in settings.items() if value not in (None, "")}
    # First, so that not even the error below can show them.
    for name in SECRETS:
        if secret := settings.get(name):
            mask_secret(secret)
            mask_secret(secret.replace("\\", "\\\\").replace("'", "\\'"))
    unusable = sorted(name for name in settings if not _is_libpq_setting(name))
    if unusable:
        raise InvalidInput(
            f"connection {connection.conn_id!r} has extras that libpq doesn't know: {', '.join(unusable)}. "
            "Remove them, or correct their names"
        )
    dsn: str = make_dsn(**settings)
    mask_secret(dsn)
    return dsn


def extras_of(connection: Connection) -> dict[str, Any]:
    """The extras of an Airflow connection by their names. Raises InvalidInput if they are other JSON."""
    extras: Any = connection.extra_dejson
    if not isinstance(extras, dict):
        raise InvalidInput(f"connection {connection.conn_id!r}: its extra must be a JSON object of names and values")
    return extras


def _is_libpq_setting(name: str) -> bool:
    # psycopg2's own name for dbname, which the connection's field Database is.
    if name == "database":
        return False
    try:
        make_dsn(**{name: "1"})
    except ProgrammingError:
        return False
    return True
