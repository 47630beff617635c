"""The two state machines: which arrows an operation has, and that the data of both is total."""

from __future__ import annotations

import runpy
from itertools import product

from airflow_roir.entry_state import ENTRY_STATES, EntryState, Happening
from airflow_roir.generation_state import ARROWS as OTHER_ARROWS
from airflow_roir.generation_state import STATE_COLUMNS
from airflow_roir.operation import PHASES_OF, TRANSITIONS, Phase, Status, Verb
from tests.unit.test_docs import ROOT

ARROWS = {(arrow.verb, arrow.status, arrow.phase) for arrow in TRANSITIONS}


def test_each_arrow_is_there_once_and_has_a_reason() -> None:
    assert len(ARROWS) == len(TRANSITIONS)
    assert all(arrow.reason for arrow in TRANSITIONS)


def test_the_arrows_in_sql_are_those_of_the_code() -> None:
    for path, content in runpy.run_path(str(ROOT / "scripts" / "arrows.py"))["files"]().items():
        assert path.read_text() == content, f"{path.relative_to(ROOT)} differs: make arrows"


def test_an_ended_operation_has_no_arrow_and_a_failed_one_can_only_be_aborted() -> None:
    assert not {arrow.status for arrow in TRANSITIONS} & {Status.COMPLETED, Status.ABORTED}
    assert {arrow.verb for arrow in TRANSITIONS if arrow.status == Status.FAILED} == {Verb.ABORT}


def test_phases_only_go_forward_and_one_at_a_time() -> None:
    lives = [(*phases, Phase.DONE) for phases in PHASES_OF.values()]
    for arrow in TRANSITIONS:
        order = next(life for life in lives if arrow.phase in life)
        step = order.index(arrow.to_phase) - order.index(arrow.phase)
        assert step == (1 if arrow.verb in (Verb.ADVANCE, Verb.COMPLETE) else 0)


def test_what_can_happen_to_an_entry_is_known_for_every_state() -> None:
    folds = {Happening.FOLD_MATCHED, Happening.FOLD_UNMATCHED}
    pairs = {
        (state, happening)
        for state, happening in product((None, *EntryState), Happening)
        if state is not None or happening not in folds  # the fold meets delta rows only
    }
    assert set(ENTRY_STATES) == pairs


def test_each_other_arrow_is_there_once_has_a_reason_and_leads_somewhere() -> None:
    assert len({(arrow.table, arrow.was, arrow.becomes) for arrow in OTHER_ARROWS}) == len(OTHER_ARROWS)
    for arrow in OTHER_ARROWS:
        assert arrow.reason
        assert arrow.was != arrow.becomes
        assert len(arrow.was.split(" ")) == len(arrow.becomes.split(" ")) == len(STATE_COLUMNS[arrow.table])
    assert not [arrow for arrow in OTHER_ARROWS if arrow.was == "dropped none"]
