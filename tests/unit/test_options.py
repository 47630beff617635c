"""The files that are made from the declared options are up to date."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_roir.cli import build, plan
from airflow_roir.cli.defined import PARAMETERS
from airflow_roir.cli.given import Given, takes
from airflow_roir.errors import InvalidInput
from airflow_roir.option import Kind
from airflow_roir.options import (
    BuildOptions,
    CompactOptions,
    VerifyOptions,
    WorkOptions,
    check_live_options,
    options_of,
)
from airflow_roir.task.given import given_to
from tests.unit.test_docs import ROOT


def test_what_is_made_from_the_options_is_up_to_date() -> None:
    for path, content in runpy.run_path(str(ROOT / "scripts" / "options.py"))["files"](with_airflow=False).items():
        assert path.read_text() == content, f"{path.relative_to(ROOT)} differs: make options"


CLASSES = (BuildOptions, VerifyOptions, CompactOptions)
WRONG = {
    Kind.NUMBER: (10**12, "many", True, 1.5),
    Kind.SPAN: (-1, 10**12, "6h", True),
    Kind.SHARE: (0, 101, "half", True),
    Kind.CHOICE: ("nonsense", 1),
    Kind.TRUTH: ("yes", 1),
    Kind.LIMITS: (1,),
    Kind.WINDOWS: (1, "nonsense"),
}


def complaints_of(check: Callable[..., object], **given: Any) -> str:
    with pytest.raises(InvalidInput) as refused:
        check(**given)
    return str(refused.value)


@pytest.mark.parametrize("declared", CLASSES)
def test_every_wrong_value_of_every_option_is_refused_beside_another(declared: type[WorkOptions]) -> None:
    options = options_of(declared)
    for one, other in zip(options, [*options[1:], options[0]], strict=True):
        for wrong in WRONG[one.kind]:
            alone = complaints_of(declared.asked, **{one.name: wrong})
            beside = complaints_of(declared.asked, **{other.name: WRONG[other.kind][0]})
            both = complaints_of(declared.asked, **{one.name: wrong, other.name: WRONG[other.kind][0]})
            assert both.startswith("2 errors:")
            assert f"- {alone}" in both
            assert f"- {beside}" in both


def test_all_wrong_live_options_are_named() -> None:
    said = complaints_of(lambda **given: check_live_options(given), parallelism=0, batch_rows=5, priority=1_000)
    assert all(f"- {name} is" in said for name in ("parallelism", "batch_rows", "priority"))


def test_all_wrong_fields_of_an_operator_are_named() -> None:
    values = dict.fromkeys((one.name for one in options_of(BuildOptions)), "")
    operator = SimpleNamespace(**values | {"parallelism": "many", "batch_rows": "5", "warn_after_s": "soon"})
    said = complaints_of(lambda: given_to(operator, BuildOptions))
    assert all(f"- {name}" in said for name in ("parallelism is 'many'", "batch_rows is 5", "warn_after_s"))


def test_all_wrong_options_of_a_command_are_named() -> None:
    @takes(BuildOptions)
    def command(given: Given) -> None:
        raise AssertionError("nothing may begin")

    values = {one: it.default for one, it in inspect.signature(command).parameters.items()}
    said = complaints_of(lambda: command(**values | {"parallelism": "0", "windows": "nonsense", "warn_after": "soon"}))
    assert "parallelism is 0" in said
    assert "nonsense" in said
    assert "--warn-after" in said


@pytest.mark.parametrize("command", [build.build, plan.plan])
def test_the_options_of_a_definition_are_declared_once(command: Callable[..., None]) -> None:
    """Found: the commands `build` and `plan` each declared them, and each read a definition from them."""
    taken = inspect.signature(command).parameters
    assert [taken[one.name] for one in PARAMETERS] == PARAMETERS
    assert not {"table", "keys", "unique"} & inspect.signature(inspect.unwrap(command)).parameters.keys()
