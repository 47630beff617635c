"""Writes the SQL of live options, and the tables of the docs that are made from code: `make options`. Tests compare."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from airflow_roir import cli  # noqa: E402 - found by the path above
from airflow_roir.engine.compact.bloat import Bloat  # noqa: E402
from airflow_roir.engine.compact.segment import Segment  # noqa: E402
from airflow_roir.engine.metrics.families import DATABASE, FAMILIES, INDEX, OPERATION  # noqa: E402
from airflow_roir.engine.snapshot.index import Generation, IndexFacts, Verified  # noqa: E402
from airflow_roir.engine.snapshot.operation import OperationStatus  # noqa: E402
from airflow_roir.engine.snapshot.overview import Overview  # noqa: E402
from airflow_roir.engine.snapshot.shards import ShardLag  # noqa: E402
from airflow_roir.option import Kind, Option  # noqa: E402
from airflow_roir.options import LIVE, VerifyOptions, options_of  # noqa: E402

SQL = """\
-- The options that change while an operation lives, made from airflow_roir/options.py by `make options`: edit that.

-- Each is a column of the operation's row.
ALTER TABLE roir.operation
    {columns};

-- The options that users may change. nothing: the meaning of 0, or `off`, for which the column is NULL. of_builds: no
-- verification and no compaction has the option. apart: only an index over shards has it.
CREATE FUNCTION roir.live_options()
RETURNS TABLE (ordinal integer, name text, lowest integer, highest integer, nothing text,
               of_builds boolean, apart boolean)
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    VALUES {rows}
$$;

-- The options that are given and let workers do less than they could.
CREATE FUNCTION roir.slowed_by(o roir.operation) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object({slowing}))
$$;

-- Writes the options of an operation's row as change_options has set them, with the governor's grant and the notice.
CREATE FUNCTION roir.write_options(o roir.operation) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.operation x
       SET {sets},
           granted = o.granted, granted_at = o.granted_at, notice = o.notice
     WHERE x.id = o.id AND x.status IN ('running', 'paused')
$$;

-- Changes the options of a running or paused operation, whatever run drives it.
CREATE FUNCTION roir.change(index text,
                            {parameters},
                            actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN roir.request_change(index, jsonb_build_object(
        {wishes}), actor);
END $$;

-- paused -> running, for a run that waits for it (a DAG run continues automatically), with new options if given.
CREATE FUNCTION roir.resume(index text,
                            {parameters},
                            actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN roir.request_resume(index, jsonb_build_object(
        {wishes}), actor);
END $$;
"""


def live_options_sql() -> str:
    """migrations/sql/live_options.sql."""
    everywhere = {one.name for one in options_of(VerifyOptions)}
    options = list(LIVE.values())
    return SQL.format(
        columns=",\n    ".join(map(_column, options)),
        rows=",\n           ".join(_row(place, one, one.name in everywhere) for place, one in enumerate(options, 1)),
        slowing=_wrapped((f"'{one.name}', o.{one.name}" for one in options if one.slows), 48),
        sets=_wrapped((f"{name} = o.{name}" for name in LIVE), 11),
        parameters=_wrapped((f"{one.name} {_type(one)} DEFAULT NULL" for one in options), 28),
        wishes=_wrapped((f"'{name}', {name}" for name in LIVE), 8),
    )


def _type(option: Option) -> str:
    return "text" if option.kind.is_text else "integer"


def _column(option: Option) -> str:
    if option.kind is Kind.LIMITS:
        return f"ADD {option.name} jsonb NOT NULL DEFAULT '{{}}'"
    if option.kind.is_text:
        return f"ADD {option.name} text"
    sort = "integer" if option.zero else "integer NOT NULL"
    if option.begins is not None and not option.zero:
        sort += f" DEFAULT {option.begins}"
    return f"ADD {option.name} {sort} CHECK ({option.name} BETWEEN {option.least} AND {option.most})"


def _row(place: int, option: Option, everywhere: bool) -> str:
    bounds = "NULL, NULL" if option.kind.is_text else f"{option.least_asked}, {option.most}"
    none = f"'{option.none}'" if option.none else "NULL"
    return f"({place}, '{option.name}', {bounds}, {none}, {str(not everywhere).lower()}, {str(option.apart).lower()})"


def _wrapped(parts: Iterator[str], indent: int) -> str:
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) + indent + 1 <= 118:
            lines[-1] = joined
        else:
            lines.append(part)
    return (",\n" + " " * indent).join(lines)


# Where the guide says more, by the flag or the parameter.
MORE = {
    "windows": "throttle.md#windows",
    "throttle": "throttle.md",
    "priority": "throttle.md#the-queue",
    "warn-after": "operate.md#long-pauses",
    "shards": "shards.md#build",
    "scan": "architecture.md#scan",
    "covering": "architecture.md#covering",
    "with": "plan.md#several-indexes-of-one-table",
    "ignore-row-security": "rights.md#row-level-security",
    "ignore-publications": "upgrade.md#publications",
    "segment-size": "compact.md#look-at-the-segments",
    "conn-id": "shards.md#set-up",
    "spark": "spark.md",
}


def options_table() -> str:
    """The options of all commands, each once, with the commands that have it and their help."""
    application: Any = typer.main.get_command(cli.app)
    found: dict[tuple[str, str], tuple[str, list[str]]] = {}
    parameters = [("`roir` itself", one) for one in application.params]
    for name, command in application.commands.items():
        each = getattr(command, "commands", {name: command}).values()
        parameters += [(name, parameter) for one in each for parameter in one.params]
    for command, parameter in parameters:
        flag = parameter.opts[0]
        if not flag.startswith("--") or flag == "--help":
            continue
        help = (parameter.help or "Refused; the error says what to use instead").removesuffix(".")
        # Where a command says it with other bounds or defaults it is the same option.
        _, commands = found.setdefault((flag, re.split("[,;:.(]", help)[0]), (help, []))
        if command not in commands:
            commands.append(command)
    rows = (
        (f"`{flag}`", ", ".join(commands), _meaning(help, flag[2:])) for (flag, _), (help, commands) in found.items()
    )
    return _table(("option", "of", "meaning"), rows)


def form_table() -> str:
    """The fields of the form of the DAG `rebuild_index`."""
    dag = runpy.run_path(str(ROOT / "dags" / "rebuild_index.py"))["dag"]
    rows = []
    for name in dag.params:
        param = dag.params.get_param(name)
        text = param.description.removesuffix(".")
        if "values_display" in param.schema:
            text += f". {'; '.join(param.schema['values_display'].values())}"
        rows.append((param.schema["title"], f"`{name}`", _meaning(text, name.replace("_", "-"))))
    return _table(("form field", "parameter", "meaning"), rows)


# The tables of fields that `roir status --json` has, by whose docstrings say what they mean.
DESCRIBED = {
    "index": (IndexFacts,),
    "operation": (OperationStatus, Overview.as_dict),
    "generation": (Generation,),
    "verified": (Verified,),
    "bloat": (Bloat,),
    "shard": (ShardLag.as_dict,),
    "segment": (Segment,),
}
# An index's rows are its own field, and its segments a list that `--segments` prints.
LEFT_OUT = {("bloat", "rows"), ("index", "segments")}
# `names: what they are`, at the start of a line; what is continued is indented.
FIELD = re.compile(r"^(\w+(?:, \w+)*): (.*(?:\n {4}.*)*)", re.MULTILINE)


def fields_of(*described: Any) -> dict[tuple[str, ...], str]:
    """The fields that docstrings list, with what they mean."""
    found = {}
    for one in described:
        for names, meaning in FIELD.findall(inspect.getdoc(one) or ""):
            found[tuple(names.split(", "))] = re.sub(r"\s+", " ", meaning).removesuffix(".")
    return found


def fields_table(name: str) -> str:
    """The fields of an object of `roir status --json`."""
    rows = []
    for names, meaning in fields_of(*DESCRIBED[name]).items():
        shown = LIVE if names == ("options",) else [one for one in names if (name, one) not in LEFT_OUT]
        if shown:
            rows.append((", ".join(f"`{one}`" for one in shown), _linked(meaning)))
    return _table(("field", "meaning"), rows)


def _linked(text: str) -> str:
    return re.sub(r" \(docs/([\w/-]+\.md(?:#[\w-]+)?)\)", r" ([more](\1))", text)


def exit_codes_table() -> str:
    """The exit codes, as `roir --help` has them."""
    told = re.sub(r"\s+", " ", cli.EXIT_CODES).strip().removeprefix("Exit codes: ").removesuffix(".")
    return _table(("exit code", "meaning"), (part.split(" ", 1) for part in told.split("; ")))


def commands_table() -> str:
    """Every command with the first sentence of its help."""
    application: Any = typer.main.get_command(cli.app)
    return _table(
        ("command", "does"),
        (
            (f"`roir {name}`", re.split(r"(?<=\.)\s", inspect.cleandoc(command.help or ""))[0].removesuffix("."))
            for name, command in application.commands.items()
        ),
    )


def metrics_table(of: str) -> str:
    """The metrics of the database, the indexes or the operations."""
    common = {*DATABASE, *INDEX, *OPERATION}
    return _table(
        ("metric", "labels", "meaning"),
        (
            (
                f"`{name}`",
                ", ".join(f"`{label}`" for label in family.labels if label not in common),
                family.help.removesuffix("."),
            )
            for name, family in FAMILIES.items()
            if family.of == of
        ),
    )


def _meaning(text: str, name: str) -> str:
    more = MORE.get(name.removesuffix("-s"))
    text = text.replace("|", "\\|").replace("*", "\\*")
    return text + (f" ([more]({more}))" if more else "")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(path: Path, text: str, tables: dict[str, str]) -> str:
    """A page of the docs with the tables in the places that it has for them, and with its lists of live options."""
    for name, table in tables.items():
        up = "" if path.parent.name == "docs" else "../"
        table = re.sub(r"\]\((?=[a-z])", f"]({up}", table).replace(f"]({path.name}#", "](#")
        place = re.compile(rf"(<!-- made: {name} -->\n\n).*?(\n<!-- end -->)", re.DOTALL)
        text = place.sub(lambda found, table=table: found[1] + table + found[2], text)  # type: ignore[misc]
    columns = _wrapped(iter([*LIVE, "granted", "granted_at"]), 14)
    listed = ", ".join(f"`{name}`" for name in LIVE)
    text = re.sub(r"\| `parallelism`, [`\w, ]* \| the options", lambda _: f"| {listed} | the options", text)
    text = re.sub(r"GRANT UPDATE \(parallelism[^)]*\)", lambda _: f"GRANT UPDATE ({columns})", text)
    columns = _wrapped((f"`{name}`" for name in LIVE), 0)
    place = re.compile(r"(?<=null: none\);\n).*?(?= \(the options that may change\))", re.DOTALL)
    return place.sub(lambda _: columns, text)


def files(with_airflow: bool = True) -> dict[Path, str]:
    """Every file with what belongs into it. with_airflow: the form, too, which needs Airflow to be read."""
    tables = {
        "options": options_table(),
        "commands": commands_table(),
        "exit-codes": exit_codes_table(),
        **{f"fields-{name}": fields_table(name) for name in DESCRIBED},
        **{f"metrics-{of}": metrics_table(of) for of in ("database", "index", "operation")},
    }
    if with_airflow:
        tables["form"] = form_table()
    pages = {path: path.read_text() for folder in ("docs", "docs/reference") for path in (ROOT / folder).glob("*.md")}
    for name in tables:
        assert any(f"<!-- made: {name} -->" in text for text in pages.values()), f"no page has a place for {name}"
    made = {path: page(path, text, tables) for path, text in pages.items()}
    return {
        ROOT / "migrations" / "sql" / "live_options.sql": live_options_sql(),
        **{path: text for path, text in made.items() if text != pages[path] or "<!-- made: " in text},
    }


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
