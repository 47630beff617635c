"""The loop of commands that work in batches: rows of an attach, entries of a detach, holders of a key's shard.

These commands have no operation, so there is no run to fence and no worker to share with: they claim no pieces
(`claims.Pieces`). Several of a kind may run at once, and each may be killed at any instruction:

- rows that are copied (`copy_rows`): a batch commits rows and watermark together, by compare-and-set;
- entries that are removed (`remove_entries`): a batch checks each entry, so it may be repeated;
- holders that are filled (`shards.unique.enforce`): all or nothing, another call begins with none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from airflow_roir.engine.database import retry
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.retry.patience import Patience

Piece = TypeVar("Piece")
Done = TypeVar("Done")


def in_batches(
    attempts: Attempts,
    pieces: Iterable[Piece],
    body: Callable[[Connection, Piece], Done],
    report: Callable[[str], None],
    outage_s: float | None = None,
) -> Iterator[Done]:
    """The results of `body` for each piece. A piece is one transaction, committed before the next piece is taken.

    attempts: at the transaction's locks; each batch has all of their patience. report: gets a line with the sessions
    for which a batch waits. outage_s: how long, in seconds, to wait for a server that is out of reach; None if a lost
    session must end the loop.
    Raises what `Attempts.run` raises. Earlier batches stay committed.
    """
    patience = None if outage_s is None else Patience(attempts.database.limits, outage_s=outage_s)
    for piece in pieces:
        batch = partial(attempts.run, partial(_at, body, piece), report)
        yield batch() if patience is None else retry(batch, patience)


def _at(body: Callable[[Connection, Piece], Done], piece: Piece, connection: Connection) -> Done:
    return body(connection, piece)
