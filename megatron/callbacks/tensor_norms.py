"""Norms of single gradients and weights in the log: `log_grad_norm` and `log_param_norm`."""

from __future__ import annotations

from megatron.callbacks.meter import Meter
from megatron.training.callback import Callback
from megatron.training.engine import StepOut
from megatron.training.trainer import Trainer


class TensorNorms(Callback):
    """Adds `gradient_norms/<name>` and `parameter_norms/<name>` (GPT-NeoX's names) to each log.

    A norm is that of the whole parameter over all tensor-, pipeline- and ZeRO-ranks, of the unclipped gradient before
    the update and of the weight after it. Must come before `meter` in the list of callbacks.
    """

    def __init__(self, meter: Meter, *, gradients: bool, parameters: bool) -> None:
        self.meter = meter
        self.gradients = gradients
        self.parameters = parameters

    def before_update(self, trainer: Trainer) -> None:
        if self.gradients and self.meter.due(trainer.step + 1):
            norms = trainer.engine.grad_norms()
            self.meter.add({f"gradient_norms/{name}": norm for name, norm in norms.items()})

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self.parameters and self.meter.due(trainer.step):
            norms = trainer.engine.param_norms()
            self.meter.add({f"parameter_norms/{name}": norm for name, norm in norms.items()})
