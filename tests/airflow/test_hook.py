"""From an Airflow connection to a DSN: whatever the password, and never seen."""

from __future__ import annotations

import json

import pytest
from airflow.sdk import Connection
from airflow.sdk.log import _secrets_masker
from psycopg2.extensions import parse_dsn

from airflow_roir.errors import InvalidInput
from airflow_roir.hooks.roir import RoirHook, dsn_of

HOSTILE = [
    "plain-password",
    "it's \\ quoted",
    "p@ss:w/o%rd?#&=",
    "host=elsewhere password='x",
    "späße und 日本語",
    "  leading and trailing  ",
    "%(index)s {brace} $HOME",
]


def connection(**fields: object) -> Connection:
    extra = fields.pop("extra", None)
    return Connection(
        conn_id="warehouse",
        conn_type="postgres",
        extra=json.dumps(extra) if extra else None,
        **{"host": "db.example", "login": "builder", "schema": "shop", "port": 5433} | fields,
    )


@pytest.mark.parametrize("password", HOSTILE)
def test_a_hostile_password_reaches_libpq_as_it_is(password: str) -> None:
    assert parse_dsn(dsn_of(connection(password=password))) == {
        "host": "db.example",
        "port": "5433",
        "user": "builder",
        "password": password,
        "dbname": "shop",
    }


@pytest.mark.parametrize("password", HOSTILE)
def test_passwords_are_masked_wherever_they_are_logged(password: str) -> None:
    dsn = dsn_of(connection(password=password))
    masker = _secrets_masker()
    for text in (f"it is {password}.", f"connecting to {dsn}"):
        assert password not in masker.redact(text)


def test_libpq_extras_are_handed_on() -> None:
    extra = {"sslmode": "verify-full", "sslrootcert": "/etc/ssl/my ca.pem", "options": "-c role=builder"}
    parsed = parse_dsn(dsn_of(connection(password="secret", extra=extra)))
    assert {name: parsed[name] for name in extra} == extra


def test_extras_of_airflows_own_hook_mean_nothing_here() -> None:
    extra = {"cursor": "dictcursor", "sqlalchemy_scheme": "postgresql+psycopg2", "aws_conn_id": "aws"}
    assert set(parse_dsn(dsn_of(connection(password="secret", extra=extra)))) == {
        "host",
        "port",
        "user",
        "password",
        "dbname",
    }


def test_an_extra_that_libpq_does_not_know_is_named_and_the_password_is_not() -> None:
    with pytest.raises(InvalidInput, match="sslmood") as refusal:
        dsn_of(connection(password="do-not-show", extra={"sslmood": "require"}))
    assert "do-not-show" not in str(refusal.value)


@pytest.mark.parametrize("extra", [["sslmode"], "sslmode", 5])
def test_extras_that_are_no_object_are_refused(extra: object) -> None:
    """Found: an Airflow connection whose extra is a JSON list, or has `database`: a traceback, retried. It holds:
    refused, with what is wrong.
    """
    with pytest.raises(InvalidInput, match="must be a JSON object"):
        dsn_of(connection(extra=extra))


def test_the_other_name_of_the_database_is_no_setting() -> None:
    """Found: an Airflow connection whose extra is a JSON list, or has `database`: a traceback, retried. It holds:
    refused, with what is wrong.
    """
    with pytest.raises(InvalidInput, match="libpq doesn't know: database"):
        dsn_of(connection(extra={"database": "other"}))


def test_tokens_that_expire_during_a_build_are_refused() -> None:
    with pytest.raises(InvalidInput, match="short-lived tokens"):
        dsn_of(connection(extra={"iam": True}))


def test_a_connection_without_host_uses_the_socket() -> None:
    assert parse_dsn(dsn_of(connection(host=None, port=None))) == {"user": "builder", "dbname": "shop"}


def test_a_socket_directory_may_be_the_host() -> None:
    parsed = parse_dsn(dsn_of(connection(host="/run/my pg", port=None, password="x")))
    assert parsed["host"] == "/run/my pg"


def test_the_hook_shows_its_connection_id_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "AIRFLOW_CONN_WAREHOUSE", json.dumps({"conn_type": "postgres", "host": "h", "password": "hidden-one"})
    )
    hook = RoirHook("warehouse")
    assert parse_dsn(hook.get_dsn())["password"] == "hidden-one"
    assert repr(hook) == "RoirHook(postgres_conn_id='warehouse')"
    assert "hidden-one" not in repr(hook.get_database())
