"""Writes the sections of all pages, paragraph by paragraph, for the search (`_static/search.js`).

A section also gets the words that people type and that its page doesn't use (`search_words.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from search_words import WORDS
from sphinx import addnodes
from sphinx.application import Sphinx

FILE = "search_sections.js"
NO_TEXT = (nodes.title, nodes.raw, nodes.image, nodes.comment, nodes.meta, addnodes.index, addnodes.toctree)


def sections_of(page: str, tree: nodes.document) -> Iterator[dict[str, Any]]:
    """The sections of a page, and the objects that it describes, each with the headings above and its paragraphs."""
    given = dict(WORDS.get(page, {}))
    for node in tree.findall(lambda one: isinstance(one, nodes.section | addnodes.desc)):
        title, anchor = _title(node)
        above = [_title(one)[0] for one in _parents(node)]
        yield {
            "page": page,
            # The first heading is the page's.
            "anchor": anchor if above else "",
            "title": title,
            "above": " > ".join(above),
            "words": given.pop(title, ""),
            # Each with the heads of its columns, if it is a row: they are looked for, too, but not shown.
            "blocks": [[" ".join(text.split()), heads] for text, heads in _blocks(node) if text.strip()],
        }
    assert not given, f"docs/search_words.py: page {page} has no heading {', '.join(given)}"


def _title(node: nodes.Element) -> tuple[str, str]:
    """The title and the anchor of a section, or the name and the anchor of an object."""
    if isinstance(node, addnodes.desc):
        signature = node.next_node(addnodes.desc_signature)
        assert signature is not None
        return signature.get("fullname", signature.astext()), next(iter(signature["ids"]), "")
    title = node.next_node(nodes.title)
    # Sphinx has made its quotes round.
    return title.astext().replace("’", "'") if title is not None else "", node["ids"][0]


def _parents(node: nodes.Element) -> list[nodes.Element]:
    found: list[nodes.Element] = []
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.section | addnodes.desc):
            found.insert(0, node)
    return found


def _blocks(node: nodes.Element) -> Iterator[tuple[str, str]]:
    """The texts of paragraphs, items, rows and blocks of code, but those of sections and objects within.

    Each with the heads of its table's columns, '' if it isn't a row.
    """
    for child in node.children:
        if isinstance(child, nodes.tgroup):
            head, body = child.next_node(nodes.thead), child.next_node(nodes.tbody)
            heads = " ".join(cell.astext() for cell in head.findall(nodes.entry)) if head is not None else ""
            for row in body.children if body is not None else ():
                yield " · ".join(cell.astext() for cell in row.children if cell.astext().strip()), heads
        elif isinstance(child, nodes.TextElement) and not isinstance(child, NO_TEXT):
            # A picture's text is its heading.
            if not all(isinstance(one, nodes.image) for one in child.children):
                yield child.astext(), ""
        elif isinstance(child, nodes.Element) and not isinstance(child, (*NO_TEXT, nodes.section, addnodes.desc)):
            yield from _blocks(child)


def write(app: Sphinx, error: Exception | None) -> None:
    """Writes the file once all pages are built."""
    if error is not None or app.builder.format != "html":
        return
    found = []
    for page in sorted(app.env.found_docs):
        for section in sections_of(page, app.env.get_doctree(page)):
            anchor = section.pop("anchor")
            found.append({**section, "address": app.builder.get_target_uri(page) + (f"#{anchor}" if anchor else "")})
    path = Path(app.outdir) / "_static" / FILE
    path.write_text(f"const roirSections = {json.dumps(found, ensure_ascii=False)};\n", encoding="utf-8")


def add_scripts(app: Sphinx, page: str, *_: Any) -> None:
    """The page of the search loads them after Sphinx's own scripts, whose `Search.query` they replace."""
    if page == "search":
        for name in (FILE, "search.js"):
            app.add_js_file(name, loading_method="defer")


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers it with Sphinx."""
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
