"""Which rank the others wait for: what every rank's steps are made of, compared now and then."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.checkpoint.agreement import gather
from megatron.log import get_logger
from megatron.training.callback import Callback, due
from megatron.training.progress import PHASES

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

SIDE, PRODUCTS = 2048, 8  # of the products that an accelerator is timed with: 0.14 TFLOP


@dataclass(frozen=True)
class Share:
    """What a rank did in the mean step since the last report, in seconds.

    Attributes:
        reads, calls: reading data; in callbacks.
        waits: for the others at the start of a step, when all have read their data.
        computes: in the step, without waiting: on a CPU the time of the processor; on an accelerator that of a few
            products of matrices, which tell how fast it is.
    """

    host: str
    reads: float
    calls: float
    waits: float
    computes: float


@CALLBACKS.register("stragglers", phase="measure", idle={"straggler_interval": 0})
class Stragglers(Callback):
    """Every `straggler_interval` steps gathers what each rank did, says in a line who is waited for and why, and adds
    to the next log: `stragglers/rank`, the rank that waits least at the start of steps, so the one that the others wait
    for; `stragglers/wait`, seconds per step that the rank waits that waits most; `stragglers/slowest`, the rank that
    computes slowest, and `stragglers/slowness`, its time over the median of all."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    @classmethod
    def build(cls, context: RunContext) -> Stragglers | None:
        return cls(context.args.logging.straggler_interval) if context.state.host is not None else None

    def loaded(self, trainer: Trainer) -> None:
        self._since, self._before = trainer.step, self._sums(trainer)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if not due(trainer.step, self.interval):
            return
        trainer.settle()
        now, steps = self._sums(trainer), trainer.step - self._since
        reads, calls, waits, computes = ((a - b) / steps for a, b in zip(now, self._before, strict=True))
        if trainer.state.device.type != "cpu":
            computes = time_products(trainer.state.device)
        shares = gather(Share(socket.gethostname(), reads, calls, waits, computes), trainer.state)
        late = min(range(len(shares)), key=lambda rank: shares[rank].waits)
        slow = max(range(len(shares)), key=lambda rank: shares[rank].computes)
        slowness = shares[slow].computes / max(statistics.median(share.computes for share in shares), 1e-9)
        most = max(share.waits for share in shares)
        trainer.metrics.update(
            {
                "stragglers/rank": float(late),
                "stragglers/wait": most,
                "stragglers/slowest": float(slow),
                "stragglers/slowness": slowness,
            }
        )
        logger.info(
            f"iterations {self._since + 1} to {trainer.step}: up to {most:.3f} s per step are waited for rank {late} "
            f"({shares[late].host}), which reads data for {shares[late].reads:.3f} s and is in callbacks for "
            f"{shares[late].calls:.3f} s (medians {statistics.median(share.reads for share in shares):.3f} and "
            f"{statistics.median(share.calls for share in shares):.3f}); rank {slow} ({shares[slow].host}) computes "
            f"slowest, {slowness:.2f} times the median"
        )
        self._since, self._before = trainer.step, self._sums(trainer)

    def _sums(self, trainer: Trainer) -> tuple[float, float, float, float]:
        """Seconds of reading, of callbacks, of waiting, and of the processor in steps, since the start."""
        spent = trainer.progress.spent
        reading, training, calling = (spent[phase] for phase in PHASES)
        return reading[0], calling[0], trainer.engine.waited, training[1]


def time_products(device: torch.device) -> float:
    """Seconds that a few products take on an accelerator: the shorter of two tries. Waits for the device."""
    x = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    found = []
    for _ in range(2):
        torch.accelerator.synchronize(device)
        begun = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(x, x)
        torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found)
