"""The search of the docs, in Chromium: its page shows sections with the paragraph that answers. By hand."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built pages."""
    folder = tmp_path_factory.mktemp("pages")
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(folder / "trees")]
    subprocess.run([*sphinx, "docs", str(folder / "html")], cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder / "html"))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def tab() -> Iterator[Any]:
    """A page of Chromium, in which no script fails."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=os.environ.get("CHROMIUM") or None, args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page()
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        yield tab
        browser.close()
        assert wrong == []


def test_a_phrase_leads_to_the_paragraph_with_its_words_marked(address: str, tab: Any) -> None:
    tab.goto(f"{address}/search.html?q=which+port+behind+PgBouncer+xyzzy")
    first = tab.locator("ul.search > li").first
    first.wait_for()
    assert "6432" in first.inner_text()
    marked = " ".join(first.locator(".highlighted").all_inner_texts())
    assert "PgBouncer" in marked
    assert "port" in marked
    first.get_by_role("link").click()
    tab.wait_for_url("**/pgbouncer.html")


def test_a_result_leads_to_its_section_and_markup_of_a_query_is_text(address: str, tab: Any) -> None:
    tab.goto(f"{address}/search.html?q=undo+a+rebuild+<b>bold</b>")
    tab.locator("ul.search > li").first.get_by_role("link").click()
    tab.wait_for_url("**/operate.html#revert")


def test_words_that_no_page_has_say_so(address: str, tab: Any) -> None:
    tab.goto(f"{address}/search.html?q=xyzzy")
    tab.get_by_text("Your search did not match any documents").wait_for()
    assert tab.locator("ul.search > li").count() == 0
