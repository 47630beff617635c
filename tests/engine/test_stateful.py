"""Any interleaving of users' writes, readers and an operation's steps, drawn by a state machine of Hypothesis.

`make test-stateful` runs more examples, with a seed that it prints; `ROIR_SEED` gives one. A finding is printed as
calls of the machine's rules. A regression test is made of those, as in `test_variants.py`.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conftest import run_sql
from tests.engine import variants
from tests.engine.machine import FILLER, BlockMachine, IndexMachine, KeptSessions, Machine
from tests.engine.unique_machine import EqualNullsMachine, UniqueMachine
from tests.engine.users import TOUCH
from tests.engine.variants import FOUND, Variant

EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
SEED = int(os.environ.get("ROIR_SEED") or (random.randrange(1_000_000) if EXAMPLES else 1))
STEPS = 50
# Few examples reach these already, so that an empty search is noticed.
REACHED = {
    *(f"{kind}, {phase}" for kind in ("create", "rebuild") for phase in ("seal", "capture", "direct", "publish")),
    *(f"{kind}, {end}" for kind in ("create", "rebuild") for end in ("paused", "aborted", "done")),
    "revert",
    "death",
    "held up",
}
# The variants that seed 1 finds within 12 examples at most. Schedules find all of them: `test_variants.py`.
AT_RANDOM = (
    variants.prepares_without_a_drain,
    variants.switches_without_a_drain,
    variants.commits_the_watermark_first,
    variants.forgets_the_fence,
    variants.begins_a_range_anew,
    variants.forgets_the_base,
    variants.forgets_the_delta,
    variants.lets_the_base_win,
    variants.deletes_the_delta_unconditionally,
    variants.forgets_moved_keys,
    variants.forgets_the_active_generation,
    variants.forgets_the_retired_generation,
)


def run_machine(
    dsn: str, examples: int, number: int = SEED, shrink: bool = True, machine: type[Machine] = Machine
) -> Counter[str]:
    """Runs the machine; returns the states that were reached, and how often. number: the seed."""
    run_sql(dsn, TOUCH, FILLER)

    class Examples(machine):  # type: ignore[valid-type,misc]
        reached: Counter[str] = Counter()

    Examples.database = KeptSessions(dsn)
    limits = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(Examples), settings=limits)
    finally:
        Examples.database.engine.dispose()
        print(f"seed {number}: {dict(sorted(Examples.reached.items()))}")
    return Examples.reached


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Machine, marks=pytest.mark.slow),
        pytest.param(BlockMachine, marks=pytest.mark.sample(0)),
        IndexMachine,
    ],
)
def test_the_index_is_right_whatever_comes_between(dsn: str, machine: type[Machine]) -> None:
    reached = run_machine(dsn, EXAMPLES or (7 if machine is Machine else 2), machine=machine)
    assert machine is not Machine or set(reached) >= REACHED


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(UniqueMachine, marks=pytest.mark.slow),
        pytest.param(EqualNullsMachine, marks=pytest.mark.by_hand("sweeps")),
    ],
)
def test_a_unique_index_is_right_whatever_comes_between(dsn: str, machine: type[Machine]) -> None:
    """The index reports each duplicate, isn't switched with one, and refuses all duplicates after the switch."""
    reached = run_machine(dsn, EXAMPLES or 10, machine=machine)
    assert {*REACHED, "duplicates found", "refused"} - {"rebuild, aborted"} <= set(+reached)


@pytest.mark.by_hand("soak")
@pytest.mark.parametrize("variant", AT_RANDOM, ids=lambda variant: variant.__name__)
def test_it_finds_what_was_broken_on_purpose(dsn: str, monkeypatch: pytest.MonkeyPatch, variant: Variant) -> None:
    variant(monkeypatch)
    with pytest.raises(Exception, match=FOUND) as found:
        run_machine(dsn, 60, number=1, shrink=False)
    print(f"{variant.__name__}: {str(found.value)[:300]}")
