"""The functions by which a shard announces (docs/architecture-shards.md).

Both decide by the rows of the outbox that this very transaction wrote, at its commit.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.engine.capture.plpgsql import function, indent, literal
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source.source import Source
from airflow_roir.shards.announce import intents
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import SHARD_SCHEMA, Feed

SERVER, CLIENT = "server", "client"
# The time that a commit waits for an index server that hangs, if the shard has a limit for that (PostgreSQL 17). It is
# longer than that server's own limits (`foreign.OPTIONS`), and only counts while the intents are sent: a transaction
# that goes on afterwards isn't ended.
HUNG_S = 60

# The settings by which values are written as texts, and texts read: the same in both databases.
AS_TEXT = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "quote_all_identifiers": "off",
}


def functions(
    feed: Feed, entry: Entry, shape: intents.Shape, by: str, source: Source, unique: str | None = None
) -> list[tuple[str, str]]:
    """The functions by which a feed announces, by their names. unique: the name of a unique index in errors."""
    name = feed.outbox
    mark = f"{SHARD_SCHEMA}.{name}"
    announced = _by_server(mark, feed, entry, shape, source, unique) if by == SERVER else _by_client(mark, source)
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
        found.append((f"{name}_own", _own(mark, feed, entry, shape)))
    return found


def _columns(shape: intents.Shape) -> str:
    return ", ".join(shape.entry.physical(shape.entry.identity_positions))


def _values(feed: Feed, entry: Entry, shape: intents.Shape, record: str) -> list[str]:
    """SQL for an intent's columns, from an outbox row: the shard's in their order, its name among them."""
    ours = iter(entry.physical(entry.identity_positions, prefix=f"{record}."))
    return [literal(feed.shard.name) if i == shape.shard else next(ours) for i in shape.entry.identity_positions]


def _by_server(mark: str, feed: Feed, entry: Entry, shape: intents.Shape, source: Source, unique: str | None) -> str:
    """Sends all rows of the transaction by one statement, at the first event. By their versions later events know the
    rows that were sent.

    The mark belongs to the transaction. The rollback to a savepoint undoes the mark together with the intents that were
    sent since. A serializable transaction sends row by row: its look at the outbox would conflict with every other
    writer's.
    """

    def send(statement: str) -> list[str]:
        return [
            # NULL before 17.
            "limited := current_setting('transaction_timeout', true) = '0';",
            "IF limited THEN",
            f"  PERFORM set_config('transaction_timeout', '{HUNG_S}s', true);",
            "END IF;",
            *([f"{statement};"] if unique is None else _refused(statement, unique, source)),
            "IF limited THEN",
            "  PERFORM set_config('transaction_timeout', '0', true);",
            "END IF;",
        ]

    into = f"INSERT INTO {mark}_intent ({_columns(shape)}, xid)"
    lines = [
        "DECLARE",
        "  mine xid8 := pg_current_xact_id();",
        f"  mark text[] := string_to_array(current_setting('{mark}', true), ':');",
        "  low bigint;",
        "  high bigint;",
        "  last bigint;",
        "  limited boolean;",
        "  refused text;",
        "  why text;",
        "BEGIN",
        "  IF mark[1] = mine::text THEN",
        "    low := mark[2];",
        "    high := mark[3];",
        "    IF NEW.version BETWEEN low AND high THEN",
        "      RETURN NULL;",
        "    END IF;",
        "  END IF;",
        "  IF current_setting('transaction_isolation') = 'serializable' THEN",
        *indent(send(f"{into} VALUES ({', '.join(_values(feed, entry, shape, 'NEW'))}, mine)"), 2),
        "    RETURN NULL;",
        "  END IF;",
        # No own row has a greater one, and each that gets a greater one has an event of its own.
        f"  last := pg_sequence_last_value('{SHARD_SCHEMA}.version');",
        *indent(
            send(
                f"{into} SELECT {', '.join(_values(feed, entry, shape, 'o'))}, mine FROM {mark} o "
                "WHERE o.xid = mine AND o.version BETWEEN NEW.version AND last "
                "AND (low IS NULL OR o.version NOT BETWEEN low AND high)"
            )
        ),
        f"  PERFORM set_config('{mark}', concat_ws(':', mine, least(low, NEW.version), last), true);",
        "  RETURN NULL;",
        "END",
    ]
    return "\n".join(lines)


def _refused(statement: str, index: str, source: Source) -> list[str]:
    """Raises a refusal of the index server as PostgreSQL itself does: postgres_fdw drops the constraint's name."""
    return [
        "BEGIN",
        f"  {statement};",
        "EXCEPTION WHEN unique_violation THEN",
        "  GET STACKED DIAGNOSTICS refused = MESSAGE_TEXT, why = PG_EXCEPTION_DETAIL;",
        "  RAISE unique_violation USING MESSAGE = refused, DETAIL = why,",
        f"    SCHEMA = {literal(source.name.schema or '')}, TABLE = {literal(source.name.name)},",
        f"    CONSTRAINT = {literal(index)};",
        "END;",
    ]


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


def _own(mark: str, feed: Feed, entry: Entry, shape: intents.Shape) -> str:
    """A function that returns the intents, as JSON texts, of entries that this transaction has touched and not yet
    announced."""
    pinned = "".join(f" SET {name} = {literal(value)}" for name, value in AS_TEXT.items())
    values = _values(feed, entry, shape, "o")
    pairs = []
    for i in shape.entry.identity_positions:
        cast = shape.entry.columns[i].cast
        if cast == "jsonb":
            # In an array, which is empty for NULL: otherwise JSON's null would be read as NULL.
            array = f"CASE WHEN {values[i]} IS NULL THEN jsonb_build_array() ELSE jsonb_build_array({values[i]}) END"
            pairs.append(f"'j{i + 1}', {array}")
            continue
        pairs.append(f"'c{i + 1}', " + (intents.text_of_own(values[i]) if "." in cast else f"({values[i]})::text"))
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
            f"  SELECT {feed.generation_id}::bigint, o.version,",
            f"         jsonb_build_object({', '.join([*pairs, repr('xid')])}, o.xid::text)::text",
            f"    FROM {mark} o WHERE o.xid = pg_current_xact_id() AND o.version > after ORDER BY o.version;",
            "END",
        ]
    )
    text = function(f"{mark}_own", body, outbox.BY_INDEX + pinned)
    return text.replace("RETURNS trigger", "RETURNS TABLE (generation bigint, version bigint, intent text)")


def let_clients_ask(connection: Connection, feed: Feed) -> None:
    """Lets any role read the changes of its own transaction, and no others."""
    table = outbox.table(feed.outbox)
    execute(connection, f"CREATE INDEX IF NOT EXISTS {feed.outbox}_xid ON {table} (xid)")
    execute(connection, f"GRANT USAGE ON SCHEMA {SHARD_SCHEMA} TO PUBLIC")
    execute(connection, f"GRANT EXECUTE ON FUNCTION {SHARD_SCHEMA}.unannounced() TO PUBLIC")
