"""The command `status`, which only reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from airflow_roir.cli import complete
from airflow_roir.cli.app import AsJson, app, database_of, print_json, show, terminal_width

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database


@app.command()
def status(
    context: typer.Context,
    indexes: Annotated[
        list[str] | None,
        typer.Argument(metavar="INDEX...", help="Some indexes; by default all.", autocompletion=complete.indexes),
    ] = None,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="A live view, until nothing runs; without a terminal a line per change.")
    ] = False,
    history: Annotated[bool, typer.Option("--history", help="Who did what to one index, when and why.")] = False,
    segments: Annotated[
        bool, typer.Option("--segments", help="The segments of one index: sizes, reads, age; the worst first.")
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Measure one index's bloat, or segments, with pgstattuple, which reads all entries."
        ),
    ] = False,
) -> None:
    """Show the indexes, and their latest operations."""
    database = database_of(context)
    names = indexes or []
    index = names[0] if len(names) == 1 else None
    of_one = {"--history": history, "--segments": segments, "--exact": exact}
    if index is None and any(of_one.values()):
        named = next(name for name, given in of_one.items() if given)
        raise typer.BadParameter(f"{named} needs the name of one index")
    if watch and any(of_one.values()):
        raise typer.BadParameter("--watch goes with neither --history nor --segments nor --exact")
    if history and segments:
        raise typer.BadParameter("--history and --segments are two views: ask for one")
    if history and index is not None:
        print_history(database, index, as_json)
    elif segments and index is not None:
        print_segments(database, index, exact, as_json)
    elif watch:
        from airflow_roir.cli.watch import watch as follow

        raise typer.Exit(follow(database, names, as_json))
    else:
        from airflow_roir.cli.overview import print_overview
        from airflow_roir.engine.snapshot.overview import overview_of

        print_overview(overview_of(database, names, exact), as_json)


def print_segments(database: Database, index: str, exact: bool, as_json: bool) -> None:
    """Prints the segments of the active generation; as JSON in the order of their numbers."""
    from airflow_roir.cli.segments import segment_lines
    from airflow_roir.engine.snapshot.index import indexes

    [facts] = indexes(database, index, exact)
    if as_json:
        print_json([one.as_dict() for one in facts.segments])
        return
    for line in segment_lines(facts, terminal_width()):
        show(line)


def print_history(database: Database, index: str, as_json: bool) -> None:
    from airflow_roir.cli.cells import printable
    from airflow_roir.engine.control import operations

    events = operations.events(database, index)
    if as_json:
        print_json(
            [
                {
                    "at": e.at.isoformat(),
                    "operation_id": e.operation_id,
                    "actor": e.actor,
                    "action": e.action,
                    "detail": e.detail,
                }
                for e in events
            ]
        )
        return
    widest = max((len(e.action) for e in events), default=0)
    widest_number = max((len(str(e.operation_id)) for e in events if e.operation_id), default=0)
    for e in events:
        who = printable(e.actor)
        number = f"operation {e.operation_id}" if e.operation_id else ""
        number = f"{number:{len('operation ') + widest_number}}" if widest_number else ""
        show(f"{e.at:%Y-%m-%d %H:%M:%S %Z}  {number}  {e.action:{widest}}  {who}  {printable(e.detail or '')}".rstrip())
