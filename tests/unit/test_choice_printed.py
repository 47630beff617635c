"""How a choice of compactions is shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from airflow_roir.cli.compact import choice_lines, print_choice
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.choice import pick
from airflow_roir.engine.compact.segment import Segment
from tests.unit.test_choice import TERMS, bloated, emptied, fresh, segment

pytestmark = pytest.mark.sample(2)


def aged() -> list[Segment]:
    segments = fresh(12)
    segments[3] = bloated(segments[3], tree=3)
    segments[5] = replace(segments[5], rows=None, note="it has no\x1b statistics")
    segments[7], segments[8] = emptied(segments[7]), emptied(segments[8])
    segments[12] = segment(12, of=12, mb=3_000)
    return segments


def test_the_choice_is_a_table_with_totals_and_what_was_left_out() -> None:
    lines = list(choice_lines(pick(aged(), TERMS), '"we\x1bird"', None))
    assert lines[0].split("  ")[0] == "action"
    assert "  written     WAL        work" in lines[0]
    assert [line.split()[0] for line in lines if line[0].isalpha()][1:5] == ["merge", "rewrite", "split", "all"]
    assert any(line.startswith("merge        7, 8 ") for line in lines)
    assert any(" of entries" in line and "1,000 reads a day" in line for line in lines)
    assert any(line.startswith("left out: segment 5: it has no\\x1b statistics") for line in lines)
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert '"we\\x1bird": 13 segments, 4 chosen, budget: no limit' in text
    assert "30 days" in text


def test_what_the_budget_had_no_room_for_is_told() -> None:
    free = pick(aged(), TERMS)
    split = next(one for one in free.actions if one.parts > 1)
    lines = "\n".join(choice_lines(pick(aged(), TERMS, Budget(bytes=split.budgeted - 1)), "ix", None))
    assert "left out: segment 12: split takes 6.6 GB; the budget is 6.6 GB" in lines
    assert "split in" not in lines.split("left out")[0]
    timed = "\n".join(choice_lines(pick(aged(), TERMS, Budget.parse("1min")), "ix", None))
    assert "the budget is 1 min" in timed


def test_a_narrow_terminal_gets_paragraphs() -> None:
    lines = list(choice_lines(pick(aged(), TERMS), "ix", 60))
    assert max(map(len, lines)) <= 60
    assert "merge" in lines


def test_nothing_to_do_and_all_to_do() -> None:
    assert list(choice_lines(pick(fresh(3), TERMS), "ix", None)) == ["ix: 4 segments, none is worth a compaction"]
    lines = list(choice_lines(pick([bloated(one, 5, 5) for one in fresh(3)], TERMS), "it's", None))
    assert lines[-1].startswith("a rebuild costs no more")
    assert lines[-1].endswith("""roir build 'it'"'"'s'""")


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    made = pick(aged(), TERMS, Budget.parse("2GB"))
    print_choice(made, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told == made.as_dict()
    assert {one["kind"] for one in told["actions"]} == {"merge", "rewrite"}
    assert told["budget_bytes"] == 2 << 30
    (over, unknown) = sorted(told["left_out"], key=lambda one: one["action"] is None)
    assert (over["ordinals"], over["action"]["kind"]) == ([12], "split")
    assert (unknown["ordinals"], unknown["action"]) == ([5], None)
