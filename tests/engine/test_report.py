"""An operation as one page for a change ticket, in Markdown and in HTML."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser

import pytest

from airflow_roir.definition import quote
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot import details, report
from airflow_roir.engine.snapshot.parts import Error, Event, Pause
from airflow_roir.errors import NotFound
from airflow_roir.operation import Kind, Status
from tests.engine.steps import begin, built, make_index, make_table

EVIL = "a|b <script>alert(1)</script>\n# [x](javascript:y) `c` & *d*"


class Tags(HTMLParser):
    """The tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)


@pytest.mark.sample(0)
def test_a_completed_build_is_told_whole(dsn: str, database: Database) -> None:
    make_table(dsn)
    make_index(database)
    page = report.write(database, "ix")
    assert page.startswith("# First build of public.ix, operation 1: Completed")
    assert "| Verification | 100 rows; missing 0, extra 0, different 0: index and table are equal |" in page
    assert "## Phases" in page
    assert "## Events, the last ones" in page
    assert re.search(r"\| Driven by \| test \|", page)
    assert "<h2>Phases</h2>" in report.write(database, "public.ix", 1, in_html=True)


def test_pauses_are_told_with_their_reasons_and_an_abort_with_its_user(dsn: str, database: Database) -> None:
    make_table(dsn)
    built(database)
    assert "| Verification | not compared yet |" in report.write(database, "ix")
    requests.pause(database, "ix", "ann", EVIL)
    for in_html in (False, True):
        page = report.write(database, "ix", in_html=in_html)
        assert "ann" in page
        assert "<script" not in page.replace("\\<script", "")


@pytest.mark.sample(1)
@pytest.mark.parametrize("status", [*(one.value for one in Status), "abandoned", "pausing"])
@pytest.mark.parametrize("kind", [one.value for one in Kind])
def test_texts_of_users_are_only_text_in_every_state(dsn: str, database: Database, status: str, kind: str) -> None:
    make_table(dsn)
    begin(database)
    one = details.progress(database, "ix")
    now = one.now
    one = replace(
        one,
        status=status,
        kind=kind,
        index=f"public.{quote(EVIL)}",
        owner=EVIL,
        error=EVIL,
        pause_reason=EVIL,
        paused_by=EVIL,
        ended_by=EVIL,
        end_reason=EVIL,
        pauses=(Pause(now, EVIL, EVIL, None), Pause(now - timedelta(hours=1), EVIL, EVIL, now)),
        errors=(Error(now, EVIL, EVIL),),
        events=(Event(now, EVIL, EVIL, EVIL),),
    )
    page = report.markdown(one, None)
    # A table's line has as many cells as its head: no text of a user ends a cell or a line.
    for table in page.split("\n\n"):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines() if not line.startswith("#")}
        assert len(cells) <= 1, table
    assert not re.search(r"(?<!\\)[<`\[]", page)
    shown = report.as_html(one, None)
    assert Tags(shown).tags <= {"html", "meta", "title", "style", "h1", "h2", "table", "tr", "td", "th"}
    assert html.escape("<script>alert(1)</script>") in shown


def test_a_name_is_escaped_only_where_markdown_would_change_it(dsn: str, database: Database) -> None:
    """Found: `public\\.orders\\_by\\_customer`, which could be copied from no ticket that shows Markdown as it is."""
    make_table(dsn)
    begin(database)
    one = replace(details.progress(database, "ix"), index="shop.orders_by_customer", owner="_x_ a*b* (ann) #1 2 > 1!")
    page = report.markdown(one, None)
    assert "| Index | shop.orders_by_customer |" in page
    assert r"| Driven by | \_x\_ a\*b\* (ann) #1 2 > 1! |" in page


def test_an_operation_of_another_index_is_refused(dsn: str, database: Database) -> None:
    make_table(dsn)
    make_index(database)
    with pytest.raises(NotFound, match=r"operation 1 is one of index public\.ix, not of other"):
        report.write(database, "other", 1)
    with pytest.raises(NotFound):
        report.write(database, "ix", 99)
