"""Adds to a page what a code host does by itself: pictures for light and dark, files, languages of blocks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

SQL = re.compile(r"\s*(--|SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|GRANT|BEGIN|DROP|EXPLAIN|SET|WITH)\b")
SHELL = re.compile(r"\s*(#|roir|make|export|pip|python|docker|psql|cd|git|time|openssl|cp)\b")
SOURCES = re.compile(r'srcset="([^"]+)".*?src="([^"]+)"(?:.*?alt="([^"]*)")?', re.DOTALL)


class LanguageOfBlocks(SphinxTransform):
    """Gives a block without a language one, by its first word."""

    default_priority = 300

    def apply(self, **_: Any) -> None:
        for block in self.document.findall(nodes.literal_block):
            if block.get("language", "none") == "none":
                text = block.astext()
                block["language"] = "sql" if SQL.match(text) else "bash" if SHELL.match(text) else "none"


class PicturesForLightAndDark(SphinxTransform):
    """Makes of an HTML `<picture>` two images, of which the theme shows one."""

    default_priority = 100

    def apply(self, **_: Any) -> None:
        for raw in list(self.document.findall(nodes.raw)):
            if "<picture>" not in raw.astext():
                continue
            found = SOURCES.search(raw.astext())
            assert found is not None, f"{self.env.docname}: a <picture> needs srcset for dark, src for light"
            dark, light, alt = found.groups()
            raw.replace_self(
                [
                    nodes.image(uri=uri, alt=alt or "", classes=[shown, "roir-picture"])
                    for uri, shown in ((light, "only-light"), (dark, "only-dark"))
                ]
            )


class PagesElsewhereAsFiles(SphinxTransform):
    """Makes a link to a Markdown page that isn't below docs/ (a benchmark's results) one to its file."""

    default_priority = 100

    def apply(self, **_: Any) -> None:
        here = Path(self.env.doc2path(self.env.docname)).parent
        for link in list(self.document.findall(addnodes.pending_xref)):
            page = Path(f"{link['reftarget']}.md")
            if link.get("refdomain") == "doc" and link["reftarget"] not in self.env.all_docs and page.is_file():
                attributes = {name: link[name] for name in ("refdoc", "reftype", "refexplicit") if name in link}
                target = os.path.relpath(page, here)
                link.replace_self(
                    addnodes.download_reference("", "", *link.children, reftarget=target, refdomain=None, **attributes)
                )


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(LanguageOfBlocks)
    app.add_transform(PicturesForLightAndDark)
    app.add_transform(PagesElsewhereAsFiles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
