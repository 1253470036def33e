"""What a run wrote to its `metrics.jsonl`, each step once.

Steps after a checkpoint are trained again when a run is restarted after a failure, or goes back: the later lines count,
and those of steps that it did not come to again do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.files import json_lines, number, whole

FILE = "metrics.jsonl"
LOSS = "train/lm_loss"
OF_LOGS = (LOSS, "train/learning_rate")
"""What tells a log of training steps from other lines: one of steps that forget alone has no `LOSS`."""
_OF_A_LINE = ("step", "time", "start")


@dataclass
class RunMetrics:
    """Everything that was measured.

    Attributes:
        values: metric -> step -> its value; None where it was not finite.
        times: the time (seconds since 1970) of each step that has a line.
        restarts: the steps at which a start of the run continued.
        repeated: how many logged steps were trained again.
        damage: lines that could not be read.
    """

    values: dict[str, dict[int, float | None]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)
    repeated: int = 0
    damage: int = 0

    @property
    def logged(self) -> set[int]:
        """The steps with a log of training."""
        return {step for name in OF_LOGS for step in self.values.get(name, ())}

    def by_step(self) -> dict[int, dict[str, float]]:
        """The finite ones by step, ascending."""
        found: dict[int, dict[str, float]] = {}
        for name, of in self.values.items():
            for step, value in of.items():
                if value is not None:
                    found.setdefault(step, {})[name] = value
        return dict(sorted(found.items()))

    def _restart(self, step: int, newest: int) -> int:
        """The run continues after `step`: what was measured after that is measured again."""
        if newest >= 0:  # else nothing was before: a run that began from a checkpoint of another one
            self.restarts.append(step)
        self.repeated += sum(later > step for later in self.logged)
        for of in (self.times, *self.values.values()):
            for later in [one for one in of if one > step]:
                del of[later]
        return min(newest, step)


def is_log(line: Mapping[str, Any]) -> bool:
    """Whether a line of the file is a log of training steps; else it is of an evaluation, or a start."""
    return any(name in line for name in OF_LOGS)


def read_metrics(path: Path) -> RunMetrics:
    """Those of the file `path`; nothing without it."""
    found, newest = RunMetrics(), -1
    if not path.is_file():
        return found
    with path.open("rb") as lines:
        for line in json_lines(lines):
            step = None if line is None else whole(line.get("step"))
            if line is None or step is None:
                found.damage += 1
                continue
            starts = line.get("start") is True
            if starts or (is_log(line) and step <= newest):  # older runs have no line for a start
                newest = found._restart(step if starts else step - 1, newest)
            if is_log(line):
                newest = max(newest, step)
            if (time := number(line.get("time"))) is not None:
                found.times[step] = time
            for name in line.keys() - _OF_A_LINE:
                found.values.setdefault(name, {})[step] = number(line[name])
    return found
