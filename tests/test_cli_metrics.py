"""`roir metrics`: printed, as a file that another program reads, and served."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from airflow_roir.cli import metrics_text
from airflow_roir.cli.metrics_server import OneLook, serving
from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput
from tests.engine import steps
from tests.engine.steps import sql
from tests.test_cli import ROIR, here

pytestmark = pytest.mark.sample(2)


def values(text: str) -> dict[str, float]:
    return {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}


@pytest.fixture
def index(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.begin(database)


def test_it_prints(dsn: str, index: None) -> None:
    printed = here(dsn, "metrics").stdout
    assert values(printed)["roir_operation_rows_estimate"] == 100
    assert printed.startswith("# HELP roir_up ")


def test_it_says_why_it_can_not(tmp_path: Path) -> None:
    done = here("host=/nowhere dbname=app", "metrics", code=1)
    assert values(done.stdout)["roir_up"] == 0
    assert "/nowhere" in done.stderr
    here("host=/nowhere dbname=app", "metrics", "--textfile", str(tmp_path / "roir.prom"), code=1)
    # Else what was true before would be shown for ever.
    assert values((tmp_path / "roir.prom").read_text())["roir_up"] == 0


def test_the_file_is_replaced_at_once(dsn: str, index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "roir.prom"
    old = os.umask(0o077)
    try:
        here(dsn, "metrics", "--textfile", str(path))
    finally:
        os.umask(old)
    first = path.read_text()
    assert values(first)["roir_up"] == 1
    # node_exporter is another user.
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o640)

    def torn(number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_text.os, "fsync", torn)
        said = here(dsn, "metrics", "--textfile", str(path), code=2).stderr
    assert "No space left on device" in said
    assert path.read_text() == first
    assert list(tmp_path.iterdir()) == [path]
    # A file that a killed process has left is removed.
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f".roir.prom.{ended.pid}.x"
    left.write_text("roir_up")
    here(dsn, "metrics", "--textfile", str(path))
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_nobody_would_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.prom").mkdir()
    for given in ("roir.txt", "folder.prom", "none/roir.prom"):
        said = here("host=/nowhere", "metrics", "--textfile", str(tmp_path / given), code=2).stderr
        assert "roir: " in said
    here("host=/nowhere", "metrics", "--textfile", "a.prom", "--listen", "localhost:1", code=2)


@pytest.mark.parametrize("address", ["9187", ":9187", "localhost:", "localhost:http", "127.0.0.1:99999", "256.0.0.1:1"])
def test_an_address_that_can_not_be(database: Database, address: str) -> None:
    with pytest.raises(InvalidInput, match=r"host:port|can't serve"), serving(database, address):
        pass


def get(address: str, names: str = "") -> str:
    with urllib.request.urlopen(f"http://{address}/metrics{names}", timeout=30) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


def test_it_serves(database: Database, index: None) -> None:
    """Found: `roir metrics --listen`: `/metrics?name[]=…` was an error 500. It holds: it answers with these metrics."""
    with serving(database, "127.0.0.1:0") as address:
        assert values(get(address))["roir_up"] == 1
        assert values(get(address))["roir_operation_driven"] == 1
        some = get(address, "?name[]=roir_up&name[]=roir_operation_rows_total&name[]=no_such")
        assert {line.split("{")[0].split(" ")[0] for line in some.splitlines() if not line.startswith("#")} == {
            "roir_up",
            "roir_operation_rows_total",
        }
    with serving(Database("host=/nowhere"), "[::1]:0") as address:
        assert values(get(address)) == {"roir_up": 0, "roir_problem": 1}


def test_however_many_ask_one_looks() -> None:
    begun, may_end = threading.Event(), threading.Event()
    looks: list[int] = []

    def look() -> tuple[list[Any], str | None]:
        looks.append(len(looks))
        begun.set()
        may_end.wait(30)
        return [GaugeMetricFamily("n", "", len(looks))], None

    one_look = OneLook(look, lambda text: None)
    found: list[float] = []
    asking = [
        threading.Thread(target=lambda: found.append(next(iter(one_look.collect())).samples[0].value)) for _ in range(8)
    ]
    asking[0].start()
    assert begun.wait(30)
    for one in asking[1:]:
        one.start()
    while one_look.waiting < len(asking) - 1:
        pass
    may_end.set()
    for one in asking:
        one.join(30)
    assert (looks, found) == ([0], [1.0] * 8)
    # A later caller gets a look of its own, also after one that failed.
    assert [one.samples[0].value for one in one_look.collect()] == [2.0]


def test_a_look_that_fails_fails_all_who_wait_and_no_other() -> None:
    answers: Iterator[Any] = iter([ValueError("broken"), ([], None), ([], "gone"), ([], "gone"), ([], None)])
    said: list[str] = []

    def look() -> Any:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    one_look = OneLook(look, said.append)
    with pytest.raises(ValueError, match="broken"):
        list(one_look.collect())
    for _ in range(4):
        assert list(one_look.collect()) == []
    assert said == ["gone", "the database is read again"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(dsn: str, number: int) -> None:
    served = subprocess.Popen(
        [ROIR, "metrics", "--listen", "127.0.0.1:0"],
        env={**os.environ, "ROIR_DSN": dsn},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert served.stderr is not None
        [address] = re.findall(r"http://(\S+)/metrics", served.stderr.readline())
        assert values(get(address))["roir_up"] == 1
        [(sessions,)] = sql(
            steps.session(dsn), "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'roir metrics'"
        )
        assert sessions == 0
        served.send_signal(number)
        assert served.wait(30) == 0
        assert "Traceback" not in served.stderr.read()
    finally:
        served.kill()
        served.wait()
    assert sys.exc_info() == (None, None, None)
