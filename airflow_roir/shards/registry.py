"""The shards that an index server knows: adds, lists and removes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from psycopg2.extensions import parse_dsn
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, quote
from airflow_roir.engine.database import Database, check_dsn, execute
from airflow_roir.engine.generation.feeds import IS_AWAY
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.errors import InvalidInput, NotFound, OperationRunning, RoirError
from airflow_roir.shards import home, shard
from airflow_roir.shards import remove as captures
from airflow_roir.shards.announce.handed import hand_over, handed
from airflow_roir.shards.capture import strays
from airflow_roir.shards.shard import SHARD_SCHEMA, Shard

LONGEST_NAME = 63
# For the locks of a shard's strays.
STRAYS_PATIENCE_S = 30.0
USED = """
SELECT format('%%I.%%I', i.schema_name, i.name) AS name, bool_and(g.status = 'retired') AS replaced,
       to_char(max(g.drop_after) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI UTC') AS kept
  FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id JOIN roir.index i ON i.id = g.index_id
 WHERE l.shard_id = %(shard)s AND l.removed_at IS NULL AND g.status <> 'dropped' GROUP BY 1 ORDER BY 1
"""
LISTED = f"""
SELECT s.id, s.name, s.dsn, s.index_dsn IS NOT NULL AS announces, s.added_at,
       {IS_AWAY} AS away, s.problem,
       array(SELECT DISTINCT format('%I.%I', i.schema_name, i.name)
               FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id JOIN roir.index i ON i.id = g.index_id
              WHERE l.shard_id = s.id AND l.removed_at IS NULL AND g.status <> 'dropped' ORDER BY 1) AS indexes,
       (SELECT extract(epoch FROM clock_timestamp() - min(l.fresh_at))::float
          FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id
         WHERE l.shard_id = s.id AND l.removed_at IS NULL AND g.status = 'active') AS lag_s,
       (SELECT string_agg(DISTINCT l.doubt, '; ') FROM roir.feed l
         WHERE l.shard_id = s.id AND l.removed_at IS NULL) AS doubt
  FROM roir.shard s WHERE s.removed_at IS NULL ORDER BY s.name
"""
# The foreign servers that announcing has made in a shard.
REACHED = """
SELECT srvname FROM pg_foreign_server
 WHERE srvname ~ '^roir index server [0-9a-f]{8} ' AND pg_has_role(srvowner, 'USAGE') ORDER BY 1
"""
ADD = f"""
INSERT INTO roir.shard (name, dsn, index_dsn, home)
VALUES (%(name)s, {handed("dsn")}, {handed("index_dsn")}, %(home)s)
"""
# A value that isn't given stays.
CHANGE = f"""
UPDATE roir.shard
   SET dsn = coalesce({handed("dsn")}, dsn), index_dsn = coalesce({handed("index_dsn")}, index_dsn),
       home = coalesce(%(home)s, home), away_until = NULL, problem = NULL, problem_at = NULL
 WHERE id = %(shard)s
"""
KEEP_DSN = f"UPDATE roir.shard SET dsn = {handed('dsn')} WHERE id = %(shard)s"
FENCE = """
UPDATE roir.feed SET token = token + 1, owner = NULL, heartbeat_at = NULL
 WHERE shard_id = %(shard)s AND removed_at IS NULL
"""
REMOVE = """
UPDATE roir.shard SET removed_at = clock_timestamp(), dsn = NULL, index_dsn = NULL WHERE id = %(shard)s
"""
OTHER = "SELECT name FROM roir.shard WHERE home = %(home)s AND name <> %(name)s AND removed_at IS NULL"
SHOWN = ("host", "port", "dbname", "user", "service")


@dataclass(frozen=True)
class ListedShard:
    """A shard in a list. place: its DSN without secrets; lag_s: of the index that is furthest behind."""

    name: str
    place: str
    announces: bool
    added_at: datetime
    away: bool
    problem: str | None
    doubt: str | None
    indexes: list[str]
    lag_s: float | None

    def as_dict(self) -> dict[str, object]:
        """The shard for JSON."""
        return {**self.__dict__, "added_at": self.added_at.isoformat()}


def add(
    database: Database,
    name: str,
    dsn: str | None = None,
    index_dsn: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Shard:
    """Adds a shard, or changes the DSN of one that exists; creates its small schema. It is safe to call again.

    Removes captures there that are for this server but unknown to it.

    dsn: how workers reach the shard. index_dsn: how the shard's server reaches this one, to announce writes. Raises
    InvalidInput, RightMissing, and DBAPIError if the shard can't be reached.
    """
    _check_name(name)
    for one in (dsn, index_dsn):
        if one is not None:
            check_dsn(one)
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        known = _find(connection, name)
    if dsn is None and known is None:
        raise InvalidInput(f"shard {quote(name)}: give its DSN: --dsn, or the variable ROIR_SHARD_DSN")
    dsn = dsn or (known.dsn if known else None)
    token = None
    if dsn is not None:
        token = home.install(Shard(0, name, dsn).database("roir shard", database.limits))
        if known is not None and known.home not in (None, token):
            raise InvalidInput(
                f"shard {quote(name)}: that DSN leads to another database than the one that was added, whose entries "
                f"an index may have. Remove the shard first: roir shard remove {quote(name)}"
            )
    with database.transaction() as connection:
        # One call at a time: a second one then finds the first one's row.
        execute(connection, "SELECT pg_advisory_xact_lock(hashtext('roir'), hashtext('shard'))")
        _check_home(connection, name, token)
        secret = {key: value for key, value in {"dsn": dsn, "index_dsn": index_dsn}.items() if value is not None}
        hand_over(connection, secret)
        known = _find(connection, name)
        if known is None:
            execute(connection, ADD, {"name": name, "home": token})
        else:
            execute(connection, CHANGE, {"shard": known.id, "home": token})
            if known.dsn != dsn:
                _leave_the_old_server(connection, known.id)
        found = shard.find(connection, name)
    if dsn is not None:
        strays.remove(database, found, STRAYS_PATIENCE_S, report)
    return found


def keep_dsn(connection: Connection, name: str, dsn: str) -> None:
    """Records the DSN that an Airflow connection has now. Raises NotFound."""
    found = shard.find(connection, name)
    if found.dsn != dsn:
        hand_over(connection, {"dsn": dsn})
        execute(connection, KEEP_DSN, {"shard": found.id})
        _leave_the_old_server(connection, found.id)


def _leave_the_old_server(connection: Connection, shard_id: int) -> None:
    """Fences the shippers of a shard after a change of its DSN: their sessions may still reach the former server, whose
    data is old."""
    execute(connection, FENCE, {"shard": shard_id})


def listed(database: Database) -> list[ListedShard]:
    """All shards, by their names."""
    with database.transaction() as connection:
        check_schema(connection)
        rows = execute(connection, LISTED).all()
    return [
        ListedShard(
            row.name,
            _place(row.dsn),
            row.announces,
            row.added_at,
            bool(row.away),
            row.problem,
            row.doubt,
            list(row.indexes),
            row.lag_s,
        )
        for row in rows
    ]


def probe(database: Database, name: str) -> str | None:
    """Why a shard can't be used now; None if it can. Raises NotFound."""
    with database.transaction() as connection:
        found = shard.find(connection, name)
    try:
        with found.database("roir shard", database.limits).transaction() as connection:
            home.check(connection, found)
        left = strays.find(database, found)
    except (RoirError, DBAPIError) as error:
        return reason_of(error)
    if left:
        return (
            f"it captures for generations that this server doesn't know ({', '.join(left)}), so that writes may fail "
            f"there. Remove that: roir shard add {argument(name)}"
        )
    return None


def remove(
    database: Database, name: str, force: bool = False, report: Callable[[str], None] = lambda line: None
) -> None:
    """Forgets a shard, and removes our schema from it if no other index server captures there.

    force: also if the shard can't be reached. Then a capture left there goes on, into tables that grow, and writers
    that announce to this server fail from the next clean-up on. Raises NotFound, OperationRunning (an index is over the
    shard, or the capture of one that was dropped can't be removed there now), DBAPIError (it can't be reached).
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        found = shard.find(connection, name)
        used = execute(connection, USED, {"shard": found.id}).all()
    if still := [row.name for row in used if not row.replaced]:
        raise OperationRunning(
            f"shard {quote(name)} has entries in {', '.join(still)}; rebuild these indexes without it, or drop them, "
            "then run: roir clean-up"
        )
    if used:
        kept = ", ".join(f"{row.name} (kept until {row.kept})" for row in used)
        raise OperationRunning(
            f"shard {quote(name)} has entries only in replaced generations of {kept}, which a revert would show; once "
            "the revert window is over, run: roir clean-up"
        )
    if found.dsn is not None:
        try:
            # An index over it may have been dropped while it was away. Its writers announce until that capture is
            # removed.
            left = captures.release(database, None, database.limits.clean_up_s, report, found.id)
            if left:
                raise OperationRunning(f"{left[0]}. Try again, or, if its server is gone for good, with --force")
            strays.remove(database, found, STRAYS_PATIENCE_S, report)
            _leave(found.database("roir shard", database.limits))
        except (DBAPIError, RoirError) as error:
            if not force:
                raise
            report(
                f"shard {quote(name)}: nothing was removed there: {reason_of(error)}. If its server comes back, add it "
                f"again, which removes it: roir shard add {argument(name)}. Until then its triggers go on, and writers "
                "that announce to this server fail"
            )
    with database.transaction() as connection:
        execute(connection, REMOVE, {"shard": found.id})


def _leave(database: Database) -> None:
    with database.transaction() as connection:
        # Another index server may be about to capture here.
        execute(connection, "SELECT pg_advisory_xact_lock(hashtext('roir_shard'))")
        there = execute(connection, f"SELECT to_regclass('{SHARD_SCHEMA}.outbox') IS NOT NULL").scalar_one()
        if there and not execute(connection, f"SELECT EXISTS (SELECT FROM {SHARD_SCHEMA}.outbox)").scalar_one():
            execute(connection, f"DROP SCHEMA {SHARD_SCHEMA} CASCADE")
            for server in list(execute(connection, REACHED).scalars()):
                # With the user mapping, which has a password.
                execute(connection, f"DROP SERVER {quote(server)} CASCADE")


def _find(connection: Connection, name: str) -> Shard | None:
    try:
        return shard.find(connection, name)
    except NotFound:
        return None


def _check_name(name: str) -> None:
    # Commas are between the names of --shards.
    fits = name == name.strip() and name.isprintable() and "," not in name
    if not name or not fits or len(name.encode()) > LONGEST_NAME:
        raise InvalidInput(
            f"{name!r} can't be a shard's name, which each of its entries contains. Give 1 to {LONGEST_NAME} bytes of "
            "printable characters, without blanks at the ends and without commas"
        )


def _check_home(connection: Connection, name: str, token: str | None) -> None:
    other = execute(connection, OTHER, {"name": name, "home": token}).scalar()
    if other is not None:
        raise InvalidInput(
            f"shard {quote(name)}: that database is shard {quote(other)} already; its rows would be in an index twice"
        )


def _place(dsn: str | None) -> str:
    """A DSN without its secrets."""
    given = parse_dsn(dsn) if dsn else {}
    return " ".join(f"{key}={given[key]}" for key in SHOWN if given.get(key))
