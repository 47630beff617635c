"""Finds sentences that a reader has to read twice, in the pages and in what programs say: a part of `make lint`.

It looks at README, docs and the other pages; at the texts of errors, helps and forms in Python; at those of Airflow's
pages in JavaScript; at messages and hints in SQL; and at docstrings and comments, also those of SQL within Python. It
needs no package: proselint, write-good, codespell, Harper and textlint found next to nothing here that is true.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Where code is.
FOLDERS = (
    "airflow_roir",
    "benchmarks",
    "client",
    "dags",
    "demo",
    "deploy",
    "docs",
    "migrations",
    "scripts",
    "servers",
    "tests",
)


@dataclass(frozen=True)
class Rule:
    """A pattern to find, and what to write in its place. at_start: only at the beginning of a sentence, and neither in
    a question nor before a list."""

    name: str
    pattern: re.Pattern[str]
    instead: str
    at_start: bool = False


def _rule(name: str, pattern: str, instead: str, at_start: bool = False) -> Rule:
    return Rule(name, re.compile(pattern if at_start else rf"\b(?:{pattern})\b"), instead, at_start)


# A sentence with more words is hard to follow; a colon or a semicolon ends one.
LONGEST = 45
RULES = (
    _rule(
        "of", r"Of (?!course\b)", "begin with the subject: 'A partition's rows …', 'If the index is unique, …'", True
    ),
    _rule("who", r"Who(?:ever)? (?!did what)", "name the user, the worker, the role: 'If you wait, …'", True),
    _rule("what", r"What(?:ever)? (?!to\b)", "name the thing: 'The rows that …', 'Each change …'", True),
    _rule("whoever", r"[Ww]hoever|(?<=\. )[Ww]hose", "name the user, the worker, the role"),
    _rule("stands", r"stands?(?! for\b)|stood", "is, has, contains"),
    _rule(
        "told",
        r"(?:is|are|was|were|be|been|being|isn't|aren't) told(?! to\b)",
        "say who learns it, or where it is shown",
    ),
    _rule("made again", r"ma(?:d|k)es? again|making again", "rebuilds, writes again, renews"),
    _rule("lies", r"lies|(?:lie|lay)(?= (?:in|on|at|beside|between|within|outside)\b)", "is"),
    _rule("he", r"he|his|him|himself", "you, they, or the noun"),
    _rule("anew", r"anew", "again"),
    _rule("nobody", r"nobody(?!'s)", "say who doesn't, or what is refused"),
    _rule("so many", r"so man(?:y|ieth)", "this many, or the parameter's name"),
    _rule("so long", r"(?:for|after|than|of|up to) so (?:long|few|old|far)(?! that)", "this long, this far"),
    _rule("go on with", r"g(?:o|oes|oing|one) on with|went on with", "continue"),
    _rule("put right", r"put(?:s|ting)? (?:\w+ )?right", "repair"),
    _rule("mend", r"mends?|mending", "repair"),
    _rule("by itself", r"(?:followed|go on|goes on|continues?) by (?:itself|themselves)", "automatically"),
    _rule("cut to fit", r"cut to fit", "adapts"),
    _rule("where", r"(?:True|False|None|Raises? \w+|a no-op),? where", "if"),
    _rule("of late", r"of late", "recently, recent"),
    _rule("worth to", r"worth to(?: be)?", "worth …ing"),
    _rule("twice", r"(the|a|an|of|to|in|is|and|or|that) \1", "a word is there twice"),
)
# The terms of the glossary, and what is not to be said for them.
TERMS = (
    _rule("lane", r"lanes?", "feed"),
    _rule("base table", r"base tables?", "source table"),
    _rule("finger", r"finger of", "say what is meant"),
    _rule("outside of", r"outside of", "outside"),
    _rule("e-mail", r"[Ee]-mails?", "email"),
)


@dataclass(frozen=True)
class Finding:
    place: str
    rule: str
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: …{self.text}… ({self.instead})"


def sentences_of_page(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a page with their lines: paragraphs, items and cells; no code, no headings, no addresses."""
    # Messages that `make pictures` has seen are checked as texts of the code.
    no_prose = r"<!-- made: failures -->.*?<!-- end -->|<!--.*?-->|<picture>.*?</picture>"
    text = re.sub(no_prose, lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    begin, block = 1, ""
    fenced = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if re.match(r" *(```|:::)", line):
            fenced = not fenced if "```" in line else fenced
            line = ""
        elif fenced or (re.match(r" {4,}\S", line) and not block):
            continue
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        row = line.lstrip().startswith("|")
        if not line.strip() or item or row or line.startswith("#"):
            yield from ((begin, one) for one in _sentences(block))
            begin, block = number, ""
        if line.startswith("#"):
            continue
        if row:
            for cell in re.split(r"(?<!\\)\|", line):
                yield from ((number, one) for one in _sentences(cell))
            continue
        block = (block + " " + (line[item.end() :] if item else line)).strip()


def _sentences(text: str) -> list[str]:
    # The first words of an item that are set off are its title. Code may hold any word, so it counts as one.
    text = re.sub(r"^\s*\*+[^*]+[.:]\*+|^\s*\*+[^*]+\*+(?=[.:])", "", text)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>]+>|[*]+", "", re.sub(r"\s+", " ", text)).strip()
    return re.split(r"(?<=[.!?:;]) (?=[A-Z])", text) if text else []


def findings_in(place: str, sentences: Iterator[tuple[int, str]], page: bool = True) -> Iterator[Finding]:
    """The findings of the rules. page: also the terms of the glossary, and sentences that are too long."""
    for line, one in sentences:
        at = f"{place}:{line}"
        for rule in (*RULES, *(TERMS if page else ())):
            if rule.at_start:
                found = None if one[-1] in "?:" else rule.pattern.match(one)
            else:
                found = rule.pattern.search(one)
            if found:
                yield Finding(at, rule.name, one[max(0, found.start() - 40) : found.end() + 40], rule.instead)
        parts = [len(part.split()) for part in re.split(r"[:;] ", one)]
        if page and max(parts, default=0) > LONGEST:
            yield Finding(at, "long", one[:60], f"more than {LONGEST} words: two sentences, or a list")


def texts_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """The texts in Python that users read: errors, helps of commands and options, descriptions of forms."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _texts(node.exc)
        elif isinstance(node, ast.keyword) and node.arg in ("help", "form", "description", "epilog"):
            yield from _texts(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "number",
            "span",
            "choice",
            "truth",
            "option",
        ):
            for argument in node.args:
                yield from _texts(argument)
        elif isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(one) for one in node.decorator_list):
            for line in _sentences(ast.get_docstring(node) or ""):
                yield node.lineno, line


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    pieces = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    joined = [one for one in ast.walk(node) if isinstance(one, ast.JoinedStr)]
    within = {id(part) for one in joined for part in ast.walk(one) if part is not one}
    for one in joined:
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in one.values)
        yield from ((one.lineno, sentence) for sentence in _sentences(text))
    for part in pieces:
        if id(part) not in within:
            yield from ((part.lineno, sentence) for sentence in _sentences(str(part.value)))


# A text or a comment of SQL, whichever begins first: each may contain the other's sign.
SQL_TEXT = re.compile(r"'((?:[^']|'')*)'|--([^\n]*)")
# A text of JavaScript, or a comment.
SCRIPT_TEXT = re.compile(r"//[^\n]*|/\*.*?\*/|\"((?:[^\"\\\n]|\\.)*)\"|`((?:[^`\\]|\\.)*)`", re.DOTALL)


def texts_of_sql(path: Path) -> Iterator[tuple[int, str]]:
    """The texts in SQL that users read: every text between single quotes that has words, comments left out."""
    return _texts_between(SQL_TEXT, path.read_text(), 1)


def texts_of_script(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of Airflow's pages in JavaScript, comments left out."""
    return _texts_between(SCRIPT_TEXT, path.read_text(), 2)


def _texts_between(pattern: re.Pattern[str], text: str, groups: int) -> Iterator[tuple[int, str]]:
    for found in pattern.finditer(text):
        said = re.sub(r"\$\{[^}]*\}", "X", "".join(found[number] or "" for number in range(1, groups + 1)))
        if said.count(" ") > 2:
            yield from ((text.count("\n", 0, found.start()) + 1, one) for one in _sentences(said))


def notes_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """The texts in Python that maintainers read: docstrings, comments, and comments of SQL within a text."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                yield from ((getattr(node, "lineno", 1), one) for one in _sentences(paragraph))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            lines = enumerate(node.value.splitlines(), node.lineno)
            yield from _joined((number, line.strip()[3:]) for number, line in lines if line.strip().startswith("-- "))
    comments = (one for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type == tokenize.COMMENT)
    yield from _joined((one.start[0], one.string.lstrip("#: ")) for one in comments)


def notes_of_sql(path: Path) -> Iterator[tuple[int, str]]:
    """The texts in SQL that maintainers read: comments."""
    text = path.read_text()
    comments = (one for one in SQL_TEXT.finditer(text) if one[2] is not None)
    yield from _joined((text.count("\n", 0, one.start()) + 1, one[2].strip()) for one in comments)


def _joined(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The sentences of comments; those of neighbouring lines are one text."""
    begin, last, block = 0, -1, ""
    for number, text in lines:
        if number != last + 1:
            yield from ((begin, one) for one in _sentences(block))
            begin, block = number, ""
        block, last = f"{block} {text}", number
    yield from ((begin, one) for one in _sentences(block))


def pages() -> list[Path]:
    """Every page that was written by hand."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(one for one in found if "_build" not in one.parts and one.name != "code-map.md")


def words_by_hand(page: str) -> int:
    """The words of a page that a person wrote, counted as by `wc -w`, tables, code and markup included.

    The blocks that `make options` writes into a page don't count, nor does what Sphinx adds (docs/from_code.py). The
    page code-map.md isn't asked at all: it is made from docstrings."""
    return len(re.sub(r"<!-- made: [\w-]+ -->.*?<!-- end -->", "", page, flags=re.DOTALL).split())


def check() -> list[Finding]:
    """All findings in pages, texts and messages."""
    found: list[Finding] = []
    for path in pages():
        found += findings_in(str(path.relative_to(ROOT)), sentences_of_page(path.read_text()))
    for path in sorted([*(ROOT / "airflow_roir").rglob("*.py"), *(ROOT / "dags").glob("*.py")]):
        found += findings_in(str(path.relative_to(ROOT)), texts_of_code(path), page=False)
    for path in sorted((ROOT / "airflow_roir" / "page" / "static").glob("*.js")):
        found += findings_in(str(path.relative_to(ROOT)), texts_of_script(path), page=False)
    for path in sorted((ROOT / "migrations").rglob("*.sql")):
        found += findings_in(str(path.relative_to(ROOT)), texts_of_sql(path), page=False)
    return found


def check_notes(folders: Sequence[str]) -> list[Finding]:
    """All findings in docstrings and comments below these folders."""
    found: list[Finding] = []
    for path in sorted(one for folder in folders for one in (ROOT / folder).rglob("*.*")):
        notes = {".py": notes_of_code, ".sql": notes_of_sql}.get(path.suffix)
        if notes is not None and "_build" not in path.parts:
            found += findings_in(str(path.relative_to(ROOT)), notes(path), page=False)
    return found


def _show(*lines: object) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def main() -> int:
    """0 if there is nothing to be found; with --count how often each rule finds something, and where; with
    --notes FOLDER … the same of docstrings and comments there; with --words the words of each page that a person
    wrote, and their sum."""
    if "--words" in sys.argv:
        words = {path.relative_to(ROOT): words_by_hand(path.read_text()) for path in pages()}
        _show(*(f"{number:6,} {path}" for path, number in words.items()), f"{sum(words.values()):6,}")
        return 0
    folders = sys.argv[sys.argv.index("--notes") + 1 :] if "--notes" in sys.argv else []
    found = check_notes(folders) if folders else check() + check_notes(FOLDERS)
    if "--count" in sys.argv:
        for what in ([one.rule for one in found], [one.place.split(":")[0] for one in found]):
            _show(*(f"{number:5} {name}" for name, number in Counter(what).most_common()), "")
        _show(f"{len(found):5}")
        return 0
    _show(*found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
