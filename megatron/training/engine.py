"""What an engine is: the seam between the loop and whatever runs a step. DeepSpeed's types stay below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import Parameter

from megatron.data.batch import StepBatch
from megatron.layers.carry import Carry
from megatron.layers.kv_cache import KVCache
from megatron.model.head import Then
from megatron.mpu.state import ParallelState


@dataclass(frozen=True)
class StepOut:
    """What one training step reports. Tensors stay on the device until somebody logs them.

    Attributes:
        loss: mean loss over the trained tokens of the global batch, 0-dim fp32, equal on every rank.
        grad_norm: global gradient norm before clipping, 0-dim fp32; None when nothing was trained.
        skipped: the update was not applied (non-finite gradient, or no trained token in the batch).
        trained_tokens: number of trained tokens of the global batch.
        loss_scale: fp16 loss scale after the step, else None.
        padding: number of inputs of the global batch that are padding.
        votes: which of the things that ranks can vote for (`Engine.votes`) any rank of the job voted for, the same on
            every rank; empty when the step came to no update.
    """

    loss: Tensor
    grad_norm: Tensor | None
    skipped: bool
    trained_tokens: int
    loss_scale: float | None = None
    padding: int = 0
    votes: tuple[bool, ...] = ()


class Engine(Protocol):
    """What the loop, the callbacks and the checkpoint code may ask of an engine."""

    state: ParallelState
    module: nn.Module
    joint_passes: bool
    """Whether a data-parallel rank needs the others in every forward pass (ZeRO-3)."""
    before_update: Callable[[], None] | None
    beat: Callable[[], None]
    """Called at every sign of progress in long work: a micro-batch, a parameter that is read or written."""
    votes: Callable[[], Sequence[bool]]
    """What this rank votes for, asked at the start of a step: always the same number of things. Votes ride on
    reductions that a step makes anyway."""

    def train_batch(self, batch: StepBatch, lr: float) -> StepOut: ...
    def eval_batch(self, batch: StepBatch) -> tuple[Tensor, int]: ...
    def evaluating(self) -> AbstractContextManager[None]:
        """Inside, the model computes as when it is evaluated, and `run_stage` may be called."""
        ...

    def stage_layers(self) -> Sequence[nn.Module]:
        """This rank's layers in order."""
        ...

    def run_stage(self, carry: Carry, cache: KVCache | None, then: Then | None) -> Any:
        """This rank's layers: a `Carry`, or on the last stage what `then` makes of the `LMOutput`."""
        ...

    def params(self) -> dict[str, Parameter]: ...
    def grads(self) -> dict[str, Tensor]: ...
    def grad_norms(self) -> dict[str, Tensor]: ...
    def param_norms(self) -> dict[str, Tensor]: ...
    def not_finite(self) -> list[str]: ...
    def read(self, name: str, needed: bool = True) -> dict[str, Tensor]: ...
    def moments(self) -> set[str]: ...
    def write(self, name: str, values: dict[str, Tensor]) -> None: ...
    def write_weight(self, name: str, weight: Tensor) -> None: ...
    def finish_writing(self) -> None: ...
    def scalars(self) -> dict[str, Any]: ...
    def load_scalars(self, values: dict[str, Any]) -> None: ...
