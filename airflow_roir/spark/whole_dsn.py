"""A DSN that says all: for a process that has another environment than the one that was given it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psycopg2
from psycopg2.extensions import make_dsn, parse_dsn

# libpq's variables, and what they stand for. The rest of them is pinned in every session, or changes no connection.
VARIABLES = {
    "PGHOST": "host",
    "PGHOSTADDR": "hostaddr",
    "PGPORT": "port",
    "PGDATABASE": "dbname",
    "PGUSER": "user",
    "PGPASSWORD": "password",
    "PGPASSFILE": "passfile",
    "PGREQUIREAUTH": "require_auth",
    "PGCHANNELBINDING": "channel_binding",
    "PGOPTIONS": "options",
    "PGSSLMODE": "sslmode",
    "PGSSLNEGOTIATION": "sslnegotiation",
    "PGSSLCOMPRESSION": "sslcompression",
    "PGSSLCERT": "sslcert",
    "PGSSLKEY": "sslkey",
    "PGSSLCERTMODE": "sslcertmode",
    "PGSSLROOTCERT": "sslrootcert",
    "PGSSLCRL": "sslcrl",
    "PGSSLCRLDIR": "sslcrldir",
    "PGSSLSNI": "sslsni",
    "PGREQUIREPEER": "requirepeer",
    "PGSSLMINPROTOCOLVERSION": "ssl_min_protocol_version",
    "PGSSLMAXPROTOCOLVERSION": "ssl_max_protocol_version",
    "PGGSSENCMODE": "gssencmode",
    "PGKRBSRVNAME": "krbsrvname",
    "PGGSSLIB": "gsslib",
    "PGGSSDELEGATION": "gssdelegation",
    "PGTARGETSESSIONATTRS": "target_session_attrs",
    "PGLOADBALANCEHOSTS": "load_balance_hosts",
    "PGMINPROTOCOLVERSION": "min_protocol_version",
    "PGMAXPROTOCOLVERSION": "max_protocol_version",
}
# A file of services may hold any of these, and comes before the environment: only libpq knows what holds then.
SERVICES = ("PGSERVICE", "PGSERVICEFILE", "PGSYSCONFDIR")
FILES = ("passfile", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslcrldir")


def whole_dsn(dsn: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The DSN with what the environment adds to it, a secret too; None if services play a part.

    What libpq can't read is returned as it is: whoever opens a session says so.
    """
    try:
        given = parse_dsn(dsn)
    except psycopg2.ProgrammingError:
        return dsn
    if "service" in given or any(environment.get(name) for name in SERVICES):
        return None
    whole = {part: environment[name] for name, part in VARIABLES.items() if environment.get(name)} | given
    for part in FILES:
        if part in whole and whole[part] != "system":
            whole[part] = os.path.abspath(whole[part])
    try:
        return str(make_dsn(**whole))
    except psycopg2.ProgrammingError:
        # This libpq doesn't know a variable's part, and so takes no notice of it.
        return str(make_dsn(**{part: value for part, value in whole.items() if part in given or _is_known(part)}))


def _is_known(part: str) -> bool:
    try:
        parse_dsn(f"{part}=x")
    except psycopg2.ProgrammingError:
        return False
    return True
