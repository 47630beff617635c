"""Two operators' commands, all ordered pairs: the second one in the gaps of the first, beside readers and a writer.

Seen to fail if a view is made from facts that were read before its lock: it forgets to hide entries, or shows another
generation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.conftest import run_sql
from tests.engine import meeting, operators
from tests.engine.meeting import Meeting
from tests.engine.operators import CALLS, COMMANDS

# Each pair tries some of a command's gaps. Together the pairs try them all.
MOST_GAPS = 6
# Commands that need a scene of their own.
SCENE_OF = {"compact": ("calm",), "publish": ("rebuilt",), "abort": ("rebuilt",), "cancel attach": ("came",)}


def scenes(*commands: str) -> tuple[str, ...]:
    found = [SCENE_OF[command] for command in commands if command in SCENE_OF]
    return found[0] if found else ("left", "came")


CASES = [
    (scene, first, second, readers)
    for first, second in itertools.product(COMMANDS, repeat=2)
    for scene in scenes(first, second)
    for readers in ("none", "snapshots", "holding", "in it")
    if readers != "in it" or second in CALLS
]


@pytest.fixture(scope="module")
def templates(server: str) -> Iterator[dict[str, str]]:
    names = operators.make_templates(server)
    yield names
    operators.drop_templates(server, names)


@pytest.fixture(scope="module")
def gaps(server: str, templates: dict[str, str]) -> meeting.Gaps:
    return meeting.Gaps(server, templates)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("command", list(COMMANDS)[::-1])
def test_each_command_alone_does_what_it_is_for(server: str, templates: dict[str, str], command: str) -> None:
    """A command that is refused in every gap would meet no other."""
    with operators.cloned(server, templates[scenes(command)[0]]) as dsn:
        alone = Meeting(dsn, command, command)
        alone.run_alone()
        alone.close()
    assert (alone.failed, alone.found) == ({}, [])


# The second command runs between a read of the view by the first one and the lock for which the first one waits. Or the
# first command has the view, and the second one's reads are out of date once it gets the view.
@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("scene", "first", "second", "readers", "before"),
    [
        ("left", "sync", "detach by SQL", "in it", ""),
        ("left", "clean-up", "detach and drop by SQL", "in it", ""),
        ("left", "clean-up", "begin attach", "in it", ""),
        ("rebuilt", "publish", "detach by SQL", "in it", ""),
        ("left", "revert", "sync", "none", ""),
        ("left", "revert", "clean-up", "none", ""),
        # Seen: a clean-up put back capture marks that a prepare had made meanwhile.
        ("came", "prepare", "clean-up", "none", ""),
        # Seen: a clean-up met a drop's removals, and advised to undo them.
        ("left", "drop", "clean-up", "none", "INSERT INTO roir.event"),
    ],
)
def test_what_was_read_before_a_lock_is_read_again(
    server: str,
    templates: dict[str, str],
    gaps: meeting.Gaps,
    scene: str,
    first: str,
    second: str,
    readers: str,
    before: str,
) -> None:
    """In the last gap, or in the one before a statement that begins with `before`."""
    found = [at for at in gaps.of(scene, first, readers) if gaps.known[scene, first][at - 1].startswith(before)]
    assert meeting.meet(server, templates[scene], first, second, found[-1], readers) == []


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize(("scene", "first", "second", "readers"), CASES)
def test_in_no_gap_of_a_command_another_one_makes_anything_wrong(
    server: str, templates: dict[str, str], gaps: meeting.Gaps, scene: str, first: str, second: str, readers: str
) -> None:
    """Found: two operators' commands at once, in general: clean-up, detach, attach, sync, revert, publish, compact,
    drop, abort, prepare, verify. It holds: readers of every snapshot see what the table shows them, status and verify
    are right, and what gave way succeeds when it is repeated. Found: a publish beside an abort of its operation: a raw
    "relation … does not exist", or that the table was altered. It holds: it is fenced, or told what is gone.
    """
    found = gaps.of(scene, first, readers)
    step = -(-len(found) // MOST_GAPS) or 1
    begin = list(COMMANDS).index(second) % step
    wrong = {
        f"gap {at}": problems
        for at in found[begin::step]
        if (problems := meeting.meet(server, templates[scene], first, second, at, readers))
    }
    print(f"{len(found[begin::step])} of {len(found)} gaps")
    assert wrong == {}


@pytest.mark.sample(0)
def test_a_difference_between_view_and_table_is_found(server: str, templates: dict[str, str]) -> None:
    """The oracle of these tests finds differences."""
    with operators.cloned(server, templates["left"]) as dsn:
        run_sql(dsn, "CREATE OR REPLACE VIEW ix AS SELECT c1 AS k, c2 AS d, c3 AS id, c4 AS v FROM roir_data.g2 b")
        alone = Meeting(dsn, "begin attach", "begin attach")
        alone.compare("afterwards")
        alone.close()
    assert "afterwards, now: 20 entries without rows" in alone.found
