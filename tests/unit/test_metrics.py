"""The metrics' names in the dashboard are the code's; `make options` writes the table of the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_roir.engine.metrics.families import FAMILIES

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())


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
