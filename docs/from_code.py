"""The reference, from the code: a comment `<!-- from the code: NAME -->` on a page becomes what NAME makes here."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main
from sphinx.application import Sphinx

from airflow_roir import cli
from airflow_roir.engine.lifecycle import PHASES
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.generation_state import ARROWS
from airflow_roir.operation import TRANSITIONS, Phase
from airflow_roir.provider import get_provider_info

ROOT = Path(__file__).parents[1]
SQL = ROOT / "migrations" / "sql"
# In a checkout the comment is nothing to see, so the words behind it tell a reader how to get the list.
PLACE = re.compile(r"<!-- from the code: ([a-z-]+)(?: ([^>]+?))? -->(?:\n\n\([^\n]*`make docs`[^\n]*\))?")
# The functions that users, and not our own code, call from SQL. The rest is listed by its file.
FOR_USERS = (
    "rows",
    "fresh",
    "strict",
    "pause",
    "resume",
    "change",
    "abort",
    "detach_partition",
    "cancel_attach",
    "guard",
    "unguard",
)


def cell(text: object) -> str:
    """A text for a cell of a table."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").strip()


def commands() -> Iterator[str]:
    """Every command with its usage, arguments and options, as `roir COMMAND --help` has them."""
    application: Any = typer.main.get_command(cli.app)
    yield from _parameters([p for p in application.params if p.name != "help"])
    for name, command in application.commands.items():
        arguments = [str(parameter.name).upper() for parameter in command.params if parameter.opts[0][0] != "-"]
        yield f"### roir {name}\n\n{inspect.cleandoc(command.help or '')}\n"
        yield f"```sh\n{' '.join(['roir', name, *arguments, '[options]'])}\n```\n"
        yield from _parameters(command.params)


def _parameters(parameters: list[Any]) -> Iterator[str]:
    shown = [parameter for parameter in parameters if parameter.name != "help"]
    if not shown:
        return
    yield "| | meaning | default |\n| --- | --- | --- |"
    for parameter in shown:
        is_option = parameter.opts[0].startswith("-")
        name = ", ".join(parameter.opts) if is_option else str(parameter.name).upper()
        default = parameter.default
        said = "" if default in (None, (), [], "", False) or parameter.required else f"`{cell(default)}`"
        if parameter.required:
            said = "needed"
        yield f"| `{name}` | {cell(parameter.help or '')} | {said} |"
    yield ""


def functions(which: str) -> Iterator[str]:
    """The functions of schema roir, from their comments: `for-users`, or the `rest` by file."""
    for file in sorted(SQL.glob("*.sql")):
        found = [one for one in _functions_of(file) if (one[0] in FOR_USERS) == (which == "for-users")]
        if found and which == "rest":
            yield f"### {file.name}\n"
        for _, signature, comment in found:
            yield f"```sql\n{signature}\n```\n\n{comment}\n"


def _functions_of(file: Path) -> Iterator[tuple[str, str, str]]:
    made = re.compile(
        r"((?:^--[^\n]*\n)*)^CREATE FUNCTION (roir\.(\w+)\(.*?\)(?:\s*RETURNS.*?)?)\s*(?:LANGUAGE|AS \$\$)",
        re.MULTILINE | re.DOTALL,
    )
    for comment, signature, name in made.findall(file.read_text()):
        text = " ".join(line.lstrip("- ") for line in comment.splitlines())
        yield name, re.sub(r"\s+", " ", signature), _plain(text)


def _plain(text: str) -> str:
    """A comment as Markdown: names as code, nothing taken for markup."""
    text = re.sub(r"([\\*\[<])", r"\\\1", text)
    return re.sub(r"(?<![`\w])(roir\.\w+|[a-z]+_[a-z_]+)(?![`\w])", r"`\1`", text)


def tables() -> Iterator[str]:
    """The tables of schema roir, their columns with what the migrations' COMMENTs say."""
    made = "".join(file.read_text() for file in sorted(SQL.glob("*.sql")))
    said = {
        name: re.sub(
            r"\(docs/([\w-]+\.md#[\w-]+)\)",
            r"([why](../\1))",
            cell("".join(re.findall(r"'((?:[^']|'')*)'", text)).replace("''", "'")),
        )
        for name, text in re.findall(
            r"^COMMENT ON (?:TABLE|COLUMN) roir\.(\S+) IS((?:\s*'(?:[^']|'')*')+);", made, re.M
        )
    }
    bodies = dict(re.findall(r"^CREATE TABLE roir\.(\w+) \(\n(.*?)^\);", made, re.MULTILINE | re.DOTALL))
    bodies["operation"] += "".join(re.findall(r"^    ADD (.*\n)", made, re.MULTILINE)).replace("\n", "\n    ")
    for table in sorted(bodies):
        yield f"## roir.{table}\n\n{said[table]}\n\n| column | type | meaning |\n| --- | --- | --- |"
        for column, kind, rest in re.findall(
            r"^    ([a-z_]+) ((?:double )?[a-z]+(?:\([\d, ]+\))?(?:\[\])?)(.*)", bodies[table], re.M
        ):
            other = re.search(r"REFERENCES roir\.(\w+)", rest)
            meaning = [f"row of `roir.{other.group(1)}`"] if other else []
            meaning += [said[f"{table}.{column}"]] if f"{table}.{column}" in said else []
            yield f"| `{column}` | {kind} | {': '.join(meaning)} |"
        yield ""


WORKING = {one.value for one in Phase if one is not Phase.DONE}


def transitions() -> Iterator[str]:
    """The transitions of an operation, with the reasons."""
    yield "| verb | from | to | because |\n| --- | --- | --- | --- |"
    for (verb, was, target, reason), phases in _grouped().items():
        phase = "any phase" if {*phases} == WORKING else ", ".join(f"`{one}`" for one in phases)
        yield f"| `{verb}` | `{was}`, {phase} | {target} | {reason} |"
    yield ""


def _grouped() -> dict[tuple[str, str, str, str], list[str]]:
    made: dict[tuple[str, str, str, str], list[str]] = {}
    for one in TRANSITIONS:
        target = f"`{one.to_status.value}`" + ("" if one.phase is one.to_phase else f", `{one.to_phase.value}`")
        made.setdefault((one.verb.value, one.status.value, target, one.reason), []).append(one.phase.value)
    return made


def arrows() -> Iterator[str]:
    """The same of the rows of other control tables."""
    yield "| table | from | to | because |\n| --- | --- | --- | --- |"
    for one in ARROWS:
        yield f"| `{one.table}` | `{one.was}` | `{one.becomes}` | {one.reason} |"
    yield ""


def view() -> Iterator[str]:
    """The columns of roir.resumable_operations, in their order."""
    text = (SQL / "status.sql").read_text().partition("CREATE VIEW roir.resumable_operations")[2]
    selected = text[text.index("SELECT") : text.index("\n  FROM")]
    names = [line.rstrip(",").split(" AS ")[-1].split(".")[-1].strip() for line in _expressions(selected[6:])]
    yield ", ".join(f"`{name}`" for name in names) + "."


def _expressions(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for place, letter in enumerate(text + ","):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            yield re.sub(r"\s+", " ", text[begin:place]).removesuffix(" END")
            begin = place + 1


def dags() -> Iterator[str]:
    """The DAGs of dags/ with their parameters."""
    for file in sorted((ROOT / "dags").glob("*.py")):
        dag = runpy.run_path(str(file))["dag"]
        yield f"## {dag.dag_id}\n\n{dag.description}.\n"
        yield "| parameter | in the form | meaning | values | default |\n| --- | --- | --- | --- | --- |"
        for name in dag.params:
            param = dag.params.get_param(name)
            default = "" if not param.has_value or param.value is None else f"`{cell(param.value)}`"
            title, meaning = param.schema.get("title", ""), param.description or ""
            yield f"| `{name}` | {cell(title)} | {cell(meaning)} | {_values(param.schema)} | {default} |"
        yield ""


def _values(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    types = schema.get("type", "string")
    kinds = [types] if isinstance(types, str) else types
    said = {"string": "text", "integer": "whole number", "boolean": "yes or no", "number": "number", "array": "list"}
    text = " or ".join(said[kind] for kind in kinds if kind != "null")
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None:
        text += f", {low:,} to {high:,}" if high is not None else f", from {low:,}"
    return text + (", or empty" if "null" in kinds else "")


def limits() -> Iterator[str]:
    """The fields of Limits with their defaults, and the comments above them."""
    text = inspect.getsource(Limits)
    yield "| limit | default | why |\n| --- | ---: | --- |"
    comment: list[str] = []
    names = {field.name: field.default for field in fields(Limits)}
    last = ""
    for line in text.splitlines():
        if match := re.match(r"    # (.*)", line):
            comment.append(match.group(1))
        elif (match := re.match(r"    (\w+): ", line)) and match.group(1) in names:
            last = " ".join(comment) or last
            value: Any = names[match.group(1)]
            yield f"| `{match.group(1)}` | {value:,} | {cell(last)} |"
            comment = []
    yield ""


def configuration() -> Iterator[str]:
    """The provider's options in airflow.cfg."""
    sections: dict[str, Any] = get_provider_info().get("config", {})
    if not sections:
        yield "The provider adds no options to `airflow.cfg`."
    for section, about in sections.items():
        yield f"| option of `[{section}]` | meaning | default |\n| --- | --- | --- |"
        for name, option in about["options"].items():
            yield f"| `{name}` | {cell(option['description'])} | `{cell(option.get('default'))}` |"


def phases() -> Iterator[str]:
    """The phases of operations, with what their workers claim."""
    yield "| phase | pieces | what it does |\n| --- | --- | --- |"
    for phase in PHASES.values():
        yield f"| `{phase.name.value}` | {phase.noun}s | {cell(phase.why)} |"
    yield ""


MAKERS: dict[str, Any] = {
    "phases": phases,
    "commands": commands,
    "functions": functions,
    "tables": tables,
    "transitions": transitions,
    "arrows": arrows,
    "view": view,
    "dags": dags,
    "limits": limits,
    "configuration": configuration,
}


def fill(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Puts the generated parts into a page, as Markdown."""

    def made(place: re.Match[str]) -> str:
        name, argument = place.groups()
        return "\n".join(MAKERS[name](*([argument] if argument else [])))

    source[0] = PLACE.sub(made, source[0])


# `names: what they are`, at the start of a paragraph or of a line of the same block.
PARAMETER = re.compile(r"^((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): (.*)$")


def as_list(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """A docstring in the project's plain style as reStructuredText: each parameter an item, a section a link."""
    made: list[str] = []
    within = False
    for index, line in enumerate(lines):
        match = PARAMETER.match(line)
        # A continuation is indented; a sentence with a colon isn't, and has more words than a name.
        if match and (not lines[index - 1].strip() or within):
            if not within and made and made[-1].strip():
                made.append("")
            made.append(f"* **{match.group(1)}**: {match.group(2)}")
            within = True
        elif within and line.startswith("    "):
            made.append("  " + line.strip())
        else:
            if within and line.strip():
                made.append("")
            within = False
            made.append(line)
    text = "\n".join(made)
    lines[:] = re.sub(
        r"docs/([\w-]+)\.md#([\w-]+)", lambda m: f"`{m.group(1)} <../{m.group(1)}.html#{m.group(2)}>`__", text
    ).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", as_list)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
