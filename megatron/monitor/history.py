"""The whole of what a run recorded, as a report shows it: series of metrics, their spikes, texts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.run_metrics import FILE, RunMetrics, read_metrics
from megatron.errors import UserError
from megatron.files import json_lines
from megatron.monitor.folder import read_folder

WINDOW, SIGMA = 128, 6.0  # of `spikes`, in logs


@dataclass(frozen=True)
class Point:
    """A metric of a step; `value` is None where it was not finite."""

    step: int
    value: float | None


@dataclass
class History:
    """A run as it was recorded.

    Attributes:
        path: the run folder.
        status: `status.json`, empty without one.
        metrics: all of them.
        series: metric -> its points, by step.
        texts: the newest of `samples.jsonl`.
        damage: lines that could not be read.
    """

    path: Path
    status: Mapping[str, Any]
    metrics: RunMetrics
    series: dict[str, list[Point]]
    texts: list[dict[str, Any]]
    damage: int

    @property
    def name(self) -> str:
        """The name that the run was started with, else that of its folder."""
        given = self.status.get("experiment")
        return given if isinstance(given, str) and given else layout.run_name(self.path)

    @property
    def seconds(self) -> float:
        """From the first line to the last, without the pauses between two starts."""
        steps, total = sorted(self.metrics.times), 0.0
        for a, b in pairwise(steps):
            if not any(a <= start < b for start in self.metrics.restarts):
                total += max(0.0, self.metrics.times[b] - self.metrics.times[a])
        return total


def read_history(path: Path) -> History:
    """The history of the run in `path`. Raises `UserError` when there is no `metrics.jsonl` in it."""
    file = path / FILE
    if not file.is_file():
        raise UserError(
            f"{path}: there is no metrics.jsonl in it. Name the folder that the run has as `save` (or `log_dir` when "
            "nothing is saved)"
        )
    metrics = read_metrics(file)
    series = {name: [Point(step, of[step]) for step in sorted(of)] for name, of in metrics.values.items()}
    samples, read = path / "samples.jsonl", []
    if samples.is_file():
        with samples.open("rb") as lines:
            read = list(json_lines(lines))
    texts = [one for one in read if one is not None]
    newest = [one for one in texts if one.get("step") == texts[-1].get("step")]
    damage = metrics.damage + len(read) - len(texts)
    return History(path, read_folder(path).status, metrics, series, newest, damage)


def spikes(points: list[Point], window: int = WINDOW, sigma: float = SIGMA) -> list[int]:
    """The steps whose value is not finite, or more than `sigma` standard deviations above the mean of the `window`
    values before it, of which there must be an eighth."""
    found: list[int] = []
    before: deque[float] = deque(maxlen=window)
    for point in points:
        if point.value is None:
            found.append(point.step)
            continue
        if len(before) >= window // 8:
            mean = math.fsum(before) / len(before)
            deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in before) / len(before))
            if point.value - mean > max(sigma * deviation, 1e-6 * abs(mean)):
                found.append(point.step)
        before.append(point.value)
    return found


def thin(points: list[Point], most: int) -> list[Point]:
    """At most about `most` of the points: of each stretch its first, lowest, highest and last, so that no peak is
    lost; every point without a value."""
    if len(points) <= most:
        return points
    size = math.ceil(4 * len(points) / most)
    kept: dict[int, Point] = {}
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        finite = [one for one in stretch if one.value is not None]
        ends = [stretch[0], stretch[-1]]
        if finite:
            ends += [min(finite, key=_value), max(finite, key=_value)]
        kept.update({one.step: one for one in [*ends, *(one for one in stretch if one.value is None)]})
    return [kept[step] for step in sorted(kept)]


def _value(point: Point) -> float:
    assert point.value is not None
    return point.value
