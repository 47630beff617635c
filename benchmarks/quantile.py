"""Quantiles as the benchmarks tell them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them don't exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]
