"""The metrics' names: in the guide and in the dashboard as in the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_roir.engine.metrics.families import FAMILIES, INDEX, OPERATION, Family

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())


def test_the_table_of_metrics_is_the_codes() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(roir_\w+)` \| (\w+)((?:, `\w+`)*) \| (.+) \|$", guide, re.MULTILINE)
    described = {name: (of, tuple(re.findall(r"`(\w+)`", more)), text) for name, of, more, text in rows}
    assert described == {name: (of.of, own_labels(of), of.help) for name, of in FAMILIES.items()}


def own_labels(family: Family) -> tuple[str, ...]:
    """Without those that all of an operation, or of an index, have."""
    common = OPERATION if family.of == "operation" else INDEX
    return tuple(label for label in family.labels if label not in common)


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_a_query_of_the_dashboard_names_what_is_there(query: str) -> None:
    names = set(re.findall(r"\broir_\w+", query))
    assert names
    assert names <= FAMILIES.keys()
    for name, selector in re.findall(r"\b(roir_\w+)\{([^}]*)\}", query):
        used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector))
        assert used <= set(FAMILIES[name].labels), name


def test_the_dashboard_shows_every_kind_of_figure() -> None:
    shown = set(re.findall(r"\broir_\w+", " ".join(queries())))
    wanted = "percent rows_total workers granted_workers throttled_seconds_total delta_bytes paused_seconds"
    assert {f"roir_operation_{name}" for name in wanted.split()} <= shown
    assert {"roir_up", "roir_capture_faults", "roir_signal_value", "roir_signal_limit"} <= shown
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {"${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
