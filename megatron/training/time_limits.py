"""How long ranks wait for each other before a process ends. Three clocks, of which each is later than the one before:

1. The watchdog (`watchdog_seconds`): of a step, three times the longest one if that is more. It names the rank.
2. The device's groups, once the first steps are done (`collective_timeout`): a minute later than the watchdog.
3. The host group, and the device's groups until then (`distributed_timeout`): later than the hour that the watchdog
   gives to what is not a step.

So what takes one rank long must be waited for on the host; only steps and evaluations wait on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.mpu.state import ParallelState
from megatron.training.progress import SLOW_SECONDS

_LATER = 60.0  # a clock than the one before, at least: the verdict is to reach all ranks


@dataclass(frozen=True)
class TimeLimits:
    """The clocks of a run, in seconds.

    Attributes:
        distributed, collective, watchdog: the keys; 0 or less: no limit of its own (`collective`), none at all
            (`watchdog`).
    """

    distributed: float
    collective: float
    watchdog: float

    @property
    def host(self) -> float:
        """Of the host group, and of the device's groups until the first steps are done."""
        slow = max(self.watchdog, SLOW_SECONDS) + 10 * _LATER if self.watchdog > 0 else 0.0
        return max(self.distributed, slow)

    def device(self, longest_step: float) -> float:
        """Of the device's groups when the first steps are done, of which the longest took so many seconds."""
        if self.collective <= 0:
            return self.host
        watched = max(self.watchdog, 3 * longest_step) + _LATER if self.watchdog > 0 else 0.0
        return min(self.host, max(self.collective, watched))


def limit_device(state: ParallelState, seconds: float) -> None:
    """Set the limit of what the device's groups are asked for from now on."""
    for group in {dist.group.WORLD, *state.groups.values()}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
