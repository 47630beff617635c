"""The command `ship`: ships the writes of shards to the indexes over them."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from airflow_roir.cli.app import AsJson, app, database_of, print_json, print_json_line, say
from airflow_roir.errors import InvalidInput, RoirError
from airflow_roir.span import seconds

# To keep `fresh_at` younger than this costs hundreds of transactions a second.
SHORTEST_S = 0.05


@app.command()
def ship(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Ship what there is, and end.")] = False,
    every: Annotated[
        str, typer.Option(help="While nothing is written, look this often, and keep indexes this fresh: 1s or 200ms.")
    ] = "1s",
    shards: Annotated[str | None, typer.Option(help="Only these shards, comma-separated.")] = None,
    indexes: Annotated[str | None, typer.Option(help="Only these indexes, comma-separated.")] = None,
    warn_age: Annotated[
        str | None, typer.Option("--warn-age", help="Warn of a shard that is further behind than this: 30s, 5min.")
    ] = None,
    warn_rows: Annotated[
        int | None, typer.Option("--warn-rows", help="Warn of a shard that has more rows than this to ship.", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ship the shards' changes to their indexes. Runs until Ctrl-C or SIGTERM; several shippers share the work."""
    every_s = _every(every)
    warned = seconds("--warn-age", warn_age) or None
    database = database_of(context).named("roir ship")
    from airflow_roir.engine.schema.schema import check_schema
    from airflow_roir.shards.ship.freshness import Alarm
    from airflow_roir.shards.ship.shipping import Shipper, check_shards, index_ids, ship_once

    with database.transaction() as connection:
        check_schema(connection, writes=True)
        ids = None if indexes is None else index_ids(connection, _names(indexes))
        names = None if shards is None else check_shards(connection, _names(shards))
    alarm = Alarm(warned, warn_rows) if warned or warn_rows else None

    def report(line: str) -> None:
        if as_json:
            print_json_line({"event": line})
        else:
            say(line)

    shipper = Shipper(database, report, every_s, names, ids, alarm=alarm)
    if once:
        rows = ship_once(shipper)
        if alarm is not None:
            with database.transaction() as connection:
                for line in alarm.look(connection, shipper.owner):
                    report(line)
        if as_json:
            print_json({"shipped": rows})
        else:
            say(f"shipped {rows:,} entries")
        return
    told = threading.Event()

    def end(*_: object) -> None:
        told.set()
        shipper.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    report(f"{shipper.owner} ships; SIGTERM or Ctrl-C ends it")
    with shipper.running() as thread:
        while not told.wait(1.0):
            if not thread.is_alive():
                raise RoirError("the shipper ended with an error; its last message says why")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _every(text: str) -> float:
    try:
        found = float(text[:-2]) / 1000 if text.endswith("ms") else float(seconds("--every", text) or 0)
    except ValueError:
        raise InvalidInput(f"--every is {text!r}; it must be a duration, such as 1s or 200ms") from None
    if not SHORTEST_S <= found <= 3600:
        raise InvalidInput(f"--every is {text}; it must be from {int(SHORTEST_S * 1000)}ms to 1h")
    return found
