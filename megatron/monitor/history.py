"""The whole of what a run measured: `metrics.jsonl` from its first line to its last, each step once.

Steps after a checkpoint are trained again when a run is restarted after a failure: the later lines count.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.errors import UserError
from megatron.monitor.folder import number, read_folder, whole

LOSS = "train/lm_loss"
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
        series: metric -> its points, by step.
        times: the time (seconds since 1970) of each step that has a line.
        restarts: the steps at which a start of the run continued.
        repeated: how many logged steps were trained again.
        damage: lines that could not be read.
        texts: the newest of `samples.jsonl`.
    """

    path: Path
    status: Mapping[str, Any]
    series: dict[str, list[Point]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)
    repeated: int = 0
    damage: int = 0
    texts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name that the run was started with, else that of its folder."""
        given = self.status.get("experiment")
        return given if isinstance(given, str) and given else layout.run_name(self.path)

    @property
    def seconds(self) -> float:
        """From the first line to the last, without the pauses between two starts."""
        steps, total = sorted(self.times), 0.0
        for a, b in pairwise(steps):
            if not any(a <= start < b for start in self.restarts):
                total += max(0.0, self.times[b] - self.times[a])
        return total


def read_history(path: Path) -> History:
    """The history of the run in `path`. Raises `UserError` when there is no `metrics.jsonl` in it."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        raise UserError(
            f"{path}: there is no metrics.jsonl in it. Name the folder that the run has as `save` (or `log_dir` when "
            "nothing is saved)"
        )
    found = History(path, read_folder(path).status)
    values: dict[str, dict[int, float | None]] = {}
    newest = -1
    for line in _lines(file, found):
        step = whole(line.get("step"))
        if step is None:
            found.damage += 1
            continue
        starts = line.get("start") is True
        if starts or (LOSS in line and step <= newest):  # older runs have no line for a start
            newest = _restart(found, values, step if starts else step - 1, newest)
        if LOSS in line:
            newest = max(newest, step)
        if (time := number(line.get("time"))) is not None:
            found.times[step] = time
        for name, value in line.items():
            if "/" in name:
                values.setdefault(name, {})[step] = number(value)
    if (samples := path / "samples.jsonl").is_file():
        texts = list(_lines(samples, found))
        found.texts = [one for one in texts if one.get("step") == texts[-1].get("step")]
    found.series = {name: [Point(step, of[step]) for step in sorted(of)] for name, of in values.items()}
    return found


def _restart(found: History, values: dict[str, dict[int, float | None]], step: int, newest: int) -> int:
    """The run continues after `step`: what was measured after that is measured again."""
    if newest >= 0:  # else nothing was before: a run that began from a checkpoint of another one
        found.restarts.append(step)
    found.repeated += sum(later > step for later in values.get(LOSS, ()))
    for of in values.values():
        for later in [one for one in of if one > step]:
            del of[later]
    for later in [one for one in found.times if one > step]:
        del found.times[later]
    return min(newest, step)


def _lines(path: Path, found: History) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for line in lines:
            try:
                entry = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError):
                entry = ()
            if isinstance(entry, dict):
                yield entry
            elif entry is not None:
                found.damage += 1


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
