"""Reads the connections and addresses that forms and operators may name, from Airflow's configuration `[roir]`."""

from __future__ import annotations

from airflow.sdk.configuration import conf


def allowed_masters() -> tuple[str, ...]:
    """The addresses of Spark in `[roir] spark_masters`, separated by blanks: an address may have commas."""
    return tuple(str(conf.get("roir", "spark_masters", fallback="") or "").split())


def allowed_connections() -> tuple[str, ...]:
    """The ids in `[roir] connections`, separated by commas; none: any connection of type postgres."""
    text = str(conf.get("roir", "connections", fallback="") or "")
    return tuple(dict.fromkeys(name for part in text.replace("\n", ",").split(",") if (name := part.strip())))
