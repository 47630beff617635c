"""A chart of horizontal bars with their spread, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.svg import svg

WIDTH, LABELS, ROW, TOP = 900, 470, 22, 56
OURS, OTHERS, SPREAD = "#b5562a", "#999", "#333"


@dataclass(frozen=True)
class Bar:
    """One bar. low, high: the whisker's ends."""

    label: str
    value: float
    low: float
    high: float
    is_ours: bool


def bars(drawn: Sequence[Bar], title: str, mark: float) -> str:
    """A row for each, with a line at `mark`, all from 0."""
    scale = (WIDTH - LABELS - 60) / max(bar.high for bar in drawn)
    height = TOP + ROW * len(drawn) + 12
    parts = [
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        f'<path d="M{LABELS + mark * scale:.1f} {TOP - 16}V{height - 8}" stroke="{SPREAD}" stroke-dasharray="3 3"/>',
    ]
    for n, bar in enumerate(drawn):
        y = TOP + ROW * n
        parts += [
            f'<text x="{LABELS - 8}" y="{y + 4}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LABELS}" y="{y - 7}" width="{bar.value * scale:.1f}" height="14" '
            f'fill="{OURS if bar.is_ours else OTHERS}"/>',
            f'<path d="M{LABELS + bar.low * scale:.1f} {y}H{LABELS + bar.high * scale:.1f}" stroke="{SPREAD}"/>',
            f'<text x="{LABELS + bar.high * scale + 6:.1f}" y="{y + 4}">{bar.value:.2f}</text>',
        ]
    return svg(WIDTH, height, parts)
