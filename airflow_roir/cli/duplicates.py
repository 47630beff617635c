"""The command `duplicates`: lists the rows that share a key of a unique index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from airflow_roir.cli.app import AsJson, Index, app, database_of, show, show_as_it_is, terminal_width
from airflow_roir.definition import argument

if TYPE_CHECKING:
    from airflow_roir.engine.unique.duplicate_report import Duplicates, Group

# Rows of the printed table are aligned in groups of about this many.
TABLE = 2_000


@app.command()
def duplicates(
    context: typer.Context,
    index: Index,
    healed: Annotated[bool, typer.Option("--all", help="List the healed ones, too.")] = False,
    limit: Annotated[int | None, typer.Option(help="The most keys to list; by default all.", min=1)] = None,
    as_sql: Annotated[bool, typer.Option("--sql", help="Print statements that select the rows, for psql.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the rows that share a key of a unique index. Exits with 1 if there are any."""
    from airflow_roir.engine.unique import duplicate_report

    if as_sql and as_json:
        raise typer.BadParameter("give either --sql or --json")
    with database_of(context).transaction() as connection:
        found = duplicate_report.of_index(connection, index)
        groups = duplicate_report.groups(connection, found, limit=limit, healed=healed)
        if as_json:
            print_groups_as_json(found, groups)
        elif as_sql:
            _print_sql(found, groups)
        else:
            print_groups(found, groups, healed)
    if found.groups:
        raise typer.Exit(1)


def print_groups(found: Duplicates, groups: Iterable[Group], healed: bool = False) -> None:
    """Prints the groups as a table, with their totals."""
    from airflow_roir.cli.cells import fitted, printable
    from airflow_roir.quantity import counted, shared

    names = [f"{what} ({', '.join(of)})" for what, of in (("key", found.key), ("primary key", found.primary_key))]
    columns = [*map(printable, names), "partition", "found", *(["healed"] if healed else [])]
    ids: set[int] = set()
    for page in _pages(groups):
        ids.update(group.id for group in page)
        rows = list(_rows(page, healed))
        for line in fitted(columns, len(columns), rows, [[]] * len(rows), terminal_width()):
            show(line)
    listed = len(ids)
    what = "census" if found.census else "operation"
    total = f"{found.index}, {what} {found.operation_id}: {shared(found.groups, found.rows)}"
    if not healed and listed < found.groups:
        total += f", {counted(listed, 'key')} shown; roir duplicates {argument(found.index)} lists all"
    show(total)


def _pages(groups: Iterable[Group]) -> Iterator[list[Group]]:
    page: list[Group] = []
    rows = 0
    for group in groups:
        page.append(group)
        rows += len(group.rows)
        if rows >= TABLE:
            yield page
            page, rows = [], 0
    if page:
        yield page


def _rows(groups: list[Group], healed: bool) -> Iterator[tuple[str, ...]]:
    from airflow_roir.cli.cells import printable
    from airflow_roir.engine.unique.duplicate_report import listing

    for group in groups:
        for one in group.rows:
            cells = [
                printable(listing(one.key)),
                printable(listing(one.primary_key)),
                printable(one.partition or "not known"),
                f"{one.found_at:%Y-%m-%d %H:%M:%S}",
            ]
            if healed:
                cells.append("" if one.healed_at is None else f"{one.healed_at:%Y-%m-%d %H:%M:%S}")
            yield tuple(cells)


def print_groups_as_json(found: Duplicates, groups: Iterable[Group]) -> None:
    """Prints one JSON document, written while it is read: there may be very many groups."""
    head = {
        "index": found.index,
        "operation_id": found.operation_id,
        "census": found.census,
        "status": found.status,
        "groups": found.groups,
        "rows": found.rows,
    }
    show(f"{json.dumps(head, indent=2)[:-2]},")
    show('  "duplicates": [')
    before: str | None = None
    id_before: int | None = None
    for group in groups:
        facts = found.facts(group)
        # Further rows of a large group continue its list.
        continues = group.id == id_before
        if before is not None:
            show(f"{before}," if continues else f"{before}]}},")
        before = "      " + json.dumps(facts["rows"])[1:-1] if continues else f"    {json.dumps(facts)[:-2]}"
        id_before = group.id
    if before is not None:
        show(f"{before}]}}")
    show("  ]")
    show("}")


def _print_sql(found: Duplicates, groups: Iterable[Group]) -> None:
    from airflow_roir.engine.unique.statements import statements

    for group in groups:
        for statement in statements(found, group):
            show_as_it_is(statement)
