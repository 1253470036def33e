"""The last two layers: the final norm and the output matrix.

Legend: b batch, s sequence, t = b·s, h hidden, v vocabulary, /tp = this rank's part.

Training never holds logits: the head returns an `LMOutput`, and the objective asks it for losses, which are computed
chunk by chunk together with the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.layers.carry import Carry
from megatron.layers.init import build_init
from megatron.layers.norms import build_norm
from megatron.mpu import sharding
from megatron.mpu.collectives import enter_tensor_parallel, gather_last_dim, join_sequence, sum_partials
from megatron.mpu.cross_entropy import Projection, ZLoss, linear_cross_entropy, weighted_linear_cross_entropy
from megatron.mpu.layers import linear
from megatron.mpu.loss_kernels import soft_cap
from megatron.mpu.sampled_targets import sampled_targets
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.formulas import loss_chunk

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

TIED_NAME = "0.word_embeddings.weight"
REWARD = "rm_linear.weight"
"""GPT-NeoX's name of the head of a reward model, in its layer."""


class Output:
    """What the two kinds of output have in common.

    * `balance`: what mixtures of experts add to the loss, 0-dim fp32, or None.
    * `inner`: the hidden states behind the block that the objective names, as `hidden`, before the final norm, or None.
    """

    balance: Tensor | None
    inner: Tensor | None

    def with_balance(self, loss: Tensor) -> Tensor:
        """A loss with the gradient of the balance loss too, and its own value: what is reported stays comparable."""
        return loss if self.balance is None else loss + (self.balance - self.balance.detach())


@dataclass(frozen=True)
class LMOutput(Output):
    """The network's output for every token, before the output projection.

    * `hidden` [t, h] ([t/tp, h] under sequence parallelism), after the final norm.
    * `weight` [v/tp, h] of the output matrix; `bias` [v/tp] of the logits or None; how they become logits.
    * `shape` (b, s); `multiplier` of the logits (muP: 1 / width multiplier).
    """

    hidden: Tensor
    weight: Tensor
    shape: tuple[int, int]
    projection: Projection
    multiplier: float = 1.0
    bias: Tensor | None = None
    balance: Tensor | None = None
    inner: Tensor | None = None

    def inner_hidden(self) -> Tensor:
        """[t, h] of all tokens, the same on all tensor-parallel ranks, for a computation that each of them does: the
        residual stream behind block `Objective.inner_layer`."""
        assert self.inner is not None, "the objective has no inner_layer"
        return join_sequence(self.inner, self.projection.state)

    def at_temperature(self, temperature: float) -> LMOutput:
        """The same with its logits divided by the temperature (before a cap of the logits, if there is one)."""
        if temperature == 1.0:
            return self
        bias = None if self.bias is None else self.bias / temperature
        return replace(self, multiplier=self.multiplier / temperature, bias=bias)

    def token_loss(self, targets: Tensor, places: Tensor | None = None) -> Tensor:
        """Cross entropy in nats of every target [b, s] int64 -> [t] fp32, equal on all tensor-parallel ranks. With
        `places` [m] of t it is worked out there alone, and 0 elsewhere."""
        flat = targets.reshape(-1)
        losses = linear_cross_entropy(self._scaled(), self.weight, flat, self.projection, self.bias, places)
        return losses if places is None else losses.new_zeros(len(flat)).index_copy(0, places, losses)

    def weighted_loss(self, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(Σ weights · loss, losses [t] without gradient) for targets and fp32 weights [b, s]: one pass over the logits
        where `token_loss` needs two. The z-loss (`z_loss_weight`) is in its gradient."""
        return weighted_linear_cross_entropy(
            self._scaled(), self.weight, targets.reshape(-1), weights.reshape(-1), self.projection, self.bias
        )

    def sampled(self, drawn: Tensor) -> Tensor:
        """Targets [b, s] from the model's own distribution, by uniform numbers [b, s] in [0, 1)."""
        targets = sampled_targets(self._scaled(), self.weight, drawn.reshape(-1), self.projection, self.bias)
        return targets.view(drawn.shape)

    def logits(self, last: int | None = None) -> Tensor:
        """[b, s, v] fp32 over the real vocabulary, gathered over ranks; of the `last` columns only, if given."""
        hidden = enter_tensor_parallel(self._scaled(), self.projection.state)
        if last is not None:
            hidden = hidden.view(*self.shape, -1)[:, -last:].reshape(-1, hidden.shape[-1])
        return self._project(hidden).reshape(self.shape[0], -1, self.projection.vocab_size)

    def logits_at(self, places: Tensor, chunk: int) -> Iterator[Tensor]:
        """The logits [n <= chunk, v] fp32 of the tokens `places` [m] of t, chunk by chunk."""
        hidden = enter_tensor_parallel(self._scaled(), self.projection.state)
        for place in places.split(chunk):
            yield self._project(hidden[place])

    def map_logits(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """What `function(logits [c, v] fp32, rows of each of the values [c, ...])` -> [c] makes of all tokens, [t].
        Logits exist for one chunk at a time: they are made again in the backward pass."""
        hidden = enter_tensor_parallel(self._scaled(), self.projection.state)

        def of_chunk(hidden: Tensor, *rows: Tensor) -> Tensor:
            return function(self._project(hidden), *rows)

        chunks = zip(*(part.split(self.projection.chunk) for part in (hidden, *values)), strict=True)
        return torch.cat([checkpoint(of_chunk, *rows, use_reentrant=False) for rows in chunks])

    def _project(self, hidden: Tensor) -> Tensor:
        state, vocab_size, softcap = self.projection.state, self.projection.vocab_size, self.projection.softcap
        full = gather_last_dim(linear(hidden, self.weight, self.bias), state)[:, :vocab_size].float()
        return full if softcap is None else soft_cap(full, softcap)

    def last_logits(self) -> Tensor:
        """[b, v] fp32: the next token of every row."""
        return self.logits(last=1)[:, 0]

    def _scaled(self) -> Tensor:
        return self.hidden if self.multiplier == 1.0 else self.hidden * self.multiplier


@dataclass(frozen=True)
class RewardOutput(Output):
    """The output of a reward model for every token, before its one number.

    * `hidden` [t, h] ([t/tp, h] under sequence parallelism), after the final norm.
    * `weight` [1, h/tp]; `shape` (b, s); `multiplier` of the rewards (muP: 1 / width multiplier).
    """

    hidden: Tensor
    weight: Tensor
    shape: tuple[int, int]
    state: ParallelState
    multiplier: float = 1.0
    balance: Tensor | None = None
    inner: Tensor | None = None

    def rewards(self, places: Tensor | None = None) -> Tensor:
        """fp32 [n] of the tokens `places` int64 [n] of t, or [t] of all; equal on all tensor-parallel ranks.

        In fp32 whatever the model's type is: rewards that differ little would be the same number in bf16.
        """
        hidden = enter_tensor_parallel(self.hidden, self.state)
        if places is not None:
            hidden = hidden.index_select(0, places)
        width = self.weight.shape[1]
        mine = hidden.narrow(1, self.state.tp_rank * width, width).float()
        return sum_partials(linear(mine, self.weight.float()), self.state).squeeze(1) * self.multiplier

    def logits(self) -> Tensor:
        """[b, s, 1] fp32: the rewards, as transformers' classes for sequences call and shape them."""
        return self.rewards().view(*self.shape, 1)


class FinalNorm(nn.Module):
    """Layer L+3: the norm before the output matrix."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.norm = build_norm(model, state)

    def forward(self, carry: Carry) -> Carry:
        return carry.replace_hidden(self.norm(carry.hidden))


Then = Callable[[Any], Any]
"""What is made of the head's `LMOutput` or `RewardOutput`."""


class OutputMatrix(nn.Module):
    """`weight` [v/tp, h] and, with use_bias_in_head, `bias` [v/tp]; a module of its own so that ZeRO-3 gathers them
    around `forward`."""

    def __init__(
        self, model: ModelConfig, state: ParallelState, weight: nn.Parameter, vocab_size: int, padded_vocab_size: int
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias: nn.Parameter | None = None
        if model.use_bias_in_head:
            spec = ParamSpec(shape=(vocab_size,), init=sharding.zeros, split_dim=0, padded=padded_vocab_size)
            self.bias = sharding.parameter(spec, state)
        self.multiplier = 1.0 / model.mup_width_mult if model.use_mup else 1.0
        chunk = loss_chunk(model.loss_chunk_size, on_gpu=state.device.type == "cuda")
        z_loss = ZLoss(model.z_loss_weight, state.device) if model.z_loss_weight else None
        self.projection = Projection(vocab_size, state, chunk, softcap=model.final_logit_softcapping, z_loss=z_loss)

    def forward(self, carry: Carry, then: Then | None) -> Any:
        rows, columns = carry.positions.shape
        out = LMOutput(
            carry.hidden,
            self.weight,
            (rows, columns),
            self.projection,
            self.multiplier,
            self.bias,
            carry.balance,
            carry.inner,
        )
        return out if then is None else then(out)


class RewardVector(nn.Module):
    """`weight` [1, h/tp], split over the hidden dimension and without a bias, as GPT-NeoX's `rm_linear`; never tied."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.multiplier = 1.0 / model.mup_width_mult if model.use_mup else 1.0
        init = build_init(model, hidden_matrix=False)
        # Of the kind of output matrices, which optimizers of matrices leave out.
        spec = ParamSpec(shape=(1, model.hidden_size), init=init, split_dim=1, kind="embedding")
        self.weight = sharding.parameter(spec, state)

    def forward(self, carry: Carry, then: Then | None) -> Any:
        rows, columns = carry.positions.shape
        out = RewardOutput(
            carry.hidden, self.weight, (rows, columns), self.state, self.multiplier, carry.balance, carry.inner
        )
        return out if then is None else then(out)


class Head(nn.Module):
    """Layer L+4: the output matrix, `final_linear.weight` (and `.bias`), or the embedding's, `word_embeddings.weight`;
    of a reward model `rm_linear.weight`.

    `weight`: the embedding's parameter, if this process holds it; a tied head without it makes a copy of its own, which
    the pipeline keeps equal to the original.
    """

    def __init__(
        self,
        model: ModelConfig,
        state: ParallelState,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.final_linear: nn.Module | None = None
        self.word_embeddings: nn.Module | None = None
        self.rm_linear: nn.Module | None = None
        if model.output_head == "reward":
            self.rm_linear = RewardVector(model, state)
            return
        tied = model.ties_head
        if weight is None:
            spec = ParamSpec(
                shape=(vocab_size, model.hidden_size),
                init=build_init(model, hidden_matrix=False),
                split_dim=0,
                padded=padded_vocab_size,
                kind="embedding",
                tied=TIED_NAME if tied else None,
            )
            weight = sharding.parameter(spec, state)
        matrix = OutputMatrix(model, state, weight, vocab_size, padded_vocab_size)
        if tied:
            self.word_embeddings = matrix
        else:
            self.final_linear = matrix

    def forward(self, carry: Carry, then: Then | None = None) -> Any:
        """The last carry -> `LMOutput` or `RewardOutput`, or what `then` makes of it.

        `then` runs inside the matrix's forward, where its weight is whole under ZeRO-3 as well.
        """
        (matrix,) = self.children()
        return matrix(carry, then)
