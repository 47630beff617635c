"""The commands `roir shard`: add, list and remove shards."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import AsJson, app, database_of, print_json, say, show, warn_of_passwords
from airflow_roir.errors import InvalidInput

shards = typer.Typer(help="The servers that have the tables of indexes over shards.", no_args_is_help=True)
app.add_typer(shards, name="shard")

Name = Annotated[str, typer.Argument(help="The shard's name, which each of its entries contains.")]


@shards.command()
def add(
    context: typer.Context,
    name: Name,
    shard_dsn: Annotated[
        str | None,
        typer.Option("--dsn", envvar="ROIR_SHARD_DSN", help="The shard's database, reached as its table's owner."),
    ] = None,
    conn_id: Annotated[str | None, typer.Option("--conn-id", hidden=True)] = None,
    index_dsn: Annotated[
        str | None,
        typer.Option(
            "--index-dsn",
            envvar="ROIR_INDEX_DSN",
            help="How the shard's server reaches the index server, to announce writes.",
        ),
    ] = None,
) -> None:
    """Add a shard, or change its address. Creates or upgrades the small schema roir_shard there."""
    from airflow_roir.shards import registry

    if conn_id is not None:
        raise InvalidInput(
            "--conn-id can't be read here: name the shard's connection in Airflow, in the extra of the index server's "
            f'connection: {{"roir_shards": {{"{name}": "{conn_id}"}}}}. A task that builds over the shard then adds '
            "it. Or give --dsn here"
        )
    warn_of_passwords(context, shard_dsn="ROIR_SHARD_DSN", index_dsn="ROIR_INDEX_DSN")
    found = registry.add(database_of(context), name, shard_dsn, index_dsn, say)
    show(f"shard {found.name} is there")


@shards.command(name="list")
def list_(
    context: typer.Context,
    check: Annotated[bool, typer.Option("--check", help="Connect to each shard, and show its problems.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the shards, with their indexes and how far behind. Also shows their addresses."""
    from airflow_roir.cli.cells import printable, table
    from airflow_roir.quantity import duration
    from airflow_roir.shards import registry

    database = database_of(context)
    found = registry.listed(database)
    problems = {one.name: registry.probe(database, one.name) if check else one.problem for one in found}
    if as_json:
        print_json([one.as_dict() | {"problem": problems[one.name]} for one in found])
        return
    if not found:
        show("no shards")
        return
    rows = [
        (
            printable(one.name),
            printable(one.place),
            printable(", ".join(one.indexes)),
            "" if one.lag_s is None else duration(one.lag_s),
        )
        for one in found
    ]
    for line, one in zip(table([("shard", "place", "indexes", "lag"), *rows], 3), [None, *found], strict=True):
        show(line)
        for note in (problems[one.name], one.doubt) if one else ():
            if note:
                show(f"    {printable(note)}")


@shards.command()
def remove(
    context: typer.Context,
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Remove it even if its server can't be reached.")] = False,
) -> None:
    """Remove a shard that no index uses, and roir's schema from it."""
    from airflow_roir.shards import registry

    registry.remove(database_of(context), name, force, say)
    show(f"shard {name} is removed")
