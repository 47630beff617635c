"""The command `role-sql`: prints the SQL that creates a role which may build."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import app, show_as_it_is


@app.command(name="role-sql")
def role_sql(
    name: Annotated[str, typer.Argument(help="The role: a name, quoted as in SQL.")],
    schema: Annotated[str, typer.Option("--schema", help="Where indexes are to be, comma-separated.")] = "public",
    tables: Annotated[
        str | None,
        typer.Option("--tables", help="Sources, comma-separated; the role becomes a member of their owners."),
    ] = None,
) -> None:
    """Print the SQL that makes a login role which may build. Connects to no database."""
    from airflow_roir.definition import parse_columns, parse_name
    from airflow_roir.engine.schema import role
    from airflow_roir.errors import InvalidInput

    found = parse_name(name, "role")
    if found.schema is not None:
        raise InvalidInput(f"role {name!r}: a role has no schema; a name with a dot in it is quoted")
    show_as_it_is(
        role.role_sql(
            found.name,
            parse_columns(schema, "schema"),
            [parse_name(table, "table") for table in split_names(tables)],
        )
    )


def split_names(text: str | None) -> list[str]:
    """The names between commas; a comma inside of quotes doesn't separate."""
    names, quoted = [""], False
    for character in text or "":
        quoted ^= character == '"'
        if character == "," and not quoted:
            names.append("")
        else:
            names[-1] += character
    return names if text else []
