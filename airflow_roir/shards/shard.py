"""A shard as the index server knows it, and the way to it (docs/architecture-shards.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from psycopg2 import ProgrammingError
from psycopg2.extensions import parse_dsn
from sqlalchemy import Connection, ExceptionContext, Row, event
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.feeds import AWAY_S
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.nearest import meant_of

SHARD_SCHEMA = "roir_shard"

# The patience for a shard's lock, while a build could already read the other shards.
SHARD_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Shard:
    """A server with a part of a table's rows. dsn never appears in `repr`; home: the token of its database."""

    id: int
    name: str
    dsn: str | None
    index_dsn: str | None = None
    home: str | None = None

    def __repr__(self) -> str:
        return f"Shard({self.name!r})"

    def database(self, application_name: str, limits: Limits) -> Database:
        """Its database. Raises InvalidInput if the shard is removed, or was added by an Airflow connection alone."""
        if self.dsn is None:
            raise InvalidInput(
                f"shard {quote(self.name)} has no DSN: roir shard add {quote(self.name)} --dsn …; or name its Airflow "
                "connection in the extra roir_shards of the index server's connection"
            )
        self._check_way(self.dsn)
        database = Database(self.dsn, application_name, limits)
        event.listen(database.engine, "before_cursor_execute", _in_shard, retval=True)
        event.listen(database.engine, "handle_error", self._name)
        return database

    def _check_way(self, dsn: str) -> None:
        """Raises InvalidInput for a DSN that would send a password of this machine to another server than it is for.

        The DSNs in the table of shards and the passwords in files here may be of different authors.
        """
        try:
            given = parse_dsn(dsn)
        except (ProgrammingError, ValueError):
            # The attempt to connect raises the error.
            return
        names = {"hostaddr"} | ({"host", "port"} if "service" in given else set())
        if "password" not in given and ("service" in given or "host" in given) and (found := names & given.keys()):
            raise InvalidInput(
                f"shard {quote(self.name)}: its DSN names {', '.join(sorted(found))} beside a "
                f"{'service' if 'service' in given else 'host'}, so that a password from here would go to another "
                f"server. Leave one out, or give the password, too: roir shard add {quote(self.name)} --dsn …"
            )

    def _name(self, failed: ExceptionContext) -> None:
        if isinstance(failed.sqlalchemy_exception, DBAPIError):
            failed.sqlalchemy_exception.add_detail(f"shard {quote(self.name)}")


# The functions that a shard shares with an index server are in another schema there. A quoted name is never ours.
_OURS = re.compile(r'"(?:[^"]|"")*"|\broir\.')


def _in_shard(_c: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> tuple[str, Any]:
    return _OURS.sub(lambda found: f"{SHARD_SCHEMA}." if found[0] == "roir." else found[0], statement), values


@dataclass(frozen=True)
class Feed:
    """The feed from one shard to one generation. outbox: the capture's table there, without its schema."""

    id: int
    generation_id: int
    shard: Shard
    outbox: str
    source_oid: int


FIND = "SELECT * FROM roir.shard WHERE name = %(name)s AND removed_at IS NULL"
FEEDS = """
SELECT s.*, l.id AS feed, l.outbox, l.source_oid FROM roir.shard s JOIN roir.feed l ON l.shard_id = s.id
 WHERE l.generation_id = %(generation)s ORDER BY s.name
"""
SET_AWAY = """
UPDATE roir.shard
   SET away_until = clock_timestamp() + make_interval(secs => %(seconds)s), problem = %(problem)s,
       problem_at = coalesce(problem_at, clock_timestamp())
 WHERE id = %(shard)s
"""
SET_PROBLEM = """
UPDATE roir.shard SET problem = %(problem)s, problem_at = coalesce(problem_at, clock_timestamp()) WHERE id = %(shard)s
"""
SET_REACHED = """
UPDATE roir.shard SET away_until = NULL, problem = NULL, problem_at = NULL
 WHERE id = %(shard)s AND problem IS NOT NULL
"""


def find(connection: Connection, name: str) -> Shard:
    """The live shard of that name. Raises NotFound."""
    row = execute(connection, FIND, {"name": name}).first()
    if row is None:
        known = execute(connection, "SELECT name FROM roir.shard WHERE removed_at IS NULL").scalars()
        raise NotFound(
            f"there is no shard {quote(name)}; add it with: roir shard add {quote(name)} --dsn …{meant_of(name, known)}"
        )
    return _shard(row)


def by_id(connection: Connection, shard_id: int) -> Shard:
    """A shard, removed or not."""
    return _shard(execute(connection, "SELECT * FROM roir.shard WHERE id = %(shard)s", {"shard": shard_id}).one())


def feeds_of(connection: Connection, generation_id: int) -> list[Feed]:
    """The feeds of a generation, by their shards' names; none if its source is in this database."""
    found = execute(connection, FEEDS, {"generation": generation_id})
    return [Feed(row.feed, generation_id, _shard(row), row.outbox, row.source_oid) for row in found]


def set_away(connection: Connection, shard_id: int, problem: str) -> None:
    """Records that a shard is out of reach, and why: for AWAY_S seconds no worker claims work of it."""
    execute(connection, SET_AWAY, {"shard": shard_id, "seconds": AWAY_S, "problem": problem})


def set_problem(connection: Connection, shard_id: int, problem: str) -> None:
    """Records a problem of a shard's feed; the shard is still worked with."""
    execute(connection, SET_PROBLEM, {"shard": shard_id, "problem": problem})


def set_reached(connection: Connection, shard_id: int) -> None:
    """Deletes the record that a shard is out of reach, if there is one."""
    execute(connection, SET_REACHED, {"shard": shard_id})


def _shard(row: Row[tuple[object, ...]]) -> Shard:
    found = row._mapping
    return Shard(found["id"], found["name"], found["dsn"], found["index_dsn"], found["home"])
