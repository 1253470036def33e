"""What a run wrote to its `metrics.jsonl`, by step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

FILE = "metrics.jsonl"


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Finite metrics by step, ascending; of a step that was trained twice the later value. {} without a file."""
    found: dict[int, dict[str, float]] = {}
    for step, metrics in _lines(path):
        found.setdefault(step, {}).update(metrics)
    return dict(sorted(found.items()))


def _lines(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        step = values.pop("step", None) if isinstance(values, dict) else None
        if isinstance(step, int):
            yield (
                step,
                {
                    name: float(value)
                    for name, value in values.items()
                    if isinstance(value, float | int) and math.isfinite(value) and name != "time"
                },
            )
