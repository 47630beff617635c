"""What `make bench` compares is comparable: every side makes the same entries, and the writers do write."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from benchmarks import literal, peers, sides
from benchmarks.bars import LABELS, WIDTH
from benchmarks.bench import against_the_limit, chart, summarize, table
from benchmarks.data import DATASETS
from benchmarks.lines import lines
from benchmarks.scene import INDEX, Scene, Side
from benchmarks.server import BenchServer, bench_server

ROWS = 3000


@pytest.fixture(scope="module")
def server() -> Iterator[BenchServer]:
    with bench_server(18, "128MB") as running:
        yield running


@pytest.fixture(scope="module", params=sorted(DATASETS))
def scene(request: pytest.FixtureRequest, server: BenchServer) -> Scene:
    return Scene(server, DATASETS[request.param], ROWS, parallelism=2, writes=500)


def entries(scene: Scene, relation: str) -> tuple[int, str]:
    """How many there are, and a sum that tells different ones apart."""
    columns = scene.data.columns
    with scene.session.cursor() as cursor:
        cursor.execute(f"SELECT count(*), sum(hashtextextended(ROW({columns})::text, 0)) FROM {relation}")
        found = cursor.fetchone()
    return int(found[0]), str(found[1])


def test_the_cuts_are_a_partition_of_the_table(scene: Scene) -> None:
    cuts = scene.cuts(3)
    counted = [scene.value(f"SELECT count(*) FROM {scene.data.table} WHERE {cut}") for cut in cuts]
    assert len(counted) == 3
    assert sum(counted) == scene.rows
    assert min(counted) > scene.rows / 6


def test_every_write_changes_a_row(scene: Scene) -> None:
    write = scene.data.write(scene.rows)
    with scene.session.cursor() as cursor:
        for n in range(200):
            cursor.execute(*write(n))
            # A UUID may be greater than all there are.
            assert cursor.rowcount == 1 or scene.data.name == "uuid"


def test_the_limit_the_literal_scheme_and_ours_make_the_same_entries(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(literal, "BATCH_ROWS", 100)
    wanted = entries(scene, scene.data.table)
    assert wanted[0] == scene.rows
    scene.clear()
    assert peers.limit(scene)["all"] > 0
    assert entries(scene, "peer.entries") == wanted
    every = {side.name: side for side in [*peers.sides(scene), *sides.sides(scene)]}
    for name in ("literal", "ours, 2 workers, 3 pauses", "ours, rebuild", "ours, rebuild by key"):
        if every[name].lacking(scene) is not None:
            continue
        scene.clear()
        every[name].ready(scene)
        every[name].run(scene)
        assert entries(scene, "peer.entries" if name == "literal" else INDEX) == wanted
    scene.clear()
    assert scene.value("SELECT to_regclass(%s)", INDEX) is None


def test_a_ratio_is_to_the_limits_right_before_and_after() -> None:
    told = [("limit", 1.0), ("x", 2.0), ("limit", 3.0), ("y", 4.0), ("x", 10.0), ("limit", 5.0)]
    round_of = against_the_limit([{"side": name, "all": seconds} for name, seconds in told])
    assert [one["limit"] for one in round_of] == [3.0, 2.0, 3.0, 4.0, 4.0, 3.0]
    found = summarize(Side("x", "the x", lambda scene: {}), [round_of])
    assert (found["median_s"], found["ratio"], found["ratio_min"], found["ratio_max"]) == (6.0, 1.75, 1.0, 2.5)
    printed = table([found], {"pg_repack": "not here"})
    assert "| the x | 6.0 | 1.75 (1.00 – 2.50) |" in printed
    assert "| pg_repack | – | – | left out: not here |" in printed
    drawn = chart([found, {**found, "title": "ours & more", "ratio": 0.5}], "a < b")
    assert "a &lt; b" in drawn
    assert drawn.index("ours &amp; more") < drawn.index("the x")
    ends = [float(end) for end in re.findall(r"H([\d.]+)", drawn)]
    assert ends == [pytest.approx(WIDTH - 60)] * 2, "the whisker of the greatest ratio ends within the frame"
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="14"', drawn)]
    assert widths == pytest.approx([(WIDTH - LABELS - 60) * 0.5 / 2.5, (WIDTH - LABELS - 60) * 1.75 / 2.5], abs=0.1)


@pytest.mark.parametrize("linear", [False, True])
def test_a_chart_keeps_its_points_within_its_frame(linear: bool) -> None:
    chart = lines({"a": {1: 3.0, 1000: 250.0}, "b": {10: 0.7}}, "title", "rows", linear)
    points = [
        point.split(",") for line in chart.split("\n") if "polyline" in line for point in line.split('"')[1].split()
    ]
    assert len(points) == 3
    assert all(48 <= float(x) <= 482.1 and 48 <= float(y) <= 272 for x, y in points)
