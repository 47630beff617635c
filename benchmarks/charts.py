"""Four kinds of charts, as SVG. Their text can be found. On a white ground all are readable on light and dark pages;
strips, which are wide, come for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

# Text stays text; the same figures make the same file.
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "roir", "font.family": "sans-serif", "font.size": 9}

OURS, OTHERS, BATCHES, SPREAD = "#b5562a", "#999999", "#1d3b63", "#333333"
COLOURS = (OURS, "#e0a070", "#777777", "#bbbbbb", "#4a78b5", BATCHES)
BINS = 40
# The colours for light and for dark pages (the theme's): ground, text, faint text, series.
PAGES = {
    False: ("white", "#1f2733", "#5b6675", (OURS, BATCHES, "#777777", "#3f8f63", "#8a6bbf", "#b39020")),
    True: ("#14181e", "#e4e9f0", "#a3aebd", ("#e0a070", "#7fa8dd", "#bbbbbb", "#7cc79a", "#b9a3e3", "#e3cf6a")),
}


@dataclass(frozen=True)
class Bar:
    """One bar. low, high: the whisker's ends."""

    label: str
    value: float
    low: float
    high: float
    is_ours: bool


def bars(drawn: Sequence[Bar], title: str, mark: float) -> Figure:
    """A row for each, from the top down, with a line at `mark`, all from 0."""
    figure, axes = _frame(title, 9, 0.9 + 0.23 * len(drawn))
    places = range(len(drawn))
    axes.barh(
        places,
        [bar.value for bar in drawn],
        height=0.65,
        color=[OURS if bar.is_ours else OTHERS for bar in drawn],
        xerr=[[bar.value - bar.low for bar in drawn], [bar.high - bar.value for bar in drawn]],
        ecolor=SPREAD,
    )
    for place, bar in enumerate(drawn):
        axes.annotate(f"{bar.value:.2f}", (bar.high, place), (4, 0), textcoords="offset points", va="center")
    axes.axvline(mark, color=SPREAD, linestyle=":", linewidth=1)
    axes.set_yticks(places, [bar.label for bar in drawn])
    axes.invert_yaxis()
    axes.set_xlim(0, max(bar.high for bar in drawn) * 1.1)
    return figure


def lines(series: Mapping[str, Mapping[float, float]], title: str, across: str, linear: bool = False) -> Figure:
    """Each series as a line of its points (x, y), over logarithmic axes all of them positive. across: what x is."""
    figure, axes = _frame(title, 7.5, 3.3)
    for (name, points), colour in zip(series.items(), COLOURS, strict=False):
        axes.plot(*zip(*sorted(points.items()), strict=True), color=colour, label=name)
    if linear:
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(EngFormatter())
    else:
        axes.loglog()
        heights = [y for points in series.values() for y in points.values()]
        axes.set_ylim(10 ** floor(log10(min(heights))), 10 ** ceil(log10(max(heights))))
        axes.minorticks_off()
        axes.set_xticks(sorted({x for points in series.values() for x in points}))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_xlabel(across)
    axes.grid(axis="y", color="#dddddd")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def histogram(values: Sequence[float], marks: Mapping[str, float], title: str) -> Figure:
    """`values` in bars, and `marks` as lines, one colour for all whose names begin with the same word."""
    figure, axes = _frame(title, 7.5, 3)
    axes.hist(values, bins=BINS, range=(0, 1.05 * max(*values, *marks.values())), color="#4a78b5")
    words = list(dict.fromkeys(name.split()[0] for name in marks))
    for name, value in marks.items():
        colour = (BATCHES, OURS)[words.index(name.split()[0])]
        axes.axvline(value, color=colour, linestyle="--", linewidth=1, label=f"{name} {value:.2f}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


@dataclass(frozen=True)
class Strip:
    """One of several charts over the same time. series: of points (x, y); limit: a line, with its name."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    limit: tuple[str, float] | None = None
    is_log: bool = False


@dataclass(frozen=True)
class Shade:
    """Some time that all strips mark. is_ours: in our colour."""

    label: str
    begin: float
    end: float
    is_ours: bool


def strips(drawn: Sequence[Strip], shades: Sequence[Shade], across: str, is_dark: bool) -> Figure:
    """Charts one below the other, over the same x."""
    ground, text, faint, colours = PAGES[is_dark]
    figure = Figure(figsize=(9, 1.75 * len(drawn)), facecolor=ground, layout="constrained")
    every = figure.subplots(len(drawn), sharex=True)
    for axes, strip in zip(every, drawn, strict=True):
        axes.set_facecolor(ground)
        axes.set_title(strip.title, loc="left", fontsize=9, color=text)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(faint)
        axes.tick_params(colors=text)
        for shade in shades:
            axes.axvspan(shade.begin, shade.end, color=colours[0] if shade.is_ours else OTHERS, alpha=0.15, linewidth=0)
        for (name, points), colour in zip(strip.series.items(), colours, strict=False):
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1, label=name)
        if strip.limit is not None:
            name, height = strip.limit
            axes.axhline(height, color=text, linestyle=":", linewidth=1, label=name)
        if strip.is_log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        else:
            axes.set_ylim(bottom=0)
        if len(strip.series) > 1 or strip.limit is not None:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, labelcolor=text)
    for shade in shades:
        every[0].annotate(
            shade.label, (shade.begin, 1), (3, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
            va="top", fontsize=8, color=text,
        )  # fmt: skip
    every[-1].set_xlabel(across, color=text)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a chart; the folder need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the moment in it, so that the same results are the same file.
    figure.savefig(path, bbox_inches="tight", facecolor=figure.get_facecolor(), metadata={"Date": None})


def _frame(title: str, wide: float, tall: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(wide, tall), facecolor="white")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
