"""Mistakes between tensor-parallel ranks, with and without sequence parallelism."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.layers import attention, lora
from megatron.layers.norms import Norm
from megatron.layers.positions.alibi import alibi_slopes
from megatron.model.head import LMOutput
from megatron.mpu import collectives, initial_weights
from megatron.mpu.collectives import all_reduce, leave_tensor_parallel, own_rows
from megatron.mpu.cross_entropy import Shard
from megatron.mpu.layers import RowParallelLinear, VocabParallelEmbedding, linear
from megatron.mpu.sharding import ParamSpec, shard
from megatron.mpu.state import ParallelState
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

TP = Layout(tp=2)
# One row per micro-batch, so that it is cut within the row.
SP = Layout(tp=2, micro=1, sequence_parallel=True)


@mutant("neox", TP, "loss")
def drop_row_reduction() -> Any:
    """A row-parallel output that is not summed over ranks."""
    return mock.patch("megatron.model.block.leave_tensor_parallel", lambda x, state: x)


@mutant("llama", TP, "gradient of 2.input_layernorm.scale")
def drop_column_gradient() -> Any:
    """The gradient of a column-parallel layer's input is one rank's share, with the loss as it should be."""
    return mock.patch("megatron.mpu.layers.enter_tensor_parallel", lambda x, state: x)


@mutant("llama", TP, "gradient of 2.input_layernorm.scale")
def reduce_column_gradient_twice() -> Any:
    """The gradient of a column-parallel layer's input is summed by the layer and once more around it."""

    def twice(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(all_reduce(grad, ctx.state), ctx.state), None

    return mock.patch.object(collectives._Copy, "backward", staticmethod(twice))


@mutant("llama", TP, "gradient of 2.post_attention_layernorm.scale")
def average_column_gradient() -> Any:
    """The gradient of a column-parallel layer's input is the mean over ranks, as for data parallelism."""

    def mean(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.state) / ctx.state.tp_size, None

    return mock.patch.object(collectives._Copy, "backward", staticmethod(mean))


@mutant("llama", TP, "loss")
def bias_on_every_rank() -> Any:
    """A row-parallel bias is added on every rank before the sum, so it counts tp times (GPT-NeoX)."""

    def forward(self: RowParallelLinear, x: Tensor, reduce: bool = True) -> Tensor:
        y = linear(x, self.weight, self.bias if reduce else None, self.recipe)
        return leave_tensor_parallel(y, self.state) if reduce else y

    return mock.patch.object(RowParallelLinear, "forward", forward)


@mutant("neox", TP, "weight of 0.word_embeddings.weight")
def seed_per_rank() -> Any:
    """Every rank draws its own weights."""
    original = initial_weights._initial_shard
    return mock.patch.object(
        initial_weights,
        "_initial_shard",
        lambda spec, key, seed, state: original(spec, key, seed + state.tp_rank, state),
    )


@mutant("neox", TP, "weight of 0.word_embeddings.weight")
def equal_chunks() -> Any:
    """Every rank starts with the first chunk of a split weight."""
    return mock.patch.object(initial_weights, "shard", lambda full, spec, rank, size: shard(full, spec, 0, size))


@mutant("llama", TP, "weight of 2.attention.query_key_value.weight")
def fused_blocks_cut_as_one() -> Any:
    """[Q | K | V] is cut through the middle: one rank holds queries alone."""

    def cut(full: Tensor, spec: ParamSpec, rank: int, size: int) -> Tensor:
        return full.chunk(size, spec.split_dim)[rank] if spec.blocks else shard(full, spec, rank, size)

    return mock.patch.object(initial_weights, "shard", cut)


@mutant("neox", TP, "loss")
def padding_in_the_softmax() -> Any:
    """Padded vocabulary rows take part in the softmax."""

    def whole(cls: type[Shard], local_size: int, projection: Any) -> Shard:
        state = projection.state
        return cls(state.tp_rank * local_size, local_size, state, projection.compiled, projection.softcap)

    return mock.patch.object(Shard, "of", classmethod(whole))


@mutant("neox", TP, "gradient of 0.word_embeddings.weight")
def local_softmax_gradient() -> Any:
    """The loss knows the whole vocabulary, its gradient only this rank's part of it."""
    original = Shard.losses

    def losses(self: Shard, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return original(self, logits, targets)[0], torch.logsumexp(logits, -1)

    return mock.patch.object(Shard, "losses", losses)


@mutant("neox", TP, "gradient of 0.word_embeddings.weight")
def drop_gradient_of_the_head() -> Any:
    """Each rank sends back what its own part of the vocabulary says of the hidden states (torchtitan)."""
    return mock.patch("megatron.mpu.cross_entropy.enter_tensor_parallel", lambda x, state: x)


@mutant("neox", TP, "loss")
def embedding_of_foreign_tokens() -> Any:
    """A token of another rank's part of the vocabulary adds the nearest row here."""

    def forward(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = (tokens.reshape(-1) - self.state.tp_rank * rows).clamp(0, rows - 1)
        return leave_tensor_parallel(torch.nn.functional.embedding(local, self.weight), self.state)

    return mock.patch.object(VocabParallelEmbedding, "forward", forward)


@mutant("gemma3", TP, "gradient of 2.attention.q_norm.scale")
def norm_of_own_heads_not_summed() -> Any:
    """A weight that all heads share gets the gradient of this rank's heads, unless the sequence is split (Megatron)."""

    def shared(self: Norm, weight: Tensor) -> Tensor:
        return collectives.sum_gradient(weight, self.state, "sequence")

    return mock.patch.object(Norm, "_shared", shared)


@mutant("olmo", TP, "gradient of 2.attention.q_norm.scale")
def norm_over_own_channels() -> Any:
    """The norm of all heads' queries takes the mean of this rank's (the SLURM fork of GPT-NeoX)."""
    return mock.patch("megatron.layers.norms.split.leave_tensor_parallel", lambda x, state: x * state.tp_size)


@mutant("alibi", TP, "loss")
def slopes_of_the_first_heads() -> Any:
    """Every rank takes ALiBi's slopes of the first heads for its own."""
    slopes = "megatron.layers.positions.alibi.alibi_slopes"
    return mock.patch(slopes, lambda heads: alibi_slopes(heads)[: heads // 2] * 2)


@mutant("llama-8-heads", TP, "gradient of 2.attention.query_key_value.weight")
def wrong_heads_share_keys() -> Any:
    """Query heads take turns with key/value heads, which are for neighbours (GQA: repeated, not interleaved)."""
    original = attention.SelfAttention._project

    def project(self: attention.SelfAttention, *arguments: Any) -> Any:
        q, k, v = original(self, *arguments)
        group = self.heads // self.kv_heads
        order = torch.arange(self.heads).view(group, self.kv_heads).t().reshape(-1)
        return q[:, :, order], k, v

    return mock.patch.object(attention.SelfAttention, "_project", project)


@mutant("mup", TP, "loss")
def lose_the_output_multiplier() -> Any:
    """muP's factor of the logits is forgotten where the vocabulary is split."""
    return mock.patch.object(LMOutput, "_scaled", lambda self: self.hidden)


@mutant("gemma3", TP, "loss")
def embed_with_the_factor_of_every_rank() -> Any:
    """The embedding is multiplied on each rank before the sum and once behind it."""

    def forward(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        return original(self, tokens) * self.weight.shape[1] ** 0.5

    original = VocabParallelEmbedding.forward
    return mock.patch.object(VocabParallelEmbedding, "forward", forward)


@mutant("neox", Layout(dp=2, tp=2), "loss")
def reduce_over_data_ranks() -> Any:
    """Partial sums are added up over the wrong group, of the same size."""

    def name(state: ParallelState) -> str:
        group = state.group("data")
        assert group is not None
        return group.group_name

    return mock.patch.object(collectives, "_group_name", name)


# -- sequence parallelism ----------------------------------------------------------------------------------------------


@mutant("llama", SP, "gradient of 2.input_layernorm.scale")
def norm_gradients_of_own_tokens() -> Any:
    """Norm weights keep the gradient of their own slice of the sequence."""
    return mock.patch("megatron.layers.norms.sum_gradient", lambda w, state, region=None: w)


@mutant("llama", SP, "gradient of 2.attention.dense.bias")
def bias_gradients_of_own_tokens() -> Any:
    """Biases behind the reduction keep the gradient of their own slice of the sequence."""
    return mock.patch("megatron.mpu.layers.sum_gradient", lambda w, state, region=None: w)


@mutant("learned", SP, "gradient of 0.position_embeddings.weight")
def position_gradients_of_own_tokens() -> Any:
    """The table of positions keeps the gradient of this rank's tokens."""
    return mock.patch("megatron.layers.positions.learned.sum_gradient", lambda w, state, region=None: w)


@mutant("learned", SP, "loss")
def positions_not_split() -> Any:
    """Every rank adds the positions of the first tokens to its slice of the sequence."""

    def first(x: Tensor, state: ParallelState) -> Tensor:
        return x.chunk(state.tp_size)[0]

    return mock.patch("megatron.layers.positions.learned.split_sequence", first)


@mutant("llama", SP, "gradient of 2.input_layernorm.scale")
def gathered_gradient_not_summed() -> Any:
    """The backward pass of a gather takes this rank's rows of its own gradient, and no sum."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_rows(grad, ctx.state), None

    return mock.patch.object(collectives._Gather, "backward", staticmethod(backward))


@mutant("llama", SP, "gradient of 2.attention.dense.weight")
def scattered_gradient_not_gathered() -> Any:
    """The backward pass of a scatter knows this rank's rows only: the others' have no gradient."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = grad.new_zeros(grad.shape[0] * ctx.state.tp_size, *grad.shape[1:])
        own = ctx.state.tp_rank * grad.shape[0]
        whole[own : own + grad.shape[0]] = grad
        return whole, None, None

    return mock.patch.object(collectives._Scatter, "backward", staticmethod(backward))


@mutant("learned", SP, "gradient norm")
def norms_counted_on_every_rank() -> Any:
    """Replicated weights whose gradients were summed count once per rank in the norm."""
    from megatron.training.engine_update import is_owned

    def owned(spec: ParamSpec, state: ParallelState, *partitioned: bool) -> bool:
        return spec.sequence_reduced or is_owned(spec, state, *partitioned)

    return mock.patch("megatron.training.engine_update.is_owned", owned)


@mutant("neox", TP, "gradient norm")
def replicated_counted_on_every_rank() -> Any:
    """Replicated weights count once per rank in the norm (Transformer Engine marks all as split)."""
    return mock.patch("megatron.training.engine_update.is_owned", lambda spec, *place: True)


@mutant("alibi", TP, "gradient norm")
def split_counted_on_the_first_rank() -> Any:
    """Split weights without the mark count on the first rank alone (Megatron's attention sinks)."""
    from megatron.training.engine_update import is_owned

    def owned(spec: ParamSpec, state: ParallelState, *partitioned: bool) -> bool:
        return is_owned(spec, state, *partitioned) and (spec.kind != "vector" or state.tp_rank == 0)

    return mock.patch("megatron.training.engine_update.is_owned", owned)


@mutant("dora", TP, "gradient of 2.attention.dense.lora.B")
def adapter_gradient_of_own_columns() -> Any:
    """What every rank has of an adapter keeps the gradient of one rank's columns."""
    return mock.patch.object(lora.Lora, "_whole", lambda self, p, replicated: p)


@mutant("dora", TP, "loss")
def lengths_of_own_columns() -> Any:
    """The lengths of a row-parallel weight's rows are those of one rank's part."""
    return mock.patch.object(lora, "all_reduce", lambda x, state: x)
