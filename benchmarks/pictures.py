"""Every chart of the docs, drawn from the results beside it: `make charts`. The benchmarks call this, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.charts import Bar, Shade, Strip, bars, histogram, lines, save, strips

RESULTS = Path(__file__).parent / "results"
# The lines of lookups, in the legend's order: which lookup, and whether it is prepared.
LOOKUPS = (
    ("local indexes", False),
    ("local indexes", True),
    ("ours, joined", False),
    ("ours, joined", True),
    ("ours, then by key", False),
    ("ours", False),
)

Rows = list[dict[str, Any]]
Series = dict[str, dict[float, float]]


def of_bench(path: Path) -> None:
    """The ratios to the limit, the fastest first, a chart for each data set on a version of PostgreSQL."""
    for name, found in json.loads(path.read_text()).items():
        data, _, version = name.partition(", PostgreSQL ")
        drawn = [
            Bar(
                one["title"].replace("`", ""),
                one["ratio"],
                one["ratio_min"],
                one["ratio_max"],
                one["side"].startswith("ours"),
            )
            for one in sorted(found["summaries"], key=lambda one: float(one["ratio"]))
        ]
        title = f"Wall time to the limit's: {found['data']}, {found['rows']:,} rows, PostgreSQL {version}"
        save(bars(drawn, title, mark=1.0), path.with_name(f"{path.stem}-{data}-{version}.svg"))


def of_curves(path: Path) -> None:
    """A chart `curve-….svg` for each curve that was measured."""
    for name, found in json.loads(path.read_text()).items():
        for chart, (title, across, series, linear) in _curve(name, found).items():
            save(lines(series, title, across, linear), path.with_name(f"curve-{chart}.svg"))


def of_partitions(path: Path) -> None:
    """The time of a lookup, by the number of partitions."""
    found = json.loads(path.read_text())["results"]
    series = {
        f"{lookup}{', prepared' if prepared else ''}": {
            row["partitions"]: row["p50_ms"] for row in found if (row["lookup"], row["prepared"]) == (lookup, prepared)
        }
        for lookup, prepared in LOOKUPS
    }
    title = "Milliseconds of a lookup of five rows, median"
    save(lines(series, title, "number of partitions"), path.with_suffix(".svg"))


def of_pause(path: Path) -> None:
    """The seconds until the last worker stops, beside a batch's seconds."""
    found = json.loads(path.read_text())
    seconds = [one["seconds"] for one in found["by_sql"]]
    summary = found["summaries"][0]
    marks = {f"{what} {share}": summary[key] for what, share, key in (
        ("pause", "p50", "p50_s"), ("pause", "p99", "p99_s"),
        ("batch", "p50", "batch_p50_s"), ("batch", "p99", "batch_p99_s"),
    )}  # fmt: skip
    title = f"Seconds from a pause to the last worker's stop ({len(seconds)} pauses)"
    save(histogram(seconds, marks, title), path.with_suffix(".svg"))


def of_governor(path: Path) -> None:
    """The load's p99, the replica's lag and the build over time, for light and for dark pages."""
    found = json.loads(path.read_text())
    seconds: Rows = found["seconds"]

    def points(name: str, scale: float = 1) -> list[tuple[float, float]]:
        return [(row["at"], row[name] / scale) for row in seconds if row.get(name) is not None]

    asked = found["asked"]
    workers = {"granted": points("granted"), "at work": points("working")}
    drawn = [
        Strip(
            "pgbench: p99 of each second, ms", {"p99": points("p99_ms")}, ("asked for", asked["p99_ms"]), is_log=True
        ),
        Strip("how far the replica is behind, MB", {"lag": points("lag_bytes", 1e6)}, ("limit", asked["lag_mb"])),
        Strip("workers", {name: series for name, series in workers.items() if series}),
        Strip("rows copied, millions", {"rows": points("rows", 1e6)}),
    ]
    shades = [
        Shade(one["side"], one["begin"], one["end"], "governed" in one["side"])
        for one in found["stretches"]
        if one["side"] != "calm"
    ]
    for page, is_dark in (("light", False), ("dark", True)):
        save(strips(drawn, shades, "seconds", is_dark), path.with_name(f"{path.stem}-{page}.svg"))


def of_young(path: Path) -> None:
    """A year of each side: the indexes' size, the pages that lookups touch, what was written; for both pages."""
    found = json.loads(path.read_text())
    arms = [one["arm"] for one in found["arms"]]
    # The sides that compact or vacuum come first, in our colours, beside those that they are compared with.
    arms.sort(key=lambda arm: ("compact" not in arm, "vacuum" not in arm, arm != "rebuild", arm != "none"))

    def points(name: str, scale: float = 1) -> dict[str, list[tuple[float, float]]]:
        return {
            arm: [(look["day"], look[name] / scale) for look in found["looks"] if look["arm"] == arm] for arm in arms
        }

    written = {
        arm: [
            (look["day"], (look["care_wal"] + look["care_files"]) / 1e9)
            for look in found["looks"]
            if look["arm"] == arm
        ]
        for arm in arms
    }
    sizes = {arm: [(day, size / 1e6) for day, size in enumerate(found["sizes"][arm], start=1)] for arm in arms}
    drawn = [
        Strip("size of the indexes after the night, MB", sizes),
        Strip("pages that a lookup touches, mean", points("pages")),
        Strip("pages that a lookup touches, p99", points("pages_p99")),
        Strip("written at night since the first day, WAL and files, GB", written),
    ]
    for page, is_dark in (("light", False), ("dark", True)):
        save(strips(drawn, [], "days", is_dark), path.with_name(f"{path.stem}-{page}.svg"))


def _curve(name: str, found: dict[str, Any]) -> dict[str, tuple[str, str, Series, bool]]:
    rows: Rows = found["table"]
    if name == "batch":
        title = f"Seconds of a build of {found['data']}, {found['rows']:,} rows"
        sides = {"ours": "all, s", "ours, its build phase": "build, s"}
        edge, points = rows[0], [(_batch_rows(row), row) for row in rows[1:]]
        of_limit: Series = {"the limit": {size: edge["all, s"] for size, _ in points}}
        seconds: Series = {side: {size: row[key] for size, row in points} for side, key in sides.items()}
        wal: Series = {"ours": {size: row["WAL bytes per row"] for size, row in points}}
        wal["the limit"] = {size: edge["WAL bytes per row"] for size, _ in points}
        return {
            "batch": (title, "rows per batch", seconds | of_limit, False),
            "wal": ("Bytes of WAL per row", "rows per batch", wal, False),
        }
    if name == "size":
        peaks: Rows = found["memory_mb"]
        sealing = _series(rows, "seal, s", "native index, s", "and vacuum, s")
        memory = _series(peaks, *[key for key in peaks[0] if key != "rows"])
        return {
            "size": ("Seconds of a build", "rows of the table", _series(rows, "ours, s", "limit, s"), True),
            "seal": (
                "Seconds of the seal, and of one parallel CREATE UNIQUE INDEX",
                "rows of the table",
                sealing,
                True,
            ),
            "memory": ("Most memory of a worker, in MB", "rows of the table", memory, True),
        }
    if name == "horizon":
        ages: list[Series] = [
            {side: {at: sample[n] for at, sample in samples} for side, samples in found["samples"].items()}
            for n in (0, 1)
        ]
        since = "seconds since the begin"
        return {
            "horizon": ("Seconds of the oldest transaction", since, ages[0], True),
            "xids": ("Age of the oldest transaction id held, beside a writer", since, ages[1], True),
        }
    if name == "control":
        both = _series(rows, "batch, ms", "copy, ms")
        return {"control": ("Milliseconds per transaction, median", "rows per batch", both, False)}
    if name == "plan":
        return {"plan": ("Seconds of planning 10,000 ranges", "partitions", _series(rows, "plan, s"), False)}
    return {}


def _batch_rows(row: dict[str, Any]) -> int:
    return int(str(row["batch"]).rpartition(" ")[2].replace(",", ""))


def _series(rows: Rows, *names: str) -> Series:
    across = next(iter(rows[0]))
    return {name: {row[across]: row[name] for row in rows} for name in names}


def main() -> None:
    """All of them."""
    of_bench(RESULTS / "bench.json")
    of_bench(RESULTS / "shapes.json")
    of_curves(RESULTS / "curves.json")
    of_partitions(RESULTS / "partitions.json")
    of_pause(RESULTS / "pause.json")
    if (RESULTS / "governor.json").exists():
        of_governor(RESULTS / "governor.json")
    of_young(RESULTS / "young.json")


if __name__ == "__main__":
    main()
