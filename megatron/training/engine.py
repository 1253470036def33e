"""What an engine is: the seam between the loop and whatever runs a step. DeepSpeed's types stay below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import Parameter

from megatron.data.batch import StepBatch
from megatron.layers.carry import Carry
from megatron.layers.kv_cache import KVCache
from megatron.model.head import Then
from megatron.mpu.state import ParallelState
from megatron.objectives import Objective


@dataclass(frozen=True)
class StepOut:
    """What one training step reports. Tensors stay on the device until somebody logs them.

    Attributes:
        loss: mean loss over what the objective counts (trained tokens) in the global batch, 0-dim fp32, equal on every
            rank.
        grad_norm: global gradient norm before clipping, 0-dim fp32; None when nothing was trained.
        skipped: the update was not applied (non-finite gradient, no trained token in the batch, or an outlier), 0-dim
            bool on the device. Who needs it as a number asks `Callback.settled`.
        trained_tokens: number of trained tokens of the global batch.
        loss_scale: fp16 loss scale after the step, else None.
        padding: number of inputs of the global batch that are padding.
        votes: which of the things that ranks can vote for (`Engine.votes`) any rank of the job voted for, the same on
            every rank.
        outlier: the update was not applied because loss or gradient norm lies far above those before, 0-dim bool on the
            device; None where nobody looks (`skip_outliers`).
        metrics: the means that the objective reports, by name, as `loss`; those over nothing are left out.
    """

    loss: Tensor
    grad_norm: Tensor | None
    skipped: Tensor
    trained_tokens: int
    loss_scale: float | None = None
    padding: int = 0
    votes: tuple[bool, ...] = ()
    outlier: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalOut:
    """What an evaluated batch adds up to over the global batch, the same on every rank.

    Attributes:
        sums: fp32 `[1 + m]` on the device, of the loss and of each metric of the objective.
        counts: what each of them is a mean over.
        trained_tokens: their number.
    """

    sums: Tensor
    counts: tuple[float, ...]
    trained_tokens: int

    @property
    def loss(self) -> float:
        """The mean loss; waits for the device."""
        return float(self.sums[0]) / self.counts[0]


class Engine(Protocol):
    """What the loop, the callbacks and the checkpoint code may ask of an engine."""

    state: ParallelState
    module: nn.Module
    objective: Objective
    joint_passes: bool
    """Whether a data-parallel rank needs the others in every forward pass (ZeRO-3)."""
    before_update: Callable[[], None] | None
    beat: Callable[[], None]
    """Called at every sign of progress in long work: a micro-batch, a parameter that is read or written."""
    waited: float
    """Seconds that this rank has waited for the others at the start of steps, on the host."""
    votes: Callable[[], Sequence[bool]]
    """What this rank votes for, asked at the start of a step: always the same number of things. They are added
    up with the tokens of the batch."""

    def train_batch(self, batch: StepBatch, lr: float) -> StepOut: ...
    def eval_batch(self, batch: StepBatch) -> EvalOut: ...
    def evaluating(self) -> AbstractContextManager[None]:
        """Inside, the model computes as when it is evaluated, and `run_stage` may be called."""
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, the model computes as its base (`lora_r`): a reference model without a second copy. Nothing may be
        trained or saved."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model's weights are their moving average (`ema_decay`), or what the optimizer averages itself, if
        either is kept; collective at both ends. Nothing may be trained or saved."""
        ...

    def keep_reference(self) -> None:
        """Keep the weights of this moment, of what is trained, for `as_reference`, and in checkpoints: an engine that
        keeps a reference takes that of a checkpoint, if it has one."""
        ...

    def as_reference(self) -> AbstractContextManager[None]:
        """Inside, the model's weights are the reference; as `averaged`."""
        ...

    def stage_layers(self) -> Sequence[nn.Module]:
        """This rank's layers in order."""
        ...

    def run_stage(self, carry: Carry, cache: KVCache | None, then: Then | None) -> Any:
        """This rank's layers: a `Carry`, or on the last stage what `then` makes of the `LMOutput`."""
        ...

    def params(self) -> dict[str, Parameter]: ...
    def grads(self) -> dict[str, Tensor]: ...
    def all_names(self) -> list[str]:
        """Canonical names of the whole model's parameters in one order. The first call is collective over all ranks."""
        ...

    def norm_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """L2 norm over the whole model of tensors like those of `grads`, in their order; 0-dim fp32, the same on every
        rank; only in `before_update`. Collective, all ranks."""
        ...

    def update_ratios(self) -> Callable[[], dict[str, Tensor]]:
        """Remembers the master weights; what is returned gives, behind the update, the L2 norm of the change of each
        over that of the weight, of all parameters of the model, the same on every rank. Both collective, all ranks."""
        ...

    def grad_norms(self) -> dict[str, Tensor]: ...
    def param_norms(self) -> dict[str, Tensor]: ...
    def not_finite(self) -> list[str]: ...
    def share(self, name: str) -> range:
        """Which elements of a parameter this rank answers for in a checkpoint: a range of the flattened
        tensor-parallel part (of experts: that of all expert-parallel ranks together). The ranges of the ranks of the
        data group are disjoint and cover it; one may be empty. Always the same. Does not communicate."""
        ...

    def read_share(self, name: str) -> dict[str, Tensor]:
        """fp32 master weight (`weight`), optimizer moments and the weight's moving average (`ema`), if it is kept, of
        the elements in `share`: 1-D, as long as it is, on any
        device; they may be views of what the optimizer goes on with. `evaluated`: what files of weights hold in place
        of `weight`. State of another number of dimensions is not per element, and whole. The same keys on every rank of
        the data group. Does not communicate."""
        ...

    def moments(self) -> set[str]:
        """Names of what the optimizer keeps for each element of a parameter, as `read_share` has them; makes it when
        the optimizer has not stepped yet."""
        ...

    def write_share(self, name: str, values: dict[str, Tensor]) -> None:
        """Set what `read_share` gave: `weight`, and moments; those that are not given are as before the first step.
        Does not communicate; call `finish_writing` once after the last one."""
        ...

    def finish_writing(self) -> None:
        """Bring what other ranks wrote to those that need it: weights in the model's type, replicated state.
        Collective."""
        ...

    def scalars(self) -> dict[str, Any]: ...
    def load_scalars(self, values: dict[str, Any]) -> None: ...
