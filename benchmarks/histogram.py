"""A histogram as SVG, and quantiles: all that the benchmarks need of a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from benchmarks.svg import svg

WIDTH, HEIGHT, MARGIN, BINS = 720, 260, 44, 40


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them don't exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def histogram(values: Sequence[float], beside: Sequence[float], title: str) -> str:
    """`values` in bars, with their median and 99th percentile, and those of `beside` (a batch's seconds) as lines."""
    most = max([*values, quantile(beside, 0.99)]) * 1.05
    counts = [0] * BINS
    for value in values:
        counts[min(int(value / most * BINS), BINS - 1)] += 1
    width, height = (WIDTH - 2 * MARGIN) / BINS, HEIGHT - 2 * MARGIN
    parts = [
        f'<text x="{MARGIN}" y="18" font-size="14">{title} ({len(values)} pauses)</text>',
    ]
    for place, count in enumerate(counts):
        tall = height * count / max(counts)
        parts.append(
            f'<rect x="{MARGIN + place * width:.1f}" y="{HEIGHT - MARGIN - tall:.1f}" width="{width - 1:.1f}" '
            f'height="{tall:.1f}" fill="#4a78b5"/>'
        )
    lines = (
        (quantile(values, 0.5), "pause p50", "#1d3b63", 0),
        (quantile(values, 0.99), "pause p99", "#1d3b63", 14),
        (quantile(beside, 0.5), "batch p50", "#b5562a", 28),
        (quantile(beside, 0.99), "batch p99", "#b5562a", 42),
    )
    for value, name, colour, drop in lines:
        x = MARGIN + value / most * (WIDTH - 2 * MARGIN)
        parts.append(f'<path d="M{x:.1f} {MARGIN - 12}V{HEIGHT - MARGIN}" stroke="{colour}" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{MARGIN + drop}" fill="{colour}">{name} {value:.2f} s</text>')
    parts.append(f'<path d="M{MARGIN} {HEIGHT - MARGIN}H{WIDTH - MARGIN}" stroke="#333"/>')
    for tick in range(6):
        x = MARGIN + tick / 5 * (WIDTH - 2 * MARGIN)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{most * tick / 5:.2f}</text>')
    return svg(WIDTH, HEIGHT, parts)
