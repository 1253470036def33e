"""Norms of single gradients and weights in the log: `log_grad_norm` and `log_param_norm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


@CALLBACKS.register("tensor_norms", phase="measure", idle={"log_grad_norm": False, "log_param_norm": False})
class TensorNorms(Callback):
    """Adds `gradient_norms/<name>` and `parameter_norms/<name>` (GPT-NeoX's names) to each log.

    A norm is that of the whole parameter over all tensor-, pipeline- and ZeRO-ranks, of the unclipped gradient before
    the update and of the weight after it.
    """

    def __init__(self, *, gradients: bool, parameters: bool) -> None:
        self.gradients = gradients
        self.parameters = parameters

    @classmethod
    def build(cls, context: RunContext) -> TensorNorms:
        logging = context.args.logging
        return cls(gradients=logging.log_grad_norm, parameters=logging.log_param_norm)

    def before_update(self, trainer: Trainer) -> None:
        if self.gradients and due(trainer.step + 1, trainer.args.logging.log_interval):
            norms = trainer.engine.grad_norms()
            trainer.metrics.update({f"gradient_norms/{name}": norm for name, norm in norms.items()})

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self.parameters and due(trainer.step, trainer.args.logging.log_interval):
            norms = trainer.engine.param_norms()
            trainer.metrics.update({f"parameter_norms/{name}": norm for name, norm in norms.items()})
