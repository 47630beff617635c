"""Finds where a build's Spark runs: local mode, an Airflow connection, or an address that the deployment allows.

Spark gets the database's DSN and runs our code, so a user who triggers a run may not name any other Spark.

Works without `apache-airflow-providers-apache-spark`, which installs another version of PySpark's own folder.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from airflow_roir.errors import InvalidInput
from airflow_roir.hooks.allowed import allowed_masters
from airflow_roir.hooks.roir import extras_of
from airflow_roir.spark.options import SECRETS_GO, SparkOptions

if TYPE_CHECKING:
    from airflow.sdk import Connection

# Airflow's types of connections with a Spark's address, and the default scheme of each.
SCHEMES = {"spark": "spark", "spark_connect": "sc"}
PORTS = {"spark": 7077, "spark_connect": 15002}
# Nothing leaves the machine: Spark runs inside the driver.
_LOCAL = re.compile(r"local\[(\*|\d{1,4})(, *\d{1,4})?\]")
# A master's address: anything with a scheme, a local master, or YARN. All else is the id of a connection.
_MASTER = re.compile(r"^([a-z0-9]+://.+|local(\[.*\])?|local-cluster\[.*\]|yarn)$", re.DOTALL)
# The names in Airflow's form of a Spark connection, and those in Spark's configuration.
_FORM_FIELDS = {
    "queue": "spark.yarn.queue",
    "namespace": "spark.kubernetes.namespace",
    "principal": "spark.kerberos.principal",
    "keytab": "spark.kerberos.keytab",
}


def resolve_spark(where: str | None) -> SparkOptions:
    """Resolves the place where Spark runs: `local`, `local[4]`, the id of a connection, or an address in
    `[roir] spark_masters`.

    where: None or '' is Spark inside the driver. Raises InvalidInput, also for an address that isn't allowed, and
    AirflowNotFoundException for a connection that isn't defined.
    """
    where = (where or "").strip()
    if not where or where == "local":
        return SparkOptions()
    if _LOCAL.fullmatch(where) or where in allowed_masters():
        return SparkOptions(master=where)
    if _MASTER.match(where):
        raise InvalidInput(
            f"spark is {where!r}, an address that isn't allowed: Spark gets the database's DSN. Put it into an "
            "Airflow connection of type spark and give that one's id, or add it to [roir] spark_masters in Airflow's "
            "configuration"
        )
    return target_of(BaseHook.get_connection(where))


def target_of(connection: Connection) -> SparkOptions:
    """Reads the Spark master and settings of an Airflow connection.

    Host and port are the master; extras are Spark settings by their own names (`spark.…`), a dict of them under
    `conf`, or the fields of Airflow's Spark form (queue, namespace, principal, keytab).

    Raises InvalidInput for a connection of another type, for `deploy-mode: cluster`, since the driver must run where
    its log can be read, and for secrets, which would be seen in the process list and in Spark's UI.
    """
    if connection.conn_type not in SCHEMES:
        raise InvalidInput(
            f"connection {connection.conn_id!r} is of type {connection.conn_type!r}, and Spark's address is in one of "
            "type 'spark' or 'spark_connect'. Name another connection, or change the type of this one"
        )
    extras = extras_of(connection)
    if extras.get("deploy-mode", extras.get("deploy_mode", "client")) != "client":
        raise InvalidInput(
            f"Spark connection {connection.conn_id!r} asks for deploy mode 'cluster', but a build's driver "
            "runs beside its Airflow task. Remove that extra"
        )
    target = SparkOptions(master=_master_of(connection), conf=_conf_of(connection.conn_id, extras))
    secrets = target.secrets()
    if connection.conn_type == "spark_connect" and connection.password:
        secrets.append("password")
    if secrets:
        raise InvalidInput(
            f"Spark connection {connection.conn_id!r}: {', '.join(map(repr, secrets))} looks like a secret, but the "
            f"process list shows Spark's address and settings. {SECRETS_GO}"
        )
    return target


def _master_of(connection: Connection) -> str | None:
    host = (connection.host or "").strip()
    if not host or host == "local":
        return None
    if connection.port:
        host = f"{host}:{connection.port}"
    if _MASTER.match(host):
        return host
    # `spark://host:7077` as a connection URI loses its scheme to the connection's type.
    port = "" if connection.port else f":{PORTS[connection.conn_type]}"
    return f"{SCHEMES[connection.conn_type]}://{host}{port}"


def _conf_of(conn_id: str, extras: dict[str, Any]) -> dict[str, str]:
    given = extras.get("conf") or {}
    if not isinstance(given, dict):
        raise InvalidInput(f"Spark connection {conn_id!r}: the extra 'conf' must be an object of settings")
    settings = {name: value for name, value in extras.items() if name.startswith("spark.")}
    settings |= {_FORM_FIELDS[name]: value for name, value in extras.items() if name in _FORM_FIELDS and value}
    settings |= given
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}
