"""A chart of lines over logarithmic axes, as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, log10

WIDTH, HEIGHT, MARGIN, LEGEND = 720, 320, 48, 190
COLOURS = ("#b5562a", "#e0a070", "#777", "#bbb", "#4a78b5", "#1d3b63")


def lines(series: Mapping[str, Mapping[float, float]], title: str, across: str) -> str:
    """Each series as a line of its points (x, y), all of them positive. across: what x is."""
    xs = sorted({x for points in series.values() for x in points})
    ys = [y for points in series.values() for y in points.values()]
    low, high = floor(log10(min(ys))), ceil(log10(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        wide, tall = WIDTH - 2 * MARGIN - LEGEND, HEIGHT - 2 * MARGIN
        right = (log10(x) - log10(xs[0])) / max(log10(xs[-1]) - log10(xs[0]), 1e-9)
        up = (log10(y) - low) / max(high - low, 1)
        return MARGIN + right * wide, HEIGHT - MARGIN - up * tall

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="20" font-size="14">{title}</text>',
        f'<text x="{MARGIN}" y="{HEIGHT - 10}">{across}</text>',
    ]
    for power in range(low, high + 1):
        left, y = place(xs[0], 10**power)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{WIDTH - MARGIN - LEGEND}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{10**power:g}</text>')
    for x in xs:
        right, _ = place(x, 10**low)
        parts.append(f'<text x="{right:.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{x:,g}</text>')
    for n, (name, points) in enumerate(series.items()):
        colour = COLOURS[n % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in sorted(points.items()))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = WIDTH - LEGEND - MARGIN + 12, MARGIN + 20 * n
        parts.append(f'<path d="M{x} {y}h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 22}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
