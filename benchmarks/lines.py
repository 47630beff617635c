"""A chart of lines, over logarithmic axes or linear ones, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10

from benchmarks.svg import svg

WIDTH, HEIGHT, MARGIN, LEGEND = 720, 320, 48, 190
COLOURS = ("#b5562a", "#e0a070", "#777", "#bbb", "#4a78b5", "#1d3b63")


class Axis:
    """Where a value is on an axis, from 0 to 1. Linear ones begin at 0. points: it is marked at each of these."""

    def __init__(self, values: Sequence[float], linear: bool, points: bool) -> None:
        self.linear = linear
        if linear:
            most = max([*values, 1e-9])
            step = 10 ** floor(log10(most))
            step = next(s for s in (step / 5, step / 2, step, step * 2) if most / s <= 6)
            self.low, self.high = 0.0, most if points else ceil(most / step) * step
            self.ticks = [step * n for n in range(int(self.high / step + 1e-6) + 1)]
        else:
            low, high = floor(log10(min(values))), ceil(log10(max(values)))
            self.low, self.high = (log10(min(values)), log10(max(values))) if points else (low, high)
            self.ticks = sorted(set(values)) if points else [10.0**power for power in range(low, high + 1)]

    def place(self, value: float) -> float:
        """From 0 to 1."""
        return ((value if self.linear else log10(value)) - self.low) / max(self.high - self.low, 1e-9)


def lines(series: Mapping[str, Mapping[float, float]], title: str, across: str, linear: bool = False) -> str:
    """Each series as a line of its points (x, y), over logarithmic axes all of them positive. across: what x is."""
    wide, tall = WIDTH - 2 * MARGIN - LEGEND, HEIGHT - 2 * MARGIN
    x_axis = Axis([x for points in series.values() for x in points], linear, points=True)
    y_axis = Axis([y for points in series.values() for y in points.values()], linear, points=False)

    def place(x: float, y: float) -> tuple[float, float]:
        return MARGIN + x_axis.place(x) * wide, HEIGHT - MARGIN - y_axis.place(y) * tall

    parts = [
        f'<text x="{MARGIN}" y="20" font-size="14">{title}</text>',
        f'<text x="{MARGIN}" y="{HEIGHT - 10}">{across}</text>',
    ]
    for tick in y_axis.ticks:
        y = HEIGHT - MARGIN - y_axis.place(tick) * tall
        parts.append(f'<path d="M{MARGIN:.1f} {y:.1f}H{WIDTH - MARGIN - LEGEND}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:,.10g}</text>')
    for tick in x_axis.ticks:
        x = MARGIN + x_axis.place(tick) * wide
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{_short(tick)}</text>')
    for n, (name, points) in enumerate(series.items()):
        colour = COLOURS[n % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in sorted(points.items()))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = WIDTH - LEGEND - MARGIN + 12, MARGIN + 20 * n
        parts.append(f'<path d="M{x} {y}h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 22}" y="{y + 4}">{name}</text>')
    return svg(WIDTH, HEIGHT, parts)


def _short(value: float) -> str:
    return f"{value / 1_000_000:.10g} M" if value >= 1_000_000 else f"{value:,.10g}"
