"""Announces the writes of a transaction in a shard to the index server, for strict reads of the index.

    with shard.begin(), index.connect() as other:
        shard.execute(...)                 # all that the transaction changes
        announce(shard, other)             # then this, before the commit

It needs neither Airflow nor Spark, and only where clients announce (`roir announce INDEX --by client`).
"""

from __future__ import annotations

import json
from collections import defaultdict

from sqlalchemy import Connection, Row, text

from airflow_roir.errors import InvalidInput

# The most intents that one statement sends.
CHUNK = 1_000

UNANNOUNCED = text("SELECT server, outbox, generation, version, intent FROM roir_shard.unannounced()")
# The meaning of a value's text must not depend on the session, and a commit that readers count on must last.
PINNED = text(
    "SELECT set_config('DateStyle', 'ISO, YMD', true), set_config('IntervalStyle', 'postgres', true), "
    "set_config('lc_monetary', 'C', true), "
    "set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true)"
)
# The name of an index server in the shards.
SERVER = text("SELECT concat(system_identifier, '/', current_database()) FROM pg_catalog.pg_control_system()")
MARK = text("SELECT set_config('roir_shard.' || :outbox, pg_current_xact_id() || ':0:' || :version, true)")


def announce(source: Connection, index: Connection) -> int:
    """Writes the intents of a transaction to the index server, and commits them there; returns their number.

    source: a connection to the shard, in the transaction that is to commit next. Announce again after each further
        change in it, or the shard refuses the commit (SQLSTATE 55000).
    index: a connection to the index server, outside any transaction, of a role that may INSERT into the intents of the
        index (docs/shards.md#strict).

    If a table has indexes on several index servers, call it for each of them, with its connection.

    If it raises, roll the transaction back, since it isn't known how much was announced. An intent whose transaction
    doesn't commit makes strict readers look at the shard until the shipper removes it; it is never wrong.
    Raises InvalidInput if `index` is in a transaction, whose end isn't known, or commits each statement.
    """
    if index.in_transaction():
        raise InvalidInput(
            "the connection to the index server is in a transaction, but an announcement must be committed at once"
        )
    if getattr(index.connection.dbapi_connection, "autocommit", False):
        raise InvalidInput(
            "the connection to the index server commits each statement, which would lose the settings of announcing"
        )
    touched = source.execute(UNANNOUNCED).all()
    if not touched:
        return 0
    of_generation: defaultdict[int, list[Row[tuple[str, str, int, int, str]]]] = defaultdict(list)
    with index.begin():
        server = index.execute(SERVER).scalar_one()
        found = [row for row in touched if row.server == server]
        for row in found:
            of_generation[int(row.generation)].append(row)
        index.execute(PINNED)
        for generation, rows in of_generation.items():
            for first in range(0, len(rows), CHUNK):
                _insert(index, generation, [row.intent for row in rows[first : first + CHUNK]])
    # In order of the versions, so the last one is the greatest.
    for outbox, version in {row.outbox: row.version for row in found}.items():
        source.execute(MARK, {"outbox": outbox, "version": str(version)})
    return len(found)


def _insert(index: Connection, generation: int, intents: list[str]) -> None:
    # The statement is made of names of ours alone.
    given = json.loads(intents[0])
    numbers = range(1, len(given))
    columns = ", ".join([f"c{i}" for i in numbers] + ["xid"])
    # A value of jsonb comes in an array.
    values = ", ".join([f"r.c{i}" if f"c{i}" in given else f"e.value -> 'j{i}' -> 0" for i in numbers] + ["r.xid"])
    table = f"roir_data.g{generation}_intent"
    index.execute(
        text(
            f"INSERT INTO {table} ({columns}) SELECT {values} "
            "FROM jsonb_array_elements(CAST(:rows AS jsonb)) e (value) "
            f"CROSS JOIN LATERAL jsonb_populate_record(CAST(NULL AS {table}), e.value) r"
        ),
        {"rows": f"[{','.join(intents)}]"},
    )
