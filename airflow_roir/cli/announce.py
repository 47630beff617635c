"""The command `announce`: chooses the side that announces the writes of an index over shards."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from airflow_roir.cli.app import Index, app, database_of, say, show


class By(str, Enum):
    """The side that announces."""

    server = "server"
    client = "client"
    off = "off"


@app.command()
def announce(
    context: typer.Context,
    index: Index,
    by: Annotated[
        By,
        typer.Option(
            help="Announced by the shards' servers (postgres_fdw), the clients (airflow_roir.announcing), or neither."
        ),
    ],
) -> None:
    """Announce each write in the shards before it commits. Strict reads and unique indexes need that."""
    from airflow_roir.shards.announce import announce as announcing
    from airflow_roir.shards.unique import enforce

    database = database_of(context)
    left = announcing.announce(database, index, None if by is By.off else by.value, say)
    for line in left:
        say(line)
    if left:
        show(f"strict reads of {index} are refused; the rest ends by the same command later, or by roir clean-up")
        return
    if by is By.off:
        show(f"the writes of {index} are not announced any more; strict reads are refused")
        return
    show(f"the writes of {index} are announced; strict reads begin once each shard has been shipped again")
    if enforce.enforce_index(database, index, say):
        show(f"{index} is unique over all shards from now on")
