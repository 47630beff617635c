"""Where a build's Spark application runs: a master's address, or an Airflow connection that holds one.

Works without `apache-airflow-providers-apache-spark`, which installs another version of PySpark's own folder.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from airflow_roir.errors import InvalidInput
from airflow_roir.spark.options import SparkOptions

if TYPE_CHECKING:
    from airflow.sdk import Connection

# What a master's address looks like: anything with a scheme, a local master, or YARN. All else is an id.
_MASTER = re.compile(r"^([a-z0-9]+://.+|local(\[.*\])?|local-cluster\[.*\]|yarn)$", re.DOTALL)
# Spark's own default of `spark.redaction.regex`, plus its spelling with a dot.
_SECRET_NAME = re.compile(r"secret|password|passphrase|token|access[.]?key|credential", re.IGNORECASE)
# The names that Airflow's Spark connection form uses, and what they are called in Spark's configuration.
_FORM_FIELDS = {
    "queue": "spark.yarn.queue",
    "namespace": "spark.kubernetes.namespace",
    "principal": "spark.kerberos.principal",
    "keytab": "spark.kerberos.keytab",
}


def resolve_spark(where: str | None) -> SparkOptions:
    """Tell a master's address (`local[4]`, `spark://host:7077`, `k8s://…`, `yarn`) from a connection's id.

    where: either of them; None or '' is Spark inside the driver. Raises InvalidInput, and
    AirflowNotFoundException for a connection that isn't defined.
    """
    where = (where or "").strip()
    if not where or where == "local":
        return SparkOptions()
    if _MASTER.match(where):
        return SparkOptions(master=where)
    return target_of(BaseHook.get_connection(where))


def target_of(connection: Connection) -> SparkOptions:
    """Read the Spark master and settings of an Airflow connection.

    Host and port are the master; extras are Spark settings by their own names (`spark.…`), a dict of them under
    `conf`, or the fields of Airflow's Spark form (queue, namespace, principal, keytab).

    Raises InvalidInput for `deploy-mode: cluster`, since the driver must run where its log can be read, and for
    secrets, which would be seen in the process list and in Spark's UI.
    """
    extras = connection.extra_dejson
    if extras.get("deploy-mode", extras.get("deploy_mode", "client")) != "client":
        raise InvalidInput(
            f"Spark connection {connection.conn_id!r} asks for deploy mode 'cluster', but a build's driver "
            "runs beside its Airflow task. Remove that extra"
        )
    return SparkOptions(master=_master_of(connection), conf=_conf_of(connection.conn_id, extras))


def _master_of(connection: Connection) -> str | None:
    host = (connection.host or "").strip()
    if not host or host == "local":
        return None
    if connection.port:
        host = f"{host}:{connection.port}"
    if _MASTER.match(host):
        return host
    # `spark://host:7077` as a connection URI loses its scheme to the connection's type.
    return f"spark://{host if connection.port else host + ':7077'}"


def _conf_of(conn_id: str, extras: dict[str, Any]) -> dict[str, str]:
    given = extras.get("conf") or {}
    if not isinstance(given, dict):
        raise InvalidInput(f"Spark connection {conn_id!r}: the extra 'conf' must be an object of settings")
    settings = {name: value for name, value in extras.items() if name.startswith("spark.")}
    settings |= {_FORM_FIELDS[name]: value for name, value in extras.items() if name in _FORM_FIELDS and value}
    settings |= given
    conf: dict[str, str] = {}
    for name, value in settings.items():
        if _SECRET_NAME.search(name):
            raise InvalidInput(
                f"Spark connection {conn_id!r}: setting {name!r} looks like a secret, but the process list shows "
                "Spark's settings. Put it into spark-defaults.conf on the machine that runs the driver"
            )
        conf[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return conf
