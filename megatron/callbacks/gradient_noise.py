"""The gradient noise scale: how large a batch is worth it (McCandlish et al. 2018, arXiv:1812.06162, appendix A)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

DECAY = 0.9  # of the running means, per estimate


@CALLBACKS.register(
    "gradient_noise",
    phase="measure",
    idle={"log_gradient_noise_scale": False},
    keys=("gradient_noise_scale_n_batches",),
)
class GradientNoise(Callback):
    """Adds `gradient_noise_scale` to each log, in samples: tr(S) / |G|^2, S the covariance of the gradients of single
    samples and G their mean.

    Legend: B samples of a step, n steps, g_i the gradient of a step, m the mean of n of them. Since
    E|g|^2 = |G|^2 + tr(S) / B for any batch, the squares of the norms of g_i (mean over the steps) and of m, which is
    that of nB samples, give both:

        |G|^2 = (n |m|^2 - |g|^2) / (n - 1)        tr(S) = B n / (n - 1) (|g|^2 - |m|^2)

    The weights move meanwhile, which is neglected. Means of both over the estimates (decay 0.9) go into the ratio.
    Costs memory of a gradient, one addition of it per step, and a norm of it per estimate. The same at every layout.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.means: Tensor | None = None  # [|G|^2, tr(S)], fp64: both begin with 0, which their ratio does not show
        self._sums: list[Tensor] = []
        self._squares: Tensor | None = None
        self._of_mean: Tensor | None = None
        self._samples = 0

    @classmethod
    def build(cls, context: RunContext) -> GradientNoise:
        return cls(context.args.logging.gradient_noise_scale_n_batches)

    def loaded(self, trainer: Trainer) -> None:
        if self.means is None:
            self.means = torch.zeros(2, dtype=torch.float64)
        self.means = self.means.to(trainer.state.device)
        self._drop()

    def _drop(self) -> None:
        """Forget the estimate under way: the next one begins at the next multiple of its steps."""
        self._sums, self._squares, self._of_mean, self._samples = [], None, None, 0

    def before_update(self, trainer: Trainer) -> None:
        if self._samples == 0 and trainer.step % self.batches:
            return  # a start in the middle of an estimate
        pieces = list(trainer.engine.grads().values())
        if self._samples == 0:
            self._sums = [piece.float() if piece.dtype != torch.float32 else piece.clone() for piece in pieces]
        else:
            torch._foreach_add_(self._sums, pieces)
        self._samples += trainer.plan.batch_size(trainer.step)
        if due(trainer.step + 1, self.batches):
            self._of_mean = trainer.engine.norm_of(self._sums).double() / self.batches
            self._sums = []

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if out.grad_norm is None:  # nothing to train on, so no gradient
            self._drop()
        elif self._samples:
            square = out.grad_norm.double().square()
            self._squares = square if self._squares is None else self._squares + square
        if due(trainer.step, self.batches) and self._samples:
            self._estimate()
        if due(trainer.step, trainer.args.logging.log_interval):
            trainer.metrics["gradient_noise_scale"] = self.means[1] / self.means[0]

    def _estimate(self) -> None:
        """End an estimate; what is not finite (a step was) does not count."""
        n, samples = self.batches, self._samples / self.batches
        of_mean, of_steps = self._of_mean.square(), self._squares / n
        found = torch.stack([(n * of_mean - of_steps) / (n - 1), (of_steps - of_mean) * samples * n / (n - 1)])
        moved = DECAY * self.means + (1 - DECAY) * found
        self.means = torch.where(found.isfinite().all(), moved, self.means)
        self._drop()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.means is None else {"means": self.means.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = torch.tensor(state["means"], dtype=torch.float64)
