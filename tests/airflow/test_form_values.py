"""Numbers and truth that arrive as text from forms, templates and the Task State Store."""

from __future__ import annotations

import pytest

from airflow_roir.errors import InvalidInput
from airflow_roir.task.form_values import number, optional_text, whole_number, yes_or_no


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (4, 4),
        ("4", 4),
        (" 4 ", 4),
        ("100_000", 100_000),
        ("100,000", 100_000),
        (4.0, 4),
        ("-1", -1),
        (0, 0),
        ("2.0", 2),
        (2.0, 2),
    ],
)
def test_whole_numbers_are_read(value: object, read: int) -> None:
    """Found: `2.0` for a whole number passed the form and failed in the task. It holds: it is 2."""
    assert whole_number("parallelism", value) == read


@pytest.mark.parametrize("empty", [None, "", "  ", "None"])
def test_empty_is_none(empty: object) -> None:
    assert whole_number("parallelism", empty) is None
    assert optional_text(empty) is None
    assert yes_or_no("ignore_row_security", empty) is None


@pytest.mark.parametrize("bad", ["four", "4.5", "4.00.0", ".0", 4.5, True, [4], {"parallelism": 4}])
def test_what_is_no_whole_number_is_refused_by_name(bad: object) -> None:
    with pytest.raises(InvalidInput, match=r"parallelism is .*whole number"):
        whole_number("parallelism", bad)


@pytest.mark.parametrize(
    ("value", "read"), [(True, True), ("True", True), ("true", True), (False, False), ("False", False)]
)
def test_yes_or_no_is_read(value: object, read: bool) -> None:
    assert yes_or_no("ignore_row_security", value) is read


@pytest.mark.parametrize("bad", ["yes", 1, "0", []])
def test_what_is_neither_is_refused_by_name(bad: object) -> None:
    with pytest.raises(InvalidInput, match=r"ignore_row_security is .*true or false"):
        yes_or_no("ignore_row_security", bad)


def test_an_endless_value_is_not_repeated_whole() -> None:
    """The Task State Store takes sixty thousand characters, and messages about a value are shown in log and status."""
    for read in (whole_number, number, yes_or_no):
        with pytest.raises(InvalidInput) as refusal:
            read("parallelism", "x" * 60_000)
        assert len(str(refusal.value)) < 200
