"""Which target has which case of a sample: each exactly one, and of every test some in what CI runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import TARGETS, refuse_slow_sample, targets_of

FILE = SimpleNamespace(nodeid="tests/test_x.py")
SAMPLE, SLOW = pytest.mark.sample(2), pytest.mark.slow


class Case:
    """Stands in for a collected item. own: its test's marks; of_file: the file's."""

    def __init__(self, test: str, number: int, own: tuple[Any, ...] = (), of_file: tuple[Any, ...] = ()) -> None:
        self.nodeid = f"{FILE.nodeid}::{test}[{number}]"
        self.marks = [(SimpleNamespace(nodeid=self.nodeid), mark.mark) for mark in own] + [
            (FILE, mark.mark) for mark in of_file
        ]

    def iter_markers_with_node(self, name: str) -> Iterator[tuple[Any, Any]]:
        return ((node, mark) for node, mark in self.marks if mark.name == name)

    def iter_markers(self, name: str) -> Iterator[Any]:
        return (mark for _, mark in self.iter_markers_with_node(name))

    def get_closest_marker(self, name: str) -> Any:
        return next(self.iter_markers(name), None)


def targets(cases: list[Case]) -> Counter[tuple[str, str]]:
    found = zip(cases, targets_of(cases), strict=True)
    return Counter((case.nodeid.split("::")[1].partition("[")[0], target) for case, target in found)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([pytest.mark.sample(2)], {"test": 2, "sweeps": 38}),
        ([pytest.mark.sample(2, 10)], {"test": 2, "test-all": 10, "sweeps": 28}),
        ([pytest.mark.sample(50)], {"test": 40}),
        ([pytest.mark.sample(0)], {"test-all": 1, "sweeps": 39}),
        ([pytest.mark.sample(2), pytest.mark.sample(0)], {"test-all": 1, "sweeps": 39}),
        ([pytest.mark.slow], {"test-all": 40}),
        ([pytest.mark.sample(2), pytest.mark.by_hand("soak")], {"soak": 40}),
        ([], {"test": 40}),
    ],
    ids=["sample", "sample and more", "fewer than that", "none in make test", "both", "slow", "by hand", "none"],
)
def test_the_cases_of_a_test(marks: list[Any], expected: dict[str, int]) -> None:
    cases = [Case("one", number, own=tuple(marks)) for number in range(40)]
    assert {target: n for (_, target), n in targets(cases).items()} == expected


def test_of_a_files_tests_each_has_cases_in_what_ci_runs() -> None:
    of_file = (pytest.mark.sample(2),)
    cases = [Case(test, number, of_file=of_file) for test in ("a", "b", "c") for number in range(20)]
    cases.append(Case("d", 0, of_file=of_file))
    found = targets(cases)
    assert sum(n for (_, target), n in found.items() if target == "test") == 2
    for test in ("a", "b", "c"):
        assert found[test, "test-all"] == (0 if found[test, "test"] else 1)
    assert found["d", "test"] + found["d", "test-all"] == 1


def node(*marks: Any, of_case: tuple[Any, ...] = ()) -> Any:
    """Stands in for a test, with the marks of one of its cases, a class or a file."""
    case = [mark.mark for mark in of_case]
    own = [*(mark.mark for mark in marks), *case]
    return SimpleNamespace(nodeid="tests/test_x.py", own_markers=own, callspec=SimpleNamespace(marks=case))


@pytest.mark.parametrize("nodes", [[node(SAMPLE, SLOW)], [node(SLOW, SAMPLE), node()]], ids=["test", "file"])
def test_what_is_slow_and_a_sample_at_once_is_refused(nodes: list[Any]) -> None:
    with pytest.raises(pytest.UsageError, match=r"test_x\.py is marked both slow and sample"):
        refuse_slow_sample(SimpleNamespace(listchain=lambda: nodes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "nodes", [[node(SAMPLE), node(SLOW)], [node(SAMPLE, of_case=(SLOW,))]], ids=["test of a file", "case of a test"]
)
def test_some_of_a_sample_may_be_slow(nodes: list[Any]) -> None:
    refuse_slow_sample(SimpleNamespace(listchain=lambda: nodes))  # type: ignore[arg-type]


def test_the_makefile_has_each_target() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in TARGETS:
        assert f"\n{target}: " in makefile
