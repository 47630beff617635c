"""Looks at all that a first build needs of a database, by the checks that a build makes; changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition, QualifiedName, parse_name
from airflow_roir.engine import dry_run
from airflow_roir.engine.database import Database, execute, said
from airflow_roir.engine.forecast import objections, rights, signals
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.schema import schema
from airflow_roir.engine.sessions.room import Room, room_of, sessions_of
from airflow_roir.engine.source import catalog, checks
from airflow_roir.errors import RightMissing, RoirError
from airflow_roir.options import BuildOptions
from airflow_roir.quantity import counted, size

OK, WARNING, PROBLEM = "ok", "warning", "problem"
# For looks from another machine than the one that counts, and for what can't be read.
UNKNOWN = "unknown"
# No error of a connection has an SQLSTATE.
ABSENT_ROLE = re.compile(r'role ".*" does not exist')
SETTINGS = """
SELECT current_setting('server_version') AS version, current_setting('server_encoding') AS encoding,
       current_setting('wal_level') AS wal_level, current_setting('max_locks_per_transaction') AS locks,
       pg_database_size(current_database()) AS bytes
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check. verdict: ok, warning, problem or unknown; remedy: empty if nothing is to be done.

    where: where it looked: the database, Airflow, or a machine by its name.
    """

    what: str
    verdict: str
    says: str
    remedy: str = ""
    where: str = "database"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


# The message of a database's error.
Told = Callable[[DBAPIError], str]


def refused(what: str, error: Exception | str, verdict: str = PROBLEM, told: Told = said) -> Finding:
    """The finding for a check's error, whose message names its remedy after its first sentence."""
    message = told(error) if isinstance(error, DBAPIError) else str(error).strip()
    says, _, remedy = message.partition(". ")
    return Finding(what, verdict, says, remedy)


def look(
    database: Database, table: str | None = None, surroundings: Surroundings | None = None, told: Told = said
) -> list[Finding]:
    """All findings about a database, and about a table in it. Raises no error of the database or of a check.

    surroundings: by default those of the environment. told: writes the errors of a session; libpq's name host and user.
    """
    try:
        with database.transaction() as connection:
            found = _of_database(connection)
    except (DBAPIError, RoirError) as error:
        # No session: the server is away, refuses, or a pooler shares its sessions.
        session = refused("session", error, told=told)
        if ABSENT_ROLE.search(session.says):
            session = replace(
                session, remedy="Name the role that builds, or make it with the SQL of: roir role-sql NAME"
            )
        return [session]
    found.insert(0, Finding("session", OK, "the server answers, and its sessions are roir's alone"))
    try:
        found += _signals(database, surroundings)
        if table:
            found += _of_table(database, table, found)
    except (DBAPIError, RoirError) as error:
        found.append(refused(table or "throttle", error, told=told))
    return found


def _of_database(connection: Connection) -> list[Finding]:
    options = BuildOptions()
    nameless = IndexDefinition(QualifiedName(None, "index"))
    found: list[Finding] = []

    def check(what: str, ok: str, call: Callable[[], object]) -> bool:
        savepoint = connection.begin_nested()
        try:
            call()
            found.append(Finding(what, OK, ok))
            return True
        except (RoirError, DBAPIError) as error:
            found.append(refused(what, error))
            return False
        finally:
            savepoint.rollback()

    server = execute(connection, SETTINGS).one()
    if check("server", f"PostgreSQL {server.version}", lambda: checks.check_server(connection)) and (
        untried := checks.untried_server(connection)
    ):
        found[-1] = refused("server", untried, WARNING)
    check("primary", "the server takes writes", lambda: schema.check_writable(connection))
    lacking = rights.missing(connection, nameless, [])
    found += [Finding("rights", PROBLEM, one.what, one.statement) for one in lacking]
    if not lacking:
        check("rights", "the role may use the control schema, or make it", lambda: checks.check_rights(connection))
    if check("schema", f"version {schema.head()}, as this code needs", lambda: schema.check_schema(connection)):
        found.append(_guard(connection))
    check(
        "lock_timeout",
        f"{options.lock_timeout_ms} ms, shorter than the server's deadlock_timeout",
        lambda: dry_run.check_lock_timeout(connection, options),
    )
    found += [_connections(room_of(connection), options), Finding("encoding", OK, server.encoding)]
    found.append(Finding("wal_level", OK, f"{server.wal_level}: roir needs none in particular"))
    found.append(Finding("max_locks", OK, f"max_locks_per_transaction is {server.locks}"))
    free = f"the database has {size(server.bytes)}; SQL can't see how much is free"
    found.append(Finding("disk", UNKNOWN, free, "roir plan says what a build takes: compare it with df on the server"))
    return found


def _guard(connection: Connection) -> Finding:
    if schema.is_guarded(connection):
        return Finding("guard", OK, "event triggers refuse DDL that no capture sees")
    says = "DDL that no capture sees is only detected; after a rename of an indexed column writes fail"
    return Finding("guard", WARNING, says, "As a superuser: SELECT roir.guard()")


def _connections(room: Room, options: BuildOptions) -> Finding:
    workers = counted(options.parallelism, "worker")
    needed = sessions_of(options.parallelism)
    says = f"{room.used} of {room.most} are used, and a build with {workers} takes up to {needed}"
    if room.left(options.parallelism) >= 0:
        return Finding("max_connections", OK, says)
    return Finding("max_connections", WARNING, says, "Raise max_connections, or build with a smaller --parallelism")


def _signals(database: Database, surroundings: Surroundings | None) -> list[Finding]:
    """Whether a throttle could read its signals, those of replicas among them."""
    seen = signals.look(database, Surroundings.of_environment() if surroundings is None else surroundings)
    unread = [one for one in seen.readings if one.value is None]
    if not unread:
        names = dict.fromkeys(one.signal.name for one in seen.readings)
        return [Finding("throttle", OK, f"{', '.join(names)} can be read; to begin with: {seen.sensible}")]
    by_problem: dict[str, list[str]] = {}
    for one in unread:
        by_problem.setdefault(one.problem, []).append(f"{one.signal.name}{f' of {one.of}' if one.of else ''}")
    says = "; ".join(f"{' and '.join(of)} can't be read: {problem}" for problem, of in by_problem.items())
    needed = " or ".join(dict.fromkeys(one.signal.name for one in unread))
    return [Finding("throttle", UNKNOWN, says, f"That matters only if you throttle by {needed}")]


def _of_table(database: Database, table: str, before: list[Finding]) -> list[Finding]:
    """All objections to an index of that table by its own primary key, which are those to any index of it."""
    name = parse_name(table, "table")
    with database.transaction() as connection:
        if schema.is_absent(connection):
            return _of_table_alone(connection, name, table, before)
    with database.transaction() as connection:
        source, problems = catalog.look(connection, name)
    if source is None or not source.primary_key:
        return [refused(table, problem) for problem in problems]
    definition = IndexDefinition(QualifiedName(source.name.schema, "roir_doctor"), source.name, source.primary_key)
    against = objections.find(database, definition, BuildOptions())
    found = [Finding(table, PROBLEM, one.what, one.statement) for one in against.missing]
    found += [refused(table, text) for text in against.refused]
    return _untold(found, before) or [Finding(table, OK, "nothing about the table itself keeps it from being indexed")]


def _of_table_alone(connection: Connection, name: QualifiedName, table: str, before: list[Finding]) -> list[Finding]:
    """The objections that can be found before `roir init`."""
    source, problems = catalog.look(connection, name, alone=True)
    if source is None or not source.primary_key:
        return [refused(table, error) for error in problems]
    definition = IndexDefinition(QualifiedName(source.name.schema, "roir_doctor"), source.name, source.primary_key)
    lacking = rights.missing(connection, definition, [])
    found = [Finding(table, PROBLEM, one.what, one.statement) for one in lacking]
    found += [refused(table, error) for error in problems if not (lacking and isinstance(error, RightMissing))]
    says = "nothing keeps the table from being indexed, as far as can be seen before roir init"
    return _untold(found, before) or [Finding(table, OK, says)]


def _untold(found: list[Finding], before: list[Finding]) -> list[Finding]:
    told = {(one.says, one.remedy) for one in before}
    return [one for one in found if (one.says, one.remedy) not in told]
