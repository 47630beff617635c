"""What a user reads is plain English: no word of the list below is in docs, help, forms, messages or docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
CODE = (*(ROOT / "airflow_roir").rglob("*.py"), *(ROOT / "dags").glob("*.py"))
SQL = (*(ROOT / "migrations" / "sql").glob("*.sql"),)

# Each stands for a sentence that needed a second look, with what to say instead.
INSTEAD = {
    r"anew": "again",
    r"nobody": "say who doesn't, or what is refused",
    r"so many": "this many, or the parameter's name",
    r"g(?:o|oes|oing|one) on with": "continue",
    r"put(?:s|ting)? (?:\w+ )?right": "repair",
    r"mends?|mending": "repair",
    r"(?:followed|go on|goes on) by (?:itself|themselves)": "automatically",
    r"cut to fit": "adapts",
    # Where a condition is meant.
    r"(?:True|False|None|Raises? \w+|a no-op),? where": "if",
}
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b")


def texts_of_code(path: Path) -> Iterator[str]:
    """Every text between quotes: help, messages, docstrings; an f-string's pieces apart."""
    for node in ast.walk(ast.parse(path.read_text())):
        # A value of `held_up`, for programs.
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def texts_of_sql(path: Path) -> Iterator[str]:
    """Every text between single quotes, comments left out."""
    yield from re.findall(r"'((?:[^']|'')*)'", re.sub(r"--.*", "", path.read_text()))


def found_in(texts: Iterator[str]) -> list[str]:
    whole = [re.sub(r"\s+", " ", text) for text in texts]
    return [text[max(0, match.start() - 60) : match.end() + 20] for text in whole for match in FORBIDDEN.finditer(text)]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_docs_are_plain(path: Path) -> None:
    assert not found_in(iter([path.read_text()]))


def test_help_forms_messages_and_docstrings_are_plain() -> None:
    assert not {str(path.relative_to(ROOT)): found for path in CODE if (found := found_in(texts_of_code(path)))}


def test_messages_of_the_server_are_plain() -> None:
    assert not {path.name: found for path in SQL if (found := found_in(texts_of_sql(path)))}


@pytest.mark.parametrize(
    "sentence", ["New ones are followed by themselves", "writes are made anew", "None where all is"]
)
def test_a_word_of_the_list_is_found(sentence: str) -> None:
    assert found_in(iter([sentence]))
