"""Pages, helps, forms and messages are plain English: the rules of scripts/prose.py find nothing in them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.unit.test_docs import ROOT

PROSE = runpy.run_path(str(ROOT / "scripts" / "prose.py"))


def found_in(page: str) -> set[str]:
    """The names of the rules that find something in a page."""
    return {one.rule for one in PROSE["findings_in"]("page", PROSE["sentences_of_page"](page))}


def test_pages_helps_forms_and_messages_are_plain() -> None:
    """As in `make lint`."""
    found = PROSE["check"]()
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("of", "Of a table without partitions the planner reads all."),
        ("of", "- Of those that wait the first one goes on."),
        ("who", "Who waits asks every half minute."),
        ("what", "| line | What is lost comes again. |"),
        ("whoever", "The next one, whoever it is, continues."),
        ("stands", "The name stands in the log."),
        ("told", "The user is told\nwhich one."),
        ("made again", "The segment is made again."),
        ("lies", "The file lies beside the log."),
        ("he", "A user may resume it when he likes."),
        ("anew", "Writes are made anew."),
        ("nobody", "The room that nobody uses is freed."),
        ("so many", "It takes so many workers."),
        ("so long", "It pauses after so long."),
        ("go on with", "It goes on with the next one."),
        ("put right", "It puts that right."),
        ("mend", "A repair mends the entries."),
        ("by itself", "New ones are followed by themselves."),
        ("cut to fit", "The batch is cut to fit."),
        ("where", "None where all is."),
        ("of late", "The rate of late counts."),
        ("worth to", "Which segments are worth to be renewed?"),
        ("twice", "It reads the the table."),
        ("lane", "Each lane has a shipper."),
        ("base table", "The base table is read."),
        ("outside of", "It waits outside of its window."),
        ("e-mail", "A lookup by e-mail asks all shards."),
        ("long", "A word " * 23 + "is too many."),
    ],
)
def test_a_rule_finds_its_sentence(rule: str, sentence: str) -> None:
    assert rule in found_in(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "`he` stands for `nobody`, and `roir.lane` is a table.",
        "# What you get",
        "What is a generation?",
        "What you can rely on:",
        "- **What was lost.** Each batch counts.",
        "- *Who announces*: each client does.",
        "```sh\nWho is told\n```",
        "    Of a block nothing is read",
        "Of course it is. The form says who may pause.",
        "A standby is read, too. See [the lane](x.md#lies).".replace("the lane", "the feed"),
        "Who did what, and when, is in the table.",
    ],
)
def test_a_rule_finds_nothing_else(sentence: str) -> None:
    assert not found_in(sentence)


def test_messages_in_code_are_read() -> None:
    python, sql = ROOT / "airflow_roir" / "errors.py", ROOT / "migrations" / "sql" / "guard.sql"
    assert any("partition" in text for _, text in PROSE["texts_of_sql"](sql))
    assert not any("Raised" in text for _, text in PROSE["texts_of_code"](python))
    found = {text for _, text in PROSE["texts_of_code"](ROOT / "airflow_roir" / "options.py")}
    assert any(text.startswith("Pause when this time has passed") for text in found)
    assert any("give either sample or slices" in text for text in found)


def texts_of(kind: str, path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [one for _, one in PROSE[kind](path)]


def test_a_text_of_sql_may_hold_the_sign_of_a_comment_and_a_comment_an_apostrophe(tmp_path: Path) -> None:
    text = (
        "SELECT 'Repair it by roir verify --repair'; -- It isn't a text, 'nor is this'.\nSELECT 'It is the next text';"
    )
    path = tmp_path / "some.sql"
    assert texts_of("texts_of_sql", path, text) == ["Repair it by roir verify --repair", "It is the next text"]
    assert texts_of("notes_of_sql", path, text) == ["It isn't a text, 'nor is this'."]


def test_texts_of_pages_and_comments_of_sql_in_python_are_read(tmp_path: Path) -> None:
    script = 'put(`The build of ${name} is lost.`, "main"); // A note that no user sees.\nput("This page shows it.");'
    assert texts_of("texts_of_script", tmp_path / "some.js", script) == [
        "The build of X is lost.",
        "This page shows it.",
    ]
    python = 'QUERY = """\nSELECT 1\n  -- It counts\n  -- one row.\n"""\n'
    assert texts_of("notes_of_code", tmp_path / "some.py", python) == ["It counts one row."]


def test_words_by_hand_leave_out_what_a_program_wrote() -> None:
    page = "# A page\n\nThree words more.\n\n<!-- made: form -->\n\n| not | these |\n\n<!-- end -->\n\n`code` too.\n"
    assert PROSE["words_by_hand"](page) == 8
