"""Looks at what a first build needs of this machine: packages, Java, the way to Spark. For `doctor` and the pages."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from airflow_roir.engine.forecast.set_up import OK, PROBLEM, WARNING, Finding, refused
from airflow_roir.errors import JavaMissing
from airflow_roir.spark.java import use_java

MASTER_S = 5.0
PACKAGES = ("SQLAlchemy", "psycopg2-binary", "pyspark")


def name() -> str:
    """This machine, as findings name it."""
    return f"machine {socket.gethostname()}"


def look(master: str | None = None) -> list[Finding]:
    """The findings about this machine. master: an address of Spark, which is tried if it names a host."""
    return [replace(one, where=name()) for one in (*_packages(), _java(), *_master(master))]


def _packages() -> Iterator[Finding]:
    for package in PACKAGES:
        try:
            yield Finding(package, OK, version(package))
        except PackageNotFoundError:
            yield Finding(package, WARNING, "not installed under this name", f"pip install {package}")


def _java() -> Finding:
    try:
        return Finding("Java", OK, str(use_java(dict(os.environ))))
    except JavaMissing as error:
        # A build without Spark needs none.
        without = refused("Java", error, WARNING)
        return replace(without, remedy=f"{without.remedy}; or: roir build --without-spark")


def _master(master: str | None) -> Iterator[Finding]:
    """Whether Spark's address can be reached, if it is one of a host."""
    if master is None or not master.startswith(("spark://", "sc://")):
        return
    try:
        # A master may be a list of several, of which one is enough.
        places = [urlsplit(f"//{one}") for one in master.split("://", 1)[1].split(";")[0].rstrip("/").split(",")]
        for n, place in enumerate(places, start=1):
            try:
                port = place.port or (15002 if master.startswith("sc") else 7077)
                socket.create_connection((place.hostname or "", port), MASTER_S).close()
                break
            except OSError:
                if n == len(places):
                    raise
    except (OSError, ValueError) as error:
        remedy = "Start Spark there, or open the way to it; a build can also do without: --without-spark"
        yield Finding("Spark", PROBLEM, f"{master} can't be reached: {error}", remedy)
        return
    yield Finding("Spark", OK, f"{master} takes connections")
