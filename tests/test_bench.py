"""The sides that `make bench` compares are comparable: each makes the same entries, and the writers do write."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import literal, peers, sides
from benchmarks.bench import against_the_limit, summarize, table
from benchmarks.charts import Bar, bars, lines, save
from benchmarks.data import DATASETS
from benchmarks.pictures import RESULTS, of_bench, of_curves, of_governor, of_partitions, of_pause, of_young
from benchmarks.scene import INDEX, Scene, Side
from benchmarks.server import BenchServer, bench_server

pytestmark = pytest.mark.sample(8)

ROWS = 3000
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def server() -> Iterator[BenchServer]:
    with bench_server(18, "128MB") as running:
        yield running


@pytest.fixture(scope="module", params=sorted(DATASETS))
def scene(request: pytest.FixtureRequest, server: BenchServer) -> Scene:
    return Scene(server, DATASETS[request.param], ROWS, parallelism=2, writes=500)


def entries(scene: Scene, relation: str) -> tuple[int, str]:
    """The number of entries, and a sum that tells different ones apart."""
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


@pytest.mark.by_hand("sweeps")
def test_the_limit_the_literal_scheme_and_ours_make_the_same_entries(scene: Scene) -> None:
    wanted = entries(scene, scene.data.table)
    assert wanted[0] == scene.rows
    scene.clear()
    assert peers.limit(scene)["all"] > 0
    assert entries(scene, "peer.entries") == wanted
    every = {side.name: side for side in [*peers.sides(scene), *sides.sides(scene)]}
    every["literal"] = replace(every["literal"], run=partial(literal.build, batch_rows=100))
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


def ratios(*found: tuple[str, float]) -> list[Bar]:
    return [Bar(label, ratio, ratio / 2, ratio * 2, label == "ours") for label, ratio in found]


def test_a_chart_is_readable_text_on_white_and_the_same_for_the_same_figures(tmp_path: Path) -> None:
    for name in ("first", "second"):
        save(bars(ratios(("ours", 0.5), ("the x & y", 1.75)), "a < b", mark=1.0), tmp_path / "new" / f"{name}.svg")
    drawn = (tmp_path / "new" / "first.svg").read_text()
    assert drawn == (tmp_path / "new" / "second.svg").read_text()
    texts = ["".join(element.itertext()) for element in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    assert {"a < b", "ours", "the x & y", "0.50", "1.75"} <= set(texts)
    assert texts.index("ours") < texts.index("the x & y")
    assert "fill: #ffffff" in drawn


@pytest.mark.parametrize("linear", [False, True])
def test_a_chart_keeps_its_points_within_its_frame(linear: bool) -> None:
    series = {"a": {1: 3.0, 1000: 250.0}, "b": {10: 0.7}}
    [axes] = lines(series, "title", "rows", linear).axes
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    drawn = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}
    assert drawn == series
    assert all(left <= x <= right and low <= y <= high for points in drawn.values() for x, y in points.items())


@pytest.mark.sample(0)
def test_every_picture_of_the_results_is_drawn_from_them(tmp_path: Path) -> None:
    for results in RESULTS.glob("*.json"):
        shutil.copy(results, tmp_path)
    for draw, name in ((of_bench, "bench"), (of_bench, "shapes"), (of_curves, "curves"), (of_partitions, "partitions"),
                       (of_pause, "pause"), (of_governor, "governor"), (of_young, "young")):  # fmt: skip
        if (tmp_path / f"{name}.json").exists():
            draw(tmp_path / f"{name}.json")
    assert {path.name for path in tmp_path.glob("*.svg")} == {path.name for path in RESULTS.glob("*.svg")}
