"""Holds README and docs against the code: whatever they name exists, and what users can do is described."""

from __future__ import annotations

import ast
import re
import runpy
from dataclasses import fields
from html import unescape
from pathlib import Path

import pytest
import typer.main

from airflow_roir import cli, errors
from airflow_roir.engine import database, fold
from airflow_roir.engine.compact.bloat import Bloat
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.engine.control import long_pause, sign_of_life
from airflow_roir.engine.generation import entry
from airflow_roir.engine.retry.trouble import Trouble
from airflow_roir.engine.snapshot.index import Generation, IndexFacts, Verified
from airflow_roir.engine.snapshot.operation import ABANDONED, DETAILS, INTERNAL, OperationStatus
from airflow_roir.engine.snapshot.shards import ShardLag
from airflow_roir.entry_state import ENTRY_STATES
from airflow_roir.generation_state import ARROWS
from airflow_roir.operation import TRANSITIONS, Kind, Phase, Status, Verb
from airflow_roir.options import BuildOptions
from airflow_roir.task import dag_switch

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# By hand: the map of the code and the pages of the reference are made from it.
DOCS = (
    README,
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in ("code-map.md", "index.md")),
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
)
CONTROL_SCHEMA = "".join(file.read_text() for file in (ROOT / "migrations" / "sql").glob("*.sql"))
# Each table of it with its columns.
TABLES = {
    name: re.findall(r"^    ([a-z_]+) ", body, re.MULTILINE)
    for name, body in re.findall(r"^CREATE TABLE roir\.(\w+) \(\n(.*?)^\);", CONTROL_SCHEMA, re.MULTILINE | re.DOTALL)
}
TABLES["operation"] += re.findall(r"^    ADD ([a-z_]+) ", CONTROL_SCHEMA, re.MULTILINE)
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
FOLDERS = ("airflow_roir", "dags", "demo", "docs", "migrations", "scripts", "servers", "tests")

# A page of ours, not another project's, with a section or without.
NAMED_PAGE = re.compile(r"(?<![\w/-])(?<!its )docs/([\w/-]+\.md)(?:#([a-z0-9-]+))?")

by_document = pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)


def code_of(document: Path) -> list[str]:
    """Everything that is set as code: spans and blocks, continued lines joined, comments left out."""
    text = document.read_text()
    indented = re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)
    fenced = re.findall(r"^```(?:sh|sql)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = "\n".join(indented + fenced).replace("\\\n", " ")
    return re.findall(r"`([^`\n]+)`", text) + [line.split(" #", 1)[0] for line in blocks.split("\n")]


def rows_of(first_cell: str) -> list[list[str]]:
    """The rows of the only table of docs/ whose header begins with that cell, or cells, as texts without back-ticks."""
    header = re.compile(rf" *\| {re.escape(first_cell)} \|")
    pages = [page.read_text().splitlines() for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    [(lines, begin)] = [(lines, i) for lines in pages for i, line in enumerate(lines) if header.match(line)]
    rows = []
    for line in lines[begin + 2 :]:
        if not line.lstrip().startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")])
    return rows


def options_of(command: str) -> set[str]:
    # A group has the options of its commands.
    commands = getattr(COMMANDS[command], "commands", {command: COMMANDS[command]}).values()
    return {
        name
        for one in commands
        for parameter in one.params
        for name in parameter.opts
        if name.startswith("--") and name != "--help"
    }


@by_document
def test_every_make_target_and_variable_exists(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for code in code_of(document):
        for call in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)((?: [A-Z]+=)?)", code):
            target, variable = call
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name}: make {target}"
            if variable:
                assert re.search(rf"^{variable.strip(' =')} \?=", makefile, re.MULTILINE), f"{document.name}: {call}"


@by_document
def test_every_command_and_option_exists(document: Path) -> None:
    for code in code_of(document):
        for command, rest in re.findall(r"(?:^|\s)roir ([a-z][a-z-]*)(.*)", code):
            assert command in COMMANDS, f"{document.name}: roir {command}"
            unknown = set(re.findall(r"(?<=\s)--[a-z-]+", rest)) - options_of(command)
            assert not unknown, f"{document.name}: roir {command} has no {unknown}"


def test_every_command_that_code_names_exists() -> None:
    """In docstrings, messages and comments: as code, or after "run"."""
    for folder in ("airflow_roir", "dags", "demo", "migrations"):
        for file in (file for file in (ROOT / folder).rglob("*.*") if file.suffix in (".py", ".sql", ".js", ".html")):
            named = set(re.findall(r"(?:`|\brun )roir ([a-z][a-z-]*)", file.read_text()))
            assert named <= COMMANDS.keys(), f"{file.relative_to(ROOT)}: {named - COMMANDS.keys()}"


def test_an_error_ends_with_an_exit_code_that_is_told() -> None:
    told = {int(code) for code in re.findall(r"(?:^|[:;]) (\d+) ", re.sub(r"\s+", " ", cli.EXIT_CODES))}
    used = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.RoirError)
    }
    assert used <= told


def test_the_table_of_dags_is_the_codes() -> None:
    """The form's table is made from the DAG: tests/airflow/test_dags.py compares."""
    ids = {
        keyword.value.value
        for file in (ROOT / "dags").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "dag_id" and isinstance(keyword.value, ast.Constant)
    }
    assert {dag for dag, _ in rows_of("DAG")} == ids


def test_every_operator_is_described_and_no_other() -> None:
    operators = {
        name
        for file in (ROOT / "airflow_roir" / "operators").glob("*.py")
        for name in re.findall(
            r"^class (\w+(?:Index|Indexes|IndexBuild|Partition|Changes)Operator)\(", file.read_text(), re.MULTILINE
        )
    }
    assert operators
    assert set(re.findall(r"\b[A-Z]\w+Operator\b", "".join(page.read_text() for page in DOCS))) == operators


@by_document
def test_every_path_and_test_exists(document: Path) -> None:
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
    for code in code_of(document):
        for path, test in re.findall(rf"(?<![\w/.$-])((?:{'|'.join(FOLDERS)})/[\w./-]*)(?:::(\w+))?", code):
            assert (ROOT / path).exists(), f"{document.name}: {path}"
            if test:
                assert f"def {test}(" in (ROOT / path).read_text(), f"{document.name}: {path}::{test}"
        for name in re.findall(r"^([a-z_]+\.(?:py|sql))$", code):
            assert name in names, f"{document.name}: {name}"
        for name, test in re.findall(r"^(test_\w+\.py)::(\w+)$", code):
            files = [*(ROOT / "tests").rglob(name)]
            assert any(f"def {test}(" in file.read_text() for file in files), f"{document.name}: {name}::{test}"


@by_document
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = document if not path else document.parent / path
        assert target.exists(), f"{document.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{document.name}: {link}"


def test_every_section_that_the_code_names_exists() -> None:
    for folder in FOLDERS:
        for file in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.sql")]:
            for page, anchor in NAMED_PAGE.findall(file.read_text()):
                path = ROOT / "docs" / page
                assert path.exists(), f"{file.relative_to(ROOT)}: docs/{page}"
                headings = {slug(heading) for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)}
                assert not anchor or anchor in headings, f"{file.relative_to(ROOT)}: docs/{page}#{anchor}"


def test_a_failure_is_found_in_the_table_at_a_glance() -> None:
    """Found: cells of ninety words, in which a reader looked for what helps."""
    page = (ROOT / "docs" / "failures.md").read_text()
    rows = re.findall(r"^\| \[(.*)\]\(#[\w-]+\) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 10
    for what, helps in rows:
        assert max(len(what), len(helps)) <= 100, what
        section = page.partition(f"\n## {what}\n")[2].partition("\n## ")[0]
        assert all(words in section for words in ("*Index build* says:", "`roir status` says:", "![")), what


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.read_text().split()) <= 900


def slug(heading: str) -> str:
    """The anchor that code hosts give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_pictures_are_shown_and_small() -> None:
    shown = "".join(document.read_text() for document in (*DOCS, ROOT / "docs" / "index.md"))
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"images/{picture.name}" in shown
        assert picture.stat().st_size < 300_000


@by_document
def test_every_relation_and_function_of_the_control_schema_exists(document: Path) -> None:
    made = set(re.findall(r"CREATE (?:FUNCTION|VIEW|TYPE) roir\.(\w+)", CONTROL_SCHEMA)) | {"schema_version"}
    # Also a setting.
    made |= {*TABLES, "on_conflict"}
    for code in code_of(document):
        assert set(re.findall(r"(?<!\w)roir\.(\w+)", code)) <= made, f"{document.name}: {code}"


def test_every_table_and_column_of_the_control_schema_has_a_comment() -> None:
    """But what the reference explains once for all tables, and references."""
    said = set(re.findall(r"^COMMENT ON (?:TABLE|COLUMN) roir\.(\S+) IS", CONTROL_SCHEMA, re.MULTILINE))
    shared = {column for column, _ in rows_of("column of several tables")}
    references = set(re.findall(r"^    ([a-z_]+) .*\bREFERENCES\b", CONTROL_SCHEMA, re.MULTILINE))
    assert said >= TABLES.keys()
    for table, columns in TABLES.items():
        missing = [one for one in columns if f"{table}.{one}" not in said and one not in shared | references]
        assert not missing, f"roir.{table}: {missing}"


def test_the_reference_shows_every_column_and_every_transition() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "from_code.py"))
    shown = "\n".join(made["tables"]())
    for table, columns in TABLES.items():
        section = shown.partition(f"## roir.{table}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)) == set(columns), table
    assert set(re.findall(r"\| ([^|]+) \|$", "\n".join(made["transitions"]()), re.MULTILINE)) >= {
        arrow.reason for arrow in TRANSITIONS
    }


def test_the_reference_has_the_functions_that_pages_call_each_with_its_own_comment() -> None:
    """Found: a function's text was all of its file before it, with the bodies of the others."""
    made = runpy.run_path(str(ROOT / "docs" / "from_code.py"))
    shown = "\n".join(made["functions"]("for-users"))
    assert "CREATE FUNCTION" not in shown
    assert "$$" not in shown
    assert max(map(len, made["functions"]("rest"))) < 3_000
    for page in (page for page in DOCS if not page.name.startswith("architecture")):
        called = {name for code in code_of(page) for name in re.findall(r"(?<!\w)roir\.(\w+)\(", code)}
        assert called <= set(re.findall(r"^roir\.(\w+)\(", shown, re.MULTILINE)), page.name


def test_the_code_map_says_what_the_files_say() -> None:
    for path, content in runpy.run_path(str(ROOT / "scripts" / "code_map.py"))["files"]().items():
        assert path.read_text() == content, f"{path.relative_to(ROOT)} differs: make code-map"


# Functions of the engine that take a database and that command line, operators or pages call, but that others needn't:
# they ask for one operation's row or report, or begin what `verify` and `compact` do in one call.
NOT_FOR_USERS = {
    "abort.finish_abort",
    "compact.compaction.begin",
    "compact.compaction.is_unfinished",
    "compact.compaction.report_of",
    "compact.ranking.suggest",
    "control.admission.ask",
    "control.expected.apply",
    "control.expected.expect",
    "control.expected.has_ended",
    "control.expected.note_cause",
    "control.expected.settle_runs",
    "control.operations.note_spark",
    "control.live_options.check_throttle",
    "control.live_options.refuse_option",
    "control.operations.find_operation",
    "control.operations.find_resumable",
    "control.operations.has_paused",
    "control.sign_of_life.refuse_running",
    "forecast.objections.refuse",
    "control.requests.request_abort",
    "control.run.leave_run",
    "metrics.reading.metrics",
    "prepare.is_rebuild",
    "snapshot.index.states",
    "snapshot.operation.operation_soon",
    "snapshot.operation.operation_status",
    "unique.duplicate_report.first_lines",
    "unique.duplicate_report.page",
    "verify.report.report_of",
    "verify.record.begin",
}


def called_in(file: Path) -> set[str]:
    """The full names of what a file imports from the engine and uses."""
    tree = ast.parse(file.read_text())
    known = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("airflow_roir.engine")
        for alias in node.names
    }
    names = {known[node.id] for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in known}
    return names | {
        f"{known[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known
    }


def referred_to(page: str) -> set[str]:
    """The full names of the objects of the code that a page of the reference includes."""
    text = (ROOT / "docs" / "reference" / page).read_text()
    return set(re.findall(r"^\.\. auto\w+:: airflow_roir\.([\w.]+)$", text, re.MULTILINE))


def test_the_reference_has_what_users_call() -> None:
    shown = referred_to("python.md")
    engine = set()
    for file in (ROOT / "airflow_roir" / "engine").rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "database":
                engine.add(f"{module}.{node.name}")
    called = {
        name
        for part in ("cli", "operators", "page", "task")
        for file in (ROOT / "airflow_roir" / part).rglob("*.py")
        for name in called_in(file) & engine
    }
    called = {name.removeprefix("airflow_roir.engine.") for name in called}
    assert called >= NOT_FOR_USERS
    assert called - {name.removeprefix("engine.") for name in shown} == NOT_FOR_USERS
    assert ".. autofunction:: roir_client.rows.rows" in (ROOT / "docs" / "reference" / "python.md").read_text()


def test_the_reference_has_what_dags_are_made_of() -> None:
    package = ROOT / "airflow_roir"
    made = set()
    for file in (*(package / "operators").glob("*.py"), package / "assets.py", package / "groups.py"):
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        made |= {
            f"{module}.{node.name}"
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        }
    # Airflow calls it, by the provider's entry.
    assert made - {"assets.normalize_uri"} <= referred_to("operators.md")


def test_every_field_and_value_of_the_status_is_described() -> None:
    """The tables of docs/reference/status.md are made from docstrings, so these are looked at."""
    made = runpy.run_path(str(ROOT / "scripts" / "options.py"))
    described = {
        name: {field: meaning for names, meaning in made["fields_of"](*of).items() for field in names}
        for name, of in made["DESCRIBED"].items()
    }
    # The command adds `resume_with`, what a look tells, and `waits`, which an index without an operation has too. Its
    # warnings are those of the index.
    stored = {field.name for field in fields(OperationStatus)} - {"warnings", *INTERNAL, *DETAILS}
    assert described["operation"].keys() == {*stored, "resume_with", "workers_alive", "held_up", "waits"}
    for name, of in (("index", IndexFacts), ("generation", Generation), ("verified", Verified), ("bloat", Bloat)):
        assert described[name].keys() == {field.name for field in fields(of)}
    assert described["segment"].keys() == {field.name for field in fields(Segment)}
    behind = ShardLag("i", "s", "active", None, None, None, None, 0, None, None, None, 1, 1)
    assert described["shard"].keys() == behind.as_dict().keys()
    values = described["operation"]
    assert re.findall(r"\w+", values["status"]) == ["running", ABANDONED, *[one.value for one in Status][1:]]
    assert re.findall(r"\w+", values["phase"]) == [phase.value for phase in Phase]


def test_every_action_of_an_event_is_described() -> None:
    shown = {action for actions, _ in rows_of("action | the actor") for action in actions.split(", ")}
    by_sql = re.findall(r"INSERT INTO roir\.event[^;]*?'([a-z ]+)'", CONTROL_SCHEMA)
    code = "".join(file.read_text() for file in (ROOT / "airflow_roir").rglob("*.py"))
    by_code = re.findall(r'record_event\([^"()]*(?:"governor", )?"([a-z ]+)"', code)
    assert len(by_code) > 20
    named = {*by_code, *by_sql} - {"change "} | {
        "change …",
        "start",
        "resume",
        long_pause.EVENT,
        long_pause.OF_ABANDONED,
    }
    named |= {one.value for one in (*Kind, Trouble.EXHAUSTED, Trouble.CANCELLED)}
    assert shown == named


def test_settings_and_options_that_are_named_exist() -> None:
    text = next(text for page in DOCS if "`SESSION_SETTINGS`" in (text := page.read_text()))
    named = text[text.index("`TimeZone`") : text.index("`SESSION_SETTINGS`")]
    assert set(re.findall(r"`(\w+)`", named)) <= set(database.SESSION_SETTINGS)
    assert hasattr(BuildOptions, "lock_timeout_ms")


@pytest.mark.parametrize(
    ("phrase", "value", "expected"),
    [
        ("`lock_timeout` of 500 ms", BuildOptions.lock_timeout_ms, 500),
        ("at most half a second", BuildOptions.lock_timeout_ms, 500),
        ("within thirty seconds", sign_of_life.HEARTBEAT_FRESH_S, 30),
        ("older than half a minute", sign_of_life.HEARTBEAT_FRESH_S, 30),
        ("applies sixteen blocks of its part", fold.BLOCKS_PER_STEP, 16),
        ("1,024 bytes together", entry.COVERED_BYTES, 1024),
        ("looks again after half a minute", dag_switch.LOOK_AGAIN_S, 30),
        ("at least every five minutes", dag_switch.MOST_S, 300),
    ],
)
def test_a_number_in_the_text_is_the_codes(phrase: str, value: int, expected: int) -> None:
    assert any(phrase in re.sub(r"\s+", " ", page.read_text()) for page in DOCS)
    assert value == expected


def test_every_heading_that_gets_words_of_the_search_exists() -> None:
    """`make docs` refuses it, too, but takes minutes."""
    words = runpy.run_path(str(ROOT / "docs" / "search_words.py"))["WORDS"]
    for page, given in words.items():
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
        assert set(given) <= {re.sub(r"`|\[([^]]*)\]\([^)]*\)", r"\1", one) for one in headings}, page


def test_every_page_is_in_a_table_of_contents() -> None:
    folder = ROOT / "docs"
    listed = {
        (page.parent / f"{name}.md").relative_to(folder)
        for page in folder.rglob("*.md")
        for contents in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for name in re.findall(r"^([\w/-]+)$", contents, re.MULTILINE)
    }
    pages = {page.relative_to(folder) for page in folder.rglob("*.md") if "_build" not in page.parts}
    assert listed == pages - {Path("index.md")}


def drawn(name: str) -> set[str]:
    """The arrows that a picture of states says it has."""
    text = (ROOT / "docs" / "images" / f"{name}-light.svg").read_text()
    return {arrow for kept in re.findall(r'data-arrow="([^"]+)"', text) for arrow in unescape(kept).split("; ")}


def test_the_pictures_of_states_are_the_codes() -> None:
    moves = [one for one in TRANSITIONS if one.verb in (Verb.ADVANCE, Verb.COMPLETE)]
    assert drawn("phases") == {f"{one.phase.value} > {one.to_phase.value}" for one in moves}
    changes = {(one.status.value, one.to_status.value) for one in TRANSITIONS if one.verb is not Verb.ADVANCE}
    assert drawn("statuses") == {" > ".join(change) for change in changes}
    entries = {
        (state.value if state else "none", following.value if following else "none")
        for (state, _), following in ENTRY_STATES.items()
        if state is not following
    }
    assert drawn("entry-states") == {" > ".join(change) for change in entries}
    lives = {f"{arrow.was} > {arrow.becomes}" for arrow in ARROWS if arrow.table == "generation"}
    assert drawn("generations") == lives


def test_the_pictures_are_drawn_from_the_code_as_it_is() -> None:
    """Else: `make charts`."""
    for path, content in runpy.run_path(str(ROOT / "docs" / "states.py"))["files"]().items():
        assert path.read_text() == content, f"{path.name}: make charts"


def test_each_list_from_the_code_says_how_a_checkout_gets_it() -> None:
    """Found: the pages of the reference were empty in a checkout, without a word."""
    spoken = re.compile(r"<!-- from the code: [^>]+ -->(?P<said>\n\n\([^\n]*`make docs`[^\n]*\))?")
    found = [one for page in (ROOT / "docs" / "reference").glob("*.md") for one in spoken.finditer(page.read_text())]
    assert len(found) >= 8
    assert all(one["said"] for one in found)
    place = re.search(r"^PLACE = re.compile\(r\"(.*)\"\)$", (ROOT / "docs" / "from_code.py").read_text(), re.MULTILINE)
    assert place is not None
    assert all(re.fullmatch(place[1], one[0]) for one in found), "the built page has only the list"
