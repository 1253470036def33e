"""Histograms as inline SVG, coloured by the style sheet of the page they stand in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

_WIDTH, _HEIGHT, _BASE, _MOST_BINS = 420, 150, 120, 24


def histogram(values: Sequence[float], title: str, unit: str = "") -> str:
    """An `<svg>` of how often values occur: bars with their range and count on hover, the axis with both ends."""
    low, high = min(values, default=0), max(values, default=0)
    counts, edges = _binned(values, low, high)
    most, step = max(counts), _WIDTH / len(counts)
    bars = []
    for i, count in enumerate(counts):
        tall = round(100 * count / most, 1) if most else 0
        span = f"{edges[i]:,.4g} to {edges[i + 1]:,.4g}{unit}"
        bars.append(
            f'<rect x="{i * step:.1f}" y="{_BASE - tall:.1f}" width="{max(step - 1, 1):.1f}" height="{tall:.1f}">'
            f"<title>{escape(span)}: {count:,}</title></rect>"
        )
    said = f"{title}: {len(values):,} values, {low:,.4g} to {high:,.4g}{unit}"
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(said)}">{"".join(bars)}'
        f'<line x1="0" y1="{_BASE}" x2="{_WIDTH}" y2="{_BASE}"/>'
        f'<text x="0" y="{_BASE + 18}">{low:,.4g}</text>'
        f'<text x="{_WIDTH}" y="{_BASE + 18}" text-anchor="end">{high:,.4g}{escape(unit)}</text>'
        f'<text x="0" y="14">most: {most:,}</text></svg><figcaption>{escape(title)}</figcaption></figure>'
    )


def _binned(values: Sequence[float], low: float, high: float) -> tuple[list[int], list[float]]:
    """Counts and their edges: one bin per whole number where there are few of them."""
    if high <= low:
        return [len(values)], [low, high]
    whole = all(float(value).is_integer() for value in values)
    bins = min(_MOST_BINS, int(high - low) + 1) if whole else _MOST_BINS
    counts, edges = np.histogram(np.asarray(values, dtype=np.float64), bins=bins)
    return counts.tolist(), edges.tolist()
