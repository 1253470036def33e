"""Norms of single gradients and weights, and the ratio of an update to its weight, in the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import Tensor

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.neox_arguments.parameter_rules import check_patterns
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


@CALLBACKS.register(
    "tensor_norms",
    phase="measure",
    idle={"log_grad_norm": False, "log_param_norm": False, "monitor_interval": 0},
    keys=("monitor_parameters",),
)
class TensorNorms(Callback):
    """Adds `gradient_norms/<name>` and `parameter_norms/<name>` (GPT-NeoX's names) to each log, and every
    `monitor_interval` steps both and `update_ratios/<name>` of the parameters that `monitor_parameters` matches.

    A norm is that of the whole parameter over all tensor-, pipeline- and ZeRO-ranks, of the unclipped gradient before
    the update and of the weight after it. A ratio is the norm of the change of the fp32 weight over that of the weight.
    """

    def __init__(
        self, *, gradients: bool, parameters: bool, interval: int = 0, patterns: Sequence[str] = ("*",)
    ) -> None:
        self.gradients = gradients
        self.parameters = parameters
        self.interval = interval
        self.patterns = patterns
        self._ratios: Callable[[], dict[str, Tensor]] | None = None

    @classmethod
    def build(cls, context: RunContext) -> TensorNorms:
        logging = context.args.logging
        return cls(
            gradients=logging.log_grad_norm,
            parameters=logging.log_param_norm,
            interval=logging.monitor_interval,
            patterns=logging.monitor_parameters,
        )

    def start(self, trainer: Trainer) -> None:
        if self.interval > 0:
            check_patterns(self.patterns, trainer.engine.all_names(), "monitor_parameters")

    def before_update(self, trainer: Trainer) -> None:
        self._ratios = trainer.engine.update_ratios() if due(trainer.step + 1, self.interval) else None
        if self._wants(trainer, self.gradients, trainer.step + 1):
            self._add(trainer, "gradient_norms", trainer.engine.grad_norms(), self.gradients)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self._wants(trainer, self.parameters, trainer.step):
            self._add(trainer, "parameter_norms", trainer.engine.param_norms(), self.parameters)
        if self._ratios is not None:
            self._add(trainer, "update_ratios", self._ratios(), everything=False)
            self._ratios = None

    def _wants(self, trainer: Trainer, logged: bool, step: int) -> bool:
        return (logged and due(step, trainer.args.logging.log_interval)) or due(step, self.interval)

    def _add(self, trainer: Trainer, kind: str, values: Mapping[str, Tensor], everything: bool) -> None:
        """`everything`: not only what the patterns match."""
        for name, value in values.items():
            if everything or any(fnmatchcase(name, pattern) for pattern in self.patterns):
                trainer.metrics[f"{kind}/{name}"] = value
