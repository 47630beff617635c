"""Which segments of an index are worth a compaction: the set that gains most within the budget. Arithmetic alone.

`cost_model.py` says how much each action gains and costs. Dynamic programming over the segments in key order finds the
best set of them under a budget: a segment is in at most one action, and a merge takes a run of neighbours. Taking the
best ratio first gains as much without a budget, and with one up to two thirds less. The budget is cut into steps, and
the cost of each action is rounded up to whole steps, so that no choice exceeds the budget. A larger budget never gains
less: it has as many steps, and no action takes more of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from airflow_roir.engine.compact import cost_model as model
from airflow_roir.engine.compact.action import Action as Action
from airflow_roir.engine.compact.action import Kind as Kind
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.cost_model import Known
from airflow_roir.engine.compact.cost_model import Terms as Terms
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.quantity import counted, duration, size

# Steps of the budget for each segment. An action wastes less than a step, so all of them waste at most 2.5 % of the
# budget. 1,000 segments take a second and 40 MB.
STEPS_OF_SEGMENT = 40
LEAST_STEPS = 2_000
# A choice that writes this share of a rebuild's bytes is a rebuild in effect, without its other gains.
NEARLY_ALL = 0.9
DEFAULT_ORDINAL = 0


@dataclass(frozen=True)
class LeftOut:
    """Segments that the choice leaves out, and why. action: the one that the budget had no room for."""

    ordinals: tuple[int, ...]
    why: str
    action: Action | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        action = None if self.action is None else self.action.as_dict()
        return {"ordinals": list(self.ordinals), "why": self.why, "action": action}


@dataclass(frozen=True)
class Choice:
    """The chosen actions, the most gain for its cost first.

    segments: how many the index has, with the default one. target_bytes: the size that they should have; None: it isn't
    known. rebuild_bytes: tables, B-trees and WAL that a rebuild writes, without segments of unknown size.
    rebuild_is_cheaper: rebuild the index instead.
    """

    actions: tuple[Action, ...]
    left_out: tuple[LeftOut, ...]
    budget: Budget
    horizon_days: float
    segments: int
    target_bytes: int | None
    rebuild_bytes: int
    rebuild_is_cheaper: bool
    totals: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        totals = {
            name: sum(getattr(one, name) for one in self.actions)
            for name in (
                *("bytes_now", "bytes_after", "pages_read", "bytes_written", "bytes_logged", "seconds", "room_saved"),
                *("reads_per_day", "pages_saved_per_day", "gain", "cost", "budgeted"),
            )
        }
        object.__setattr__(self, "totals", totals)

    @property
    def ordinals(self) -> frozenset[int]:
        """The segments of all chosen actions."""
        return frozenset(ordinal for one in self.actions for ordinal in one.ordinals)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "actions": [one.as_dict() for one in self.actions],
            "totals": {name: round(value, 1) for name, value in self.totals.items()},
            "left_out": [one.as_dict() for one in self.left_out],
            "budget_bytes": self.budget.bytes,
            "budget_seconds": self.budget.seconds,
            "horizon_days": self.horizon_days,
            "segments": self.segments,
            "target_bytes": self.target_bytes,
            "rebuild_bytes": self.rebuild_bytes,
            "rebuild_is_cheaper": self.rebuild_is_cheaper,
        }


@dataclass(frozen=True)
class Candidate:
    """An action on the segments from place `start` in key order to the one before `stop`."""

    start: int
    stop: int
    action: Action


def pick(segments: Sequence[Segment], terms: Terms, budget: Budget | None = None) -> Choice:
    """The actions on an index's segments that gain most beyond their cost, within the budget, if there is one.

    A segment whose size or rows aren't known is left out, with the reason.
    """
    budget = budget or Budget()
    chains = [[Known.of(one, terms.now) for one in chain] for chain in in_key_order(segments)]
    known = [one for chain in chains for one in chain if one is not None]
    target = target_bytes(segments, terms)
    asked = list(candidates(chains, target, terms))
    gainful = [one for one in asked if one.action.net > 0]
    places = sum(map(len, chains))
    actions = sorted(best(gainful, places, budget), key=lambda one: (-one.gain / max(one.cost, 1.0), one.ordinals))
    chosen = {ordinal for one in actions for ordinal in one.ordinals}
    written = sum(model.rebuild_bytes(known))
    return Choice(
        actions=tuple(actions),
        left_out=tuple(_left_out(segments, known, asked, chosen, places, budget, terms)),
        budget=budget,
        horizon_days=terms.horizon_days,
        segments=len(segments),
        target_bytes=target,
        rebuild_bytes=written,
        rebuild_is_cheaper=_rebuild_is_cheaper(actions, known, written, terms),
    )


def in_key_order(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Runs of neighbours, each in key order: the lower bound of a segment is the upper bound of its predecessor.

    Ordinals don't tell neighbours: they follow the order of creation. The default segment has no neighbours.
    """
    ranged = [one for one in segments if one.ordinal != DEFAULT_ORDINAL]
    by_lower = {one.lower: one for one in ranged if one.lower is not None}
    follows = {one.upper for one in ranged if one.upper is not None}
    yield from ([one] for one in segments if one.ordinal == DEFAULT_ORDINAL)
    for first in ranged:
        if first.lower is not None and first.lower in follows:
            continue
        chain = [first]
        while chain[-1].upper is not None and (following := by_lower.get(chain[-1].upper)) is not None:
            chain.append(following)
        yield chain


def target_bytes(segments: Sequence[Segment], terms: Terms) -> int | None:
    """The size that segments should have: the requested one, else the upper quartile of what those with rows need.

    Not the median: if deletions have emptied half of the segments, the median would call the rest too big. If there are
    two, the smaller one counts: the other one grew.
    """
    if terms.segment_bytes is not None:
        return terms.segment_bytes
    sizes = sorted(one.needed for one in segments if one.ordinal != DEFAULT_ORDINAL and one.rows and one.needed)
    return sizes[(len(sizes) - 1) * 3 // 4] if sizes else None


def candidates(chains: Sequence[Sequence[Known | None]], target: int | None, terms: Terms) -> Iterator[Candidate]:
    """All possible actions on segments and runs of segments, whether they gain or not."""
    place = 0
    for chain in chains:
        for start, one in enumerate(chain):
            if one is None:
                continue
            is_default = one.ordinal == DEFAULT_ORDINAL
            for action in (
                model.rewrite(one, terms),
                None if is_default else model.split(one, target, terms),
            ):
                if action is not None:
                    yield Candidate(place + start, place + start + 1, action)
            run = [one]
            for stop in range(start + 2, min(len(chain), start + model.MOST_MERGED) + 1):
                following = chain[stop - 1]
                if following is None:
                    break
                run.append(following)
                merged = model.merge(run, target, terms)
                # A longer run isn't smaller.
                if merged is None:
                    break
                yield Candidate(place + start, place + stop, merged)
        place += len(chain)


def best(among: Sequence[Candidate], places: int, budget: Budget) -> list[Action]:
    """The set with the greatest net gain whose candidates share no place and stay within the budget."""
    steps = steps_of(places) if budget.is_limited else 0
    ending: list[list[tuple[int, Candidate]]] = [[] for _ in range(places + 1)]
    for one in among:
        weight = weight_of(one.action, budget, steps)
        if weight <= steps:
            ending[one.stop].append((weight, one))
    longest = max((one.stop - one.start for one in among), default=1)
    # gains[i][u]: the most that the first i places gain with u steps. taken[i][u]: the number, from 1, of the candidate
    # that ends at place i and gains this; 0: none.
    gains = {0: np.zeros(steps + 1)}
    taken = np.zeros((places + 1, steps + 1), np.uint8)
    for place in range(1, places + 1):
        row = gains[place - 1].copy()
        for number, (weight, one) in enumerate(ending[place], 1):
            having = gains[one.start][: steps + 1 - weight] + one.action.net
            better = having > row[weight:]
            row[weight:][better] = having[better]
            taken[place, weight:][better] = number
        gains[place] = row
        gains.pop(place - longest, None)
    chosen = []
    place, left = places, steps
    while place > 0:
        number = int(taken[place, left])
        if number == 0:
            place -= 1
            continue
        weight, one = ending[place][number - 1]
        chosen.append(one.action)
        place, left = one.start, left - weight
    return chosen


def steps_of(places: int) -> int:
    """The number of steps into which the budget of an index with this many segments is cut."""
    return max(LEAST_STEPS, places * STEPS_OF_SEGMENT)


def weight_of(action: Action, budget: Budget, steps: int) -> int:
    """The steps of the budget that an action takes, rounded up."""
    of_bytes = 0 if budget.bytes is None else -(-action.budgeted * steps // budget.bytes)
    of_seconds = 0 if budget.seconds is None else math.ceil(action.seconds * steps / budget.seconds)
    return max(of_bytes, of_seconds)


def _left_out(
    segments: Sequence[Segment],
    known: Sequence[Known],
    asked: Sequence[Candidate],
    chosen: set[int],
    places: int,
    budget: Budget,
    terms: Terms,
) -> Iterator[LeftOut]:
    rest = [one for one in asked if chosen.isdisjoint(one.action.ordinals)]
    seen = {one.ordinal for one in known}
    for segment in sorted(segments, key=lambda one: one.ordinal):
        if segment.ordinal not in seen:
            yield LeftOut((segment.ordinal,), segment.note or "how much of it is waste isn't known")
    worth = best([one for one in rest if one.action.net > 0], places, Budget())
    for action in sorted(worth, key=lambda one: -one.net):
        seen -= set(action.ordinals)
        takes = size(action.budgeted) if budget.seconds is None else duration(action.seconds)
        yield LeftOut(action.ordinals, f"{action.kind.value} takes {takes}; the budget is {budget}", action)
    for one in known:
        tried = [it.action for it in rest if it.action.ordinals == (one.ordinal,)]
        if one.ordinal in seen and tried:
            most = max(tried, key=lambda action: action.net)
            days = counted(terms.horizon_days, "day")
            why = f"{most.why}: {most.kind.value} costs more page reads ({most.cost:,.0f}) than it saves in {days}"
            yield LeftOut((one.ordinal,), f"{why} ({most.gain:,.0f})")


def _rebuild_is_cheaper(actions: Sequence[Action], known: Sequence[Known], written: int, terms: Terms) -> bool:
    """True if a rebuild costs no more than the actions, or the actions write nearly as much as a rebuild."""
    if not actions:
        return False
    data, logged = model.rebuild_bytes(known)
    # If the source's size isn't known, a rebuild reads at least as much as the index's own tables have.
    source = terms.source_bytes if terms.source_bytes is not None else sum(one.heap for one in known)
    costs = sum(one.cost for one in actions)
    wrote = sum(one.budgeted for one in actions)
    return costs >= model.cost(source, data, logged, terms) or wrote >= NEARLY_ALL * written
