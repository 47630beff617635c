"""Announcing: before a transaction of a shard commits, its intents are committed on the index server.

By the shard's server: a deferred trigger of the outbox writes them through postgres_fdw, whose remote transaction
commits just before its own. By a client: it writes them itself (`airflow_roir.announcing`), and the same trigger
refuses the commit if it hasn't (docs/architecture.md#apart).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import psycopg2
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import parse_name, quote
from airflow_roir.engine import catalog, operations, rights
from airflow_roir.engine.capture.plpgsql import function, literal
from airflow_roir.engine.database import Database, bound, execute, said
from airflow_roir.engine.entry import Entry
from airflow_roir.engine.locks import Drain, telling_of_names
from airflow_roir.engine.shards import home, intents, outbox
from airflow_roir.engine.shards.shard import SHARD_SCHEMA, Lane, lanes_of
from airflow_roir.engine.source import Source
from airflow_roir.errors import InvalidInput, NotFound, RightMissing

SERVER, CLIENT = "server", "client"

# As long as a drain outside an operation tries.
PATIENCE_S = 120.0
# What a connection of a shard's server to the index server begins with. A commit there must last: readers count on it.
OPTIONS = "-c synchronous_commit=on -c default_transaction_read_only=off -c lock_timeout=10s -c statement_timeout=30s"
DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "20",
    "keepalives_interval": "10",
    "keepalives_count": "4",
    "tcp_user_timeout": "60000",
}
OF_USER = ("user", "password", "passcode", "sslcert", "sslkey", "sslpassword")
# What texts of values look like, and what they mean: the same in both databases.
AS_TEXT = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "quote_all_identifiers": "off",
}
LIVE = """
SELECT g.id FROM roir.generation g WHERE g.index_id = %(index)s AND g.status <> 'dropped' ORDER BY g.id
"""
# A clock that was set back must not make what was fresh before the announcing look younger than it.
BEGUN = """
UPDATE roir.lane SET strict_from = clock_timestamp(), strict_history = roir.server_history(),
       fresh_at = CASE WHEN fresh_at <= clock_timestamp() THEN fresh_at END
 WHERE id = %(lane)s AND removed_at IS NULL
"""
ENDED = "UPDATE roir.lane SET strict_from = NULL, strict_history = NULL WHERE generation_id = ANY (%(ids)s::bigint[])"
CALLED = "SELECT concat(system_identifier, '/', current_database()) FROM pg_control_system()"
RIGHT = """
SELECT 1 FROM pg_foreign_table t JOIN pg_foreign_server s ON s.oid = t.ftserver
 WHERE t.ftrelid = to_regclass(%(table)s) AND s.srvname = %(server)s AND t.ftoptions @> %(options)s::text[]
"""
NOW_CALLED = f"UPDATE {SHARD_SCHEMA}.outbox SET server = %(server)s WHERE name = %(name)s AND server <> %(server)s"
# A writer that holds the foreign table holds it until it ends.
LOCK_S = 10
PROBE = "INSERT INTO {table}_intent (xid) VALUES (pg_current_xact_id())"
PROBED = "DELETE FROM {table} WHERE {shard} IS NULL RETURNING xid::text"
PRESENT = f"SELECT to_regclass('{SHARD_SCHEMA}.outbox') IS NOT NULL"
OUTBOX = f"SELECT server, announced_by, source::bigint FROM {SHARD_SCHEMA}.outbox WHERE name = %(name)s"


def announce(database: Database, index: str, by: str | None, report: Callable[[str], None] = lambda line: None) -> None:
    """Let a shard's server (`server`), its clients (`client`) or neither (None) announce the writes of an index.

    Waits in each shard until the writers in flight have ended. Safe to call again, which goes on where it stopped; and
    it must be called again once the index server has failed over. Until every shard is done, and has shipped once more,
    strict reads are refused. Raises NotFound, InvalidInput, RightMissing, LockNotAcquired.
    """
    with database.transaction() as connection:
        row = operations.find_index(connection, parse_name(index, "index"))
        apart = execute(connection, "SELECT shard_table FROM roir.index WHERE id = %(id)s", {"id": row.id}).scalar_one()
        if apart is None:
            raise InvalidInput(f"index {index} isn't apart from its source: every read of it is strict")
        generations = list(execute(connection, LIVE, {"index": row.id}).scalars())
        lanes = [lane for one in generations for lane in lanes_of(connection, one) if is_captured(connection, lane)]
    if by is not None:
        for lane in lanes:
            check(lane, by, database)
    with database.transaction() as connection:
        values = {"id": row.id, "by": by}
        execute(connection, "UPDATE roir.index SET announced_by = %(by)s WHERE id = %(id)s", values)
        execute(connection, ENDED, {"ids": generations})
    for lane in lanes:
        if by is None:
            remove(lane, database, report)
        else:
            install(database, lane, by, report)
        report(f"shard {quote(lane.shard.name)}, generation {lane.generation_id}: done")


def nothing_to_announce(connection: Connection, name: str) -> None:
    """In a transaction that touches entries of an outbox and changes no row: it may commit as it is.

    connection: in the shard. A repair does that; what it touches is as it was before.
    """
    mark = "SELECT set_config(%(mark)s, concat_ws(':', pg_current_xact_id(), 0, 9223372036854775807), true)"
    execute(connection, mark, {"mark": f"{SHARD_SCHEMA}.{name}"})


def is_captured(connection: Connection, lane: Lane) -> bool:
    """False before the capture of a lane is committed in its shard, and after it was removed."""
    query = "SELECT captured_at IS NOT NULL AND removed_at IS NULL FROM roir.lane WHERE id = %(id)s"
    return bool(execute(connection, query, {"id": lane.id}).scalar_one())


def keep_on(database: Database, generation_id: int, report: Callable[[str], None] = lambda line: None) -> None:
    """Let the lanes of a generation that is built be announced as the index is; those that are already are left.

    So strict reads go on across its publish.
    """
    query = "SELECT i.announced_by FROM roir.index i JOIN roir.generation g ON g.index_id = i.id WHERE g.id = %(id)s"
    begun = (
        "SELECT strict_from IS NOT NULL AND strict_history IS NOT DISTINCT FROM roir.server_history() "
        "FROM roir.lane WHERE id = %(id)s"
    )
    with database.transaction() as connection:
        by = execute(connection, query, {"id": generation_id}).scalar_one()
        lanes = [
            lane
            for lane in lanes_of(connection, generation_id)
            if is_captured(connection, lane) and not execute(connection, begun, {"id": lane.id}).scalar_one()
        ]
    for lane in lanes if by is not None else ():
        install(database, lane, by, report)


def strict_problem(connection: Connection, generation_id: int) -> str | None:
    """Why a generation can't be read strictly; None if it can. connection: to the index server."""
    query = "SELECT roir.strict_problem(%(id)s)"
    found: str | None = execute(connection, query, {"id": generation_id}).scalar_one()
    return found


def check(lane: Lane, by: str, database: Database) -> None:
    """Raise InvalidInput or RightMissing where the writes of a lane can't be announced; changes nothing."""
    shard = lane.shard
    with shard.database("roir announce", database.limits).transaction() as connection:
        home.check(connection, shard)
        source = catalog.read_source_by_oid(connection, lane.source_oid)
        if source.partitioned:
            raise InvalidInput(
                f"shard {quote(shard.name)}: {source.name} has partitions. One that is attached or detached changes "
                "rows without a write that could be announced, so its index has no strict reads"
            )
        if by == SERVER:
            connection_of(lane)
            _check_extension(connection, lane, source)


def _check_extension(connection: Connection, lane: Lane, source: Source) -> None:
    query = (
        "SELECT EXISTS (SELECT FROM pg_foreign_data_wrapper WHERE fdwname = 'postgres_fdw') AS present, "
        "EXISTS (SELECT FROM pg_available_extensions WHERE name = 'postgres_fdw') AS available, "
        "(SELECT rolsuper FROM pg_roles WHERE rolname = session_user) AS mighty, current_database()::text AS database"
    )
    found = execute(connection, query).one()
    grant = f"GRANT USAGE ON FOREIGN DATA WRAPPER postgres_fdw TO {quote(source.owner)}"
    where = f"shard {quote(lane.shard.name)}"
    if not found.present and not found.available:
        raise InvalidInput(
            f"{where}: its server hasn't the extension postgres_fdw. Install PostgreSQL's contrib there, or let "
            "clients announce: --by client"
        )
    if not found.present and not found.mighty:
        raise RightMissing(
            f"{where}: only a superuser may create the extension. As one, in database {found.database}: "
            f"CREATE EXTENSION postgres_fdw; {grant}"
        )
    usage = "SELECT has_foreign_data_wrapper_privilege('postgres_fdw', 'USAGE')"
    if found.present and not execute(connection, usage).scalar_one():
        raise RightMissing(f"{where}: {quote(source.owner)} may not use postgres_fdw. As a superuser: {grant}")


def connection_of(lane: Lane) -> dict[str, str]:
    """How the shard's server reaches the index server. Raises InvalidInput."""
    shard = lane.shard
    if not shard.index_dsn:
        raise InvalidInput(
            f"shard {quote(shard.name)}: how its server reaches the index server isn't known: "
            f"roir shard add {quote(shard.name)} --index-dsn 'host=… dbname=… user=… password=…'"
        )
    try:
        found = {name: str(value) for name, value in psycopg2.extensions.parse_dsn(shard.index_dsn).items()}
    except (psycopg2.ProgrammingError, ValueError):
        found = {}
    if "user" not in found or "dbname" not in found:
        raise InvalidInput(
            f"shard {quote(shard.name)}: its --index-dsn must name at least user and dbname, since the shard's server "
            "has other defaults than we"
        )
    return found


def install(database: Database, lane: Lane, by: str, report: Callable[[str], None] = lambda line: None) -> None:
    """Announce the writes of one lane from now on: its shard's writers in flight have ended then.

    database: the index server's. Raises InvalidInput, RightMissing, LockNotAcquired.
    """
    check(lane, by, database)
    shard = lane.shard.database("roir announce", database.limits)
    with database.transaction() as connection:
        called = str(execute(connection, CALLED).scalar_one())
        shape = intents.shape_of(connection, lane.generation_id)
        if by == SERVER:
            role = connection_of(lane)["user"]
            execute(connection, f"GRANT INSERT ON {intents.table(lane.generation_id)} TO {quote(role)}")
    with shard.transaction() as connection:
        source = catalog.read_source_by_oid(connection, lane.source_oid)
        entry = outbox.read_entry(connection, lane.outbox)
        if entry is None:
            raise NotFound(f"shard {quote(lane.shard.name)}: the outbox {lane.outbox} is gone")
        # It has another name after an ALTER DATABASE or a pg_upgrade, and clients announce by that.
        execute(connection, NOW_CALLED, {"name": lane.outbox, "server": called})
        if by == SERVER:
            server = _reach(connection, lane, source)
    if by == SERVER:
        with shard.transaction() as connection:
            _make_foreign_table(connection, lane, shape, server)
        _try(database, shard, lane)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        for name, text in _functions(lane, entry, shape, by, source):
            execute(connection, text)
            rights.take_back(connection, (), [f"{SHARD_SCHEMA}.{name}()"])
        if by == CLIENT:
            _let_clients_ask(connection, lane)
        lock()
        _drop_triggers(connection, lane.outbox, source)
        table = outbox.table(lane.outbox)
        execute(
            connection,
            f"CREATE CONSTRAINT TRIGGER roir_announce AFTER INSERT OR UPDATE ON {table} DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW EXECUTE FUNCTION {table}_announce()",
        )
        execute(connection, f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER roir_announce")
        name = f"{outbox.trigger(lane.outbox)}_w"
        execute(
            connection,
            f"CREATE TRIGGER {name} BEFORE TRUNCATE ON {source.sql} FOR EACH STATEMENT "
            f"EXECUTE FUNCTION {table}_whole()",
        )
        execute(connection, f"ALTER TABLE {source.sql} ENABLE ALWAYS TRIGGER {name}")
        execute(
            connection,
            f"UPDATE {SHARD_SCHEMA}.outbox SET announced_by = %(by)s, "
            f"announcing = {SHARD_SCHEMA}.announcing_of(name) WHERE name = %(name)s",
            {"by": by, "name": lane.outbox},
        )

    drain = Drain(shard, source.sql, source.relations, database.limits.attempt_ms, PATIENCE_S)
    with telling_of_names():
        drain.run(body, report, [source.sql])
    with database.transaction() as connection:
        execute(connection, BEGUN, {"lane": lane.id})


def remove(lane: Lane, database: Database, report: Callable[[str], None] = lambda line: None) -> None:
    """End the announcing of one lane; strict reads are refused already. Raises LockNotAcquired."""
    shard = lane.shard.database("roir announce", database.limits)
    with shard.transaction() as connection:
        if not execute(connection, PRESENT).scalar_one():
            return
        found = execute(connection, OUTBOX, {"name": lane.outbox}).first()
        if found is None or found.announced_by is None:
            return
        source = catalog.read_source_by_oid(connection, lane.source_oid)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        lock()
        outbox.drop_announcing(connection, lane.outbox, source.name)
        ended = f"UPDATE {SHARD_SCHEMA}.outbox SET announced_by = NULL, announcing = NULL WHERE name = %(name)s"
        execute(connection, ended, {"name": lane.outbox})

    drain = Drain(shard, source.sql, source.relations, database.limits.attempt_ms, PATIENCE_S)
    with telling_of_names():
        drain.run(body, report, [source.sql])


def _drop_triggers(connection: Connection, name: str, source: Source) -> None:
    execute(connection, f"DROP TRIGGER IF EXISTS roir_announce ON {outbox.table(name)}")
    execute(connection, f"DROP TRIGGER IF EXISTS {outbox.trigger(name)}_w ON {source.sql}")


def _reach(connection: Connection, lane: Lane, source: Source) -> str:
    """Make the foreign server that is the index server, and how the source's owner logs in there; returns its name."""
    given = connection_of(lane)
    execute(connection, "SELECT pg_advisory_xact_lock(hashtext('roir_shard'), hashtext('announce'))")
    query = "SELECT EXISTS (SELECT FROM pg_foreign_data_wrapper WHERE fdwname = 'postgres_fdw')"
    if not execute(connection, query).scalar_one():
        execute(connection, "CREATE EXTENSION postgres_fdw")
    token = execute(connection, OUTBOX, {"name": lane.outbox}).one().server
    # A writer who can't reach it is told by this name.
    name = f"roir index server {hashlib.md5(token.encode()).hexdigest()[:8]} (see roir announce)"
    options = DEFAULTS | {key: value for key, value in given.items() if key not in OF_USER}
    options["options"] = f"{given.get('options', '')} {OPTIONS}".strip()
    query = "SELECT coalesce(srvoptions, '{}') FROM pg_foreign_server WHERE srvname = %(name)s"
    present = execute(connection, query, {"name": name}).scalar()
    if present is None:
        _send(connection, f"CREATE SERVER {quote(name)} FOREIGN DATA WRAPPER postgres_fdw OPTIONS", options)
    else:
        before = [one.split("=", 1)[0] for one in present]
        _send(connection, f"ALTER SERVER {quote(name)} OPTIONS", options, before)
    who = f"FOR {quote(source.owner)} SERVER {quote(name)}"
    mapped = {key: value for key, value in given.items() if key in OF_USER}
    mighty = "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"
    if "password" not in mapped and execute(connection, mighty).scalar_one():
        mapped["password_required"] = "false"
    execute(connection, f"DROP USER MAPPING IF EXISTS {who}")
    _send(connection, f"CREATE USER MAPPING {who} OPTIONS", mapped)
    return name


def _send(connection: Connection, head: str, options: dict[str, str], before: Sequence[str] | None = None) -> None:
    """With options, whose values may be secrets: in an error the statement isn't repeated."""
    parts = []
    for key, value in options.items():
        verb = "" if before is None else "SET " if key in before else "ADD "
        parts.append(f"{verb}{quote(key)} {bound(connection, '%(value)s', {'value': value})}")
    parts += [f"DROP {quote(key)}" for key in before or () if key not in options]
    try:
        execute(connection, f"{head} ({', '.join(parts)})")
    except DBAPIError as error:
        raise InvalidInput(f"{head.split(' OPTIONS')[0]}: {said(error)}; look at the shard's --index-dsn") from None


def _make_foreign_table(connection: Connection, lane: Lane, shape: intents.Shape, server: str) -> None:
    schema, name = intents.table(lane.generation_id).split(".")
    table = f"{outbox.table(lane.outbox)}_intent"
    # Writers use one that is there: it is left, if it is right.
    given = {"table": table, "server": server, "options": [f"schema_name={schema}", f"table_name={name}"]}
    if execute(connection, RIGHT, given).scalar() is not None:
        return
    execute(connection, f"SET LOCAL lock_timeout = '{LOCK_S}s'")
    execute(connection, f"DROP FOREIGN TABLE IF EXISTS {table}")
    columns = shape.entry.definitions_of(shape.entry.identity_positions)
    execute(
        connection,
        f"CREATE FOREIGN TABLE {table} ({columns}, xid xid8) SERVER {quote(server)} "
        f"OPTIONS (schema_name '{schema}', table_name '{name}', batch_size '1000')",
    )
    rights.take_back(connection, [table])


def _try(database: Database, shard: Database, lane: Lane) -> None:
    """Write an intent of nothing, and find it here: what every writer will need works, and leads to this server."""
    where, table = f"shard {quote(lane.shard.name)}", intents.table(lane.generation_id)
    change = f"roir shard add {quote(lane.shard.name)} --index-dsn …"
    try:
        with shard.transaction() as connection:
            execute(connection, PROBE.format(table=outbox.table(lane.outbox)))
            xid = execute(connection, "SELECT pg_current_xact_id()::text").scalar_one()
    except DBAPIError as error:
        raise InvalidInput(
            f"{where}: its server can't write to the index server: {said(error)}; look at the shard's --index-dsn: "
            f"{change}"
        ) from None
    with database.transaction() as connection:
        column = intents.shape_of(connection, lane.generation_id).column
        # With what an earlier one left that was killed.
        if xid not in execute(connection, PROBED.format(table=table, shard=column)).scalars().all():
            raise InvalidInput(
                f"{where}: what its server writes to the index server comes to another database than this one; look at "
                f"the shard's --index-dsn: {change}"
            )


def _functions(lane: Lane, entry: Entry, shape: intents.Shape, by: str, source: Source) -> list[tuple[str, str]]:
    """The functions of a lane's triggers, by their names."""
    name = lane.outbox
    mark = f"{SHARD_SCHEMA}.{name}"
    announced = _by_server(mark, lane, entry, shape) if by == SERVER else _by_client(mark, source)
    refused = f"{source.name} is indexed with strict reads, and a TRUNCATE cannot be announced"
    whole = "\n".join(
        [
            "BEGIN",
            "  RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',",
            f"    MESSAGE = {literal(refused)},",
            "    HINT = 'DELETE the rows; or, before: roir announce ... --by off.';",
            "END",
        ]
    )
    found = [
        (f"{name}_announce", function(f"{mark}_announce", announced, outbox.BY_INDEX)),
        (f"{name}_whole", function(f"{mark}_whole", whole)),
    ]
    if by == CLIENT:
        found.append((f"{name}_own", _own(mark, lane, entry, shape)))
    return found


def _columns(shape: intents.Shape) -> str:
    return ", ".join(shape.entry.physical(shape.entry.identity_positions))


def _values(lane: Lane, entry: Entry, shape: intents.Shape, record: str) -> list[str]:
    """SQL for an intent's columns, from an outbox row: the shard's in their order, its name among them."""
    ours = iter(entry.physical(entry.identity_positions, prefix=f"{record}."))
    return [literal(lane.shard.name) if i == shape.shard else next(ours) for i in shape.entry.identity_positions]


def _by_server(mark: str, lane: Lane, entry: Entry, shape: intents.Shape) -> str:
    """All own rows by one statement, at the first event; what comes later and was sent is told by versions.

    The mark is of the transaction, and goes with a savepoint that is rolled back, as do the intents that were sent.
    A serializable transaction sends row by row: its look at the outbox would conflict with every other writer's.
    """
    into = f"INSERT INTO {mark}_intent ({_columns(shape)}, xid)"
    lines = [
        "DECLARE",
        "  mine xid8 := pg_current_xact_id();",
        f"  mark text[] := string_to_array(current_setting('{mark}', true), ':');",
        "  low bigint;",
        "  high bigint;",
        "  last bigint;",
        "BEGIN",
        "  IF mark[1] = mine::text THEN",
        "    low := mark[2];",
        "    high := mark[3];",
        "    IF NEW.version BETWEEN low AND high THEN",
        "      RETURN NULL;",
        "    END IF;",
        "  END IF;",
        "  IF current_setting('transaction_isolation') = 'serializable' THEN",
        f"    {into} VALUES ({', '.join(_values(lane, entry, shape, 'NEW'))}, mine);",
        "    RETURN NULL;",
        "  END IF;",
        # No own row has a greater one, and each that gets a greater one has an event of its own.
        f"  last := pg_sequence_last_value('{SHARD_SCHEMA}.version');",
        f"  {into}",
        f"  SELECT {', '.join(_values(lane, entry, shape, 'o'))}, mine FROM {mark} o",
        "   WHERE o.xid = mine AND o.version BETWEEN NEW.version AND last",
        "     AND (low IS NULL OR o.version NOT BETWEEN low AND high);",
        f"  PERFORM set_config('{mark}', concat_ws(':', mine, least(low, NEW.version), last), true);",
        "  RETURN NULL;",
        "END",
    ]
    return "\n".join(lines)


def _by_client(mark: str, source: Source) -> str:
    """Refuses a commit with rows that the client hasn't announced."""
    refused = f"what this transaction changed in {source.name} was not announced to the index server"
    lines = [
        "DECLARE",
        f"  mark text[] := string_to_array(current_setting('{mark}', true), ':');",
        "BEGIN",
        "  IF mark[1] = pg_current_xact_id()::text AND NEW.version <= mark[3]::bigint THEN",
        "    RETURN NULL;",
        "  END IF;",
        "  RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',",
        f"    MESSAGE = {literal(refused)},",
        "    HINT = 'After the last change, before the commit: airflow_roir.announcing.announce(source, index).';",
        "END",
    ]
    return "\n".join(lines)


def _own(mark: str, lane: Lane, entry: Entry, shape: intents.Shape) -> str:
    """A function that returns what this transaction has touched and not announced: intents as JSON texts."""
    pinned = "".join(f" SET {name} = {literal(value)}" for name, value in AS_TEXT.items())
    values = _values(lane, entry, shape, "o")
    pairs = []
    for i in shape.entry.identity_positions:
        cast = shape.entry.columns[i].cast
        if cast == "jsonb":
            # In an array, which is empty for NULL: else JSON's null would be read as that.
            array = f"CASE WHEN {values[i]} IS NULL THEN jsonb_build_array() ELSE jsonb_build_array({values[i]}) END"
            pairs.append(f"'j{i + 1}', {array}")
            continue
        pairs.append(f"'c{i + 1}', " + (f"({values[i]})::text" if "." not in cast else f"concat({values[i]})"))
    body = "\n".join(
        [
            "DECLARE",
            f"  mark text[] := string_to_array(current_setting('{mark}', true), ':');",
            "  after bigint := 0;",
            "BEGIN",
            "  IF mark[1] = pg_current_xact_id()::text THEN",
            "    after := mark[3];",
            "  END IF;",
            "  RETURN QUERY",
            f"  SELECT {lane.generation_id}::bigint, o.version,",
            f"         jsonb_build_object({', '.join([*pairs, repr('xid')])}, o.xid::text)::text",
            f"    FROM {mark} o WHERE o.xid = pg_current_xact_id() AND o.version > after ORDER BY o.version;",
            "END",
        ]
    )
    text = function(f"{mark}_own", body, outbox.BY_INDEX + pinned)
    return text.replace("RETURNS trigger", "RETURNS TABLE (generation bigint, version bigint, intent text)")


def _let_clients_ask(connection: Connection, lane: Lane) -> None:
    """Any role may ask for what its own transaction has changed; nothing else is told."""
    table = outbox.table(lane.outbox)
    execute(connection, f"CREATE INDEX IF NOT EXISTS {lane.outbox}_xid ON {table} (xid)")
    execute(connection, f"GRANT USAGE ON SCHEMA {SHARD_SCHEMA} TO PUBLIC")
    execute(connection, f"GRANT EXECUTE ON FUNCTION {SHARD_SCHEMA}.unannounced() TO PUBLIC")
