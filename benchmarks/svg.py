"""What every chart's SVG begins and ends with."""

from __future__ import annotations

from collections.abc import Sequence


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """The elements on a white ground of so many units."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )
