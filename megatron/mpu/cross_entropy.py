"""Cross entropy over a vocabulary split over tensor-parallel ranks, fused with the output projection.

Legend: t = b·s tokens, c tokens of one chunk, h hidden, v vocabulary, /tp = this rank's part.

With logits z = cap(hidden · weightᵀ + bias), cap and bias optional: loss_i = logsumexp(z_i) - z_i[target_i], and its
derivative by z_i is softmax(z_i) - onehot(target_i), by what is capped that times the cap's slope. Logits exist for one
chunk of tokens at a time, so memory holds [c, v/tp], never [t, v]. Rows of the weight beyond the real vocabulary
(padding) take no part and get a zero gradient. Logits have the dtype of the inputs; everything after them is at least
fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.errors import UserError
from megatron.mpu.collectives import all_gather, enter_tensor_parallel
from megatron.mpu.layers import linear
from megatron.mpu.loss_kernels import at_least_fp32, cap_slope, logits_gradient, row_sums
from megatron.mpu.loss_kernels import compiled as kernel
from megatron.mpu.product_sums import add_product
from megatron.mpu.state import ParallelState


class ZLoss:
    """weight · logsumexp(z)² of each token, whose gradient counts in training: it keeps logits from drifting (PaLM,
    arXiv 2204.02311).

    `total`: 0-dim fp32, Σ token_weights · logsumexp² of what was trained since it was set to 0; without `weight`.
    """

    def __init__(self, weight: float, device: torch.device) -> None:
        self.weight = weight
        self.total = torch.zeros((), device=device)


@dataclass(frozen=True)
class Projection:
    """From hidden states to logits, next to the weight and the bias.

    * `vocab_size`: the real vocabulary. `chunk`: tokens whose logits exist at a time.
    * `compiled`: torch.compile what is no matrix product. `softcap` c bounds logits by c · tanh(z / c).
    * `z_loss`: added to the gradient, not to the value, of `weighted_linear_cross_entropy`.
    """

    vocab_size: int
    state: ParallelState
    chunk: int = 512
    compiled: bool = False
    softcap: float | None = None
    z_loss: ZLoss | None = None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    projection: Projection,
    bias: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Loss of every token: hidden [t, h] ([t/tp, h] under sequence parallelism), weight [v/tp, h], targets [t] -> [t],
    or of those at `places` [m] -> [m].

    `bias` [v/tp] is added to the logits. Losses are in nats, fp32, and equal on all tensor-parallel ranks. Any gradient
    may flow back into each of them; backward computes the logits a second time. For a weighted sum
    `weighted_linear_cross_entropy` is faster.
    Raises `UserError` (on a CPU; a device-side assertion elsewhere) for a target outside [0, vocab_size).
    """
    _check_targets(targets, projection.vocab_size)
    entered = enter_tensor_parallel(hidden, projection.state)
    if places is not None:
        entered, targets = entered[places], targets[places]
    return _PerToken.apply(entered, weight, bias, targets, projection)


def weighted_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    projection: Projection,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(Σ_i token_weights_i · loss_i, losses [t] without gradient), for token_weights [t] fp32 without gradient.

    Otherwise as `linear_cross_entropy`, but the gradients of hidden and weight come from the same logits as the loss;
    backward only scales them. So a graph can be walked back once, and under no_grad nothing but the loss is computed.
    """
    _check_targets(targets, projection.vocab_size)
    inputs = (enter_tensor_parallel(hidden, projection.state), weight, bias)
    # Asked here because inside an autograd.Function grad mode is always off, and needs_input_grad ignores no_grad.
    wanted = tuple(x is not None and torch.is_grad_enabled() and x.requires_grad for x in inputs)
    return _Weighted.apply(*inputs, targets, token_weights, projection, wanted)


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    inside = ((targets >= 0) & (targets < vocab_size)).all()
    if targets.device.type != "cpu":
        torch._assert_async(inside, f"a target is outside [0, {vocab_size})")  # no wait for the device
    elif not inside:
        raise UserError(
            f"a target token is outside the vocabulary of {vocab_size}: targets span {int(targets.min())} to "
            f"{int(targets.max())}; was the data made with another tokenizer?"
        )


@dataclass(frozen=True)
class Shard:
    """This rank's real vocabulary: ids `start` to `start + rows` are the first rows of its weight."""

    start: int
    rows: int
    state: ParallelState
    compiled: bool
    cap: float | None

    @classmethod
    def of(cls, local_size: int, projection: Projection) -> Shard:
        state = projection.state
        start = state.tp_rank * local_size
        rows = min(max(projection.vocab_size - start, 0), local_size)
        return cls(start, rows, state, projection.compiled and rows > 0, projection.softcap)

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [c, h], weight [v/tp, h], bias [v/tp] -> this rank's logits [c, rows], at least fp32 and capped but for
        kernels."""
        logits = linear(x, weight[: self.rows], None if bias is None else bias[: self.rows])
        if self.compiled:
            return logits
        logits = logits.to(at_least_fp32(logits.dtype))
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(losses [c], logsumexp [c]) over the whole vocabulary, from this rank's logits."""
        if not self.rows:  # a rank may hold nothing but padding
            log_sum = torch.logsumexp(logits, -1)
            at_target = torch.zeros_like(log_sum)
        else:
            index, mine = self._local(targets)
            sums = kernel(row_sums)(logits, index, self.cap) if self.compiled else _row_sums(logits, index)
            log_sum, at_target = sums
            at_target = torch.where(mine, at_target, 0.0)
        if self.state.tp_size == 1:
            return log_sum - at_target, log_sum
        # One small collective instead of three: maximum, sum of exponentials and target follow from these two rows.
        both = all_gather(torch.stack([log_sum, at_target]), self.state).view(self.state.tp_size, 2, -1)
        log_sum = torch.logsumexp(both[:, 0], 0)
        return log_sum - both[:, 1].sum(0), log_sum

    def logits_gradient_(self, logits: Tensor, log_sum: Tensor, targets: Tensor, z_weight: float = 0.0) -> Tensor:
        """softmax - onehot [c, rows], of the z-loss 2 · z_weight · logsumexp · softmax more, times the cap's slope; may
        overwrite `logits`."""
        if self.compiled:
            return kernel(logits_gradient)(logits, log_sum, *self._local(targets), self.cap, z_weight)
        slope = None if self.cap is None else cap_slope(logits, self.cap)
        gradient = logits.sub_(log_sum.unsqueeze(1)).exp_()
        if z_weight:
            gradient.mul_((1 + 2 * z_weight * log_sum).unsqueeze(1))
        if self.rows:
            index, mine = self._local(targets)
            gradient.scatter_add_(1, index.unsqueeze(1), -mine.to(gradient.dtype).unsqueeze(1))
        return gradient if slope is None else gradient.mul_(slope)

    def _local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        index = targets - self.start
        return index.clamp(0, self.rows - 1), (index >= 0) & (index < self.rows)


class _Gradients:
    """Gradients of hidden [t, h], weight [v/tp, h] and bias [v/tp], filled chunk by chunk; unwanted ones are None."""

    def __init__(self, hidden: Tensor, weight: Tensor, rows: int, wanted: Sequence[bool]) -> None:
        self.real_weight = weight[:rows]
        self.rows = rows
        self.untouched = True
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        # Chunks are summed in fp32, whatever the dtype of the weight.
        wide = at_least_fp32(weight.dtype)
        self.weight = torch.empty_like(weight, dtype=wide) if wanted[1] else None
        if self.weight is not None:
            self.weight[rows:] = 0  # padding; the rows before it are written by the first chunk
        self.bias = weight.new_zeros(weight.shape[0], dtype=wide) if wanted[2] else None

    def add(self, part: slice, x: Tensor, gradient: Tensor, scale: Tensor) -> None:
        """`gradient` [c, rows] of the unweighted losses, `scale` [c] their weights.

        The weights multiply the [c, h] side of both products, which is much smaller than the [c, rows] side.
        """
        if self.bias is not None:
            self.bias[: self.rows] += scale.to(self.bias.dtype) @ gradient.to(self.bias.dtype)
        gradient, scale = gradient.to(x.dtype), scale.unsqueeze(1)
        if self.hidden is not None:
            self.hidden[part] = gradient.mm(self.real_weight).mul_(scale)
        if self.weight is not None and self.rows:
            first, self.untouched = self.untouched, False
            add_product(self.weight[: self.rows], gradient.t(), (x * scale).to(x.dtype), first)

    def result(self, weight_dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.weight is not None and self.untouched:  # no tokens
            self.weight.zero_()
        weight, bias = (None if total is None else total.to(weight_dtype) for total in (self.weight, self.bias))
        return self.hidden, weight, bias


def chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def _row_sums(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return torch.logsumexp(logits, -1), logits.gather(1, index.unsqueeze(1)).squeeze(1)


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, projection: Projection
    ) -> Tensor:
        own = Shard.of(weight.shape[0], projection)
        losses = hidden.new_empty(hidden.shape[0], dtype=at_least_fp32(hidden.dtype))
        log_sums = torch.empty_like(losses)
        for part in chunks(hidden.shape[0], projection.chunk):
            losses[part], log_sums[part] = own.losses(own.logits(hidden[part], weight, bias), targets[part])
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums)
        ctx.own, ctx.chunk = own, projection.chunk
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, ctx.own.rows, ctx.needs_input_grad[:3])
        for part in chunks(hidden.shape[0], ctx.chunk):
            logits = ctx.own.logits(hidden[part], weight, bias)
            unweighted = ctx.own.logits_gradient_(logits, log_sums[part], targets[part])
            gradients.add(part, hidden[part], unweighted, grad[part])
        return (*gradients.result(weight.dtype), None, None)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_weights: Tensor,
        projection: Projection,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor]:
        own = Shard.of(weight.shape[0], projection)
        losses = hidden.new_empty(hidden.shape[0], dtype=at_least_fp32(hidden.dtype))
        token_weights = token_weights.to(losses.dtype)
        # Weights of 1/(number of tokens) would leave fp16's range before the loss scale arrives in backward, so
        # gradients are kept relative to the largest weight.
        unit = token_weights.abs().amax().clamp_min(torch.finfo(losses.dtype).tiny)
        relative = token_weights / unit
        gradients = _Gradients(hidden, weight, own.rows, wanted)
        z_loss = projection.z_loss if any(wanted) else None
        z_weight = z_loss.weight if z_loss is not None else 0.0
        for part in chunks(hidden.shape[0], projection.chunk):
            x = hidden[part]
            logits = own.logits(x, weight, bias)
            losses[part], log_sum = own.losses(logits, targets[part])
            if z_loss is not None:
                z_loss.total += log_sum.square() @ token_weights[part]
            if any(wanted):
                gradients.add(part, x, own.logits_gradient_(logits, log_sum, targets[part], z_weight), relative[part])
        ctx.save_for_backward(unit, *gradients.result(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * token_weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        unit, *gradients = ctx.saved_tensors
        # In place: a copy of the weight's gradient would be the largest tensor here. Walking back a second time raises.
        # One-dimensional, because a 0-dim factor would be rounded to the gradient's dtype first and overflow fp16.
        factor = (grad * unit).reshape(1)
        scaled = [None if gradient is None else gradient.mul_(factor) for gradient in gradients]
        return (*scaled, None, None, None, None)
