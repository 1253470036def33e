"""The sharded layers together, forward and all gradients, against the same network in plain unsharded fp64 torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.mpu import initial_weights, sharding
from megatron.mpu.collectives import (
    enter_tensor_parallel,
    gather_last_dim,
    leave_tensor_parallel,
    sum_gradient,
)
from megatron.mpu.layers import (
    LINEAR_RECIPES,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear,
)
from megatron.mpu.sharding import ParamSpec, shard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

VOCAB, HIDDEN, BATCH, SEQUENCE = 67, 8, 2, 6
BLOCKS = (16, 8)  # two sub-blocks of unequal size, like q and k|v
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def normal(full: Tensor, generator: torch.Generator) -> None:
    full.normal_(0.0, 0.5, generator=generator)


class Network(nn.Module):
    """Embedding and positions; norm; two parallel branches (fused column, row) summed with one reduction; head."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        padded = -(-VOCAB // (8 * state.tp_size)) * 8 * state.tp_size
        options = {"state": state, "init": normal, "bias_init": normal}
        self.embedding = VocabParallelEmbedding(VOCAB, padded, HIDDEN, state=state, init=normal)
        replicated = {"init": normal, "sequence_reduced": True}
        self.positions = sharding.parameter(ParamSpec(shape=(SEQUENCE, HIDDEN), **replicated), state)
        self.norm = sharding.parameter(ParamSpec(shape=(HIDDEN,), **replicated), state)
        self.up = ColumnParallelLinear(HIDDEN, sum(BLOCKS), blocks=BLOCKS, **options)
        self.down = RowParallelLinear(BLOCKS[0], HIDDEN, **options)
        self.side = RowParallelLinear(BLOCKS[1], HIDDEN, **options)
        self.last = RowParallelLinear(BLOCKS[0], HIDDEN, **options)
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, padded=padded, bias=False, state=state, init=normal)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.state
        rows = sum_gradient(self.positions, state).repeat(BATCH, 1)
        hidden = self.embedding(tokens) + split_sequence_rows(rows, state)
        normed = F.rms_norm(hidden, (HIDDEN,), sum_gradient(self.norm, state), 1e-5)
        entered = enter_tensor_parallel(normed, state)
        wide, narrow = self.up(entered, entered=True).split([n // state.tp_size for n in BLOCKS], -1)
        partial = self.down(F.gelu(wide), reduce=False) + self.side(torch.tanh(narrow), reduce=False)
        hidden = hidden + self.side.add_bias(self.down.add_bias(leave_tensor_parallel(partial, state)))
        hidden = hidden + self.last(torch.sigmoid(self.up(hidden).split([n // state.tp_size for n in BLOCKS], -1)[0]))
        return gather_last_dim(self.head(hidden), state)[:, :VOCAB]


def split_sequence_rows(rows: Tensor, state: ParallelState) -> Tensor:
    """This rank's rows, no communication: unlike in `split_sequence` the other rows' gradient stays zero."""
    if not state.sequence_parallel:
        return rows
    return rows.chunk(state.tp_size)[state.tp_rank]


def reference(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The same network, unsharded, from its full weights."""
    hidden = w["embedding.weight"][tokens.reshape(-1)] + w["positions"].repeat(BATCH, 1)
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * w["norm"]
    wide, narrow = (normed @ w["up.weight"].T + w["up.bias"]).split(BLOCKS, -1)
    hidden = hidden + F.gelu(wide) @ w["down.weight"].T + w["down.bias"]
    hidden = hidden + torch.tanh(narrow) @ w["side.weight"].T + w["side.bias"]
    again = (hidden @ w["up.weight"].T + w["up.bias"]).split(BLOCKS, -1)[0]
    hidden = hidden + torch.sigmoid(again) @ w["last.weight"].T + w["last.bias"]
    return hidden @ w["head.weight"].T


def case() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(full weights, tokens that meet every shard, gradient of the logits), the same in every process."""
    single = Network(ParallelState.single())
    sharding.bind(single, 0)
    initial_weights.initialize(single, 11, ParallelState.single())
    weights = {}
    for name, value in single.named_parameters():
        full = sharding.unshard([value.detach()], value.spec).double()
        weights[name] = full.requires_grad_()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
    tokens[0] = torch.tensor([0, 19, 23, 24, 47, 66])  # first and last rows of shards at 1, 2 and 4 ranks
    return weights, tokens, torch.randn(BATCH * SEQUENCE, VOCAB, generator=generator, dtype=torch.float64)


def compare(rank: int, world_size: int, sequence_parallel: bool) -> int:
    topology = Topology({"pipe": 1, "data": 1, "model": world_size})
    state = ParallelState.build(topology, rank, "cpu", sequence_parallel)
    network = Network(state)
    sharding.bind(network, 0)
    initial_weights.initialize(network, 11, state)
    network.double()
    weights, tokens, grad = case()
    expected = reference(weights, tokens)
    expected.backward(grad)
    logits = network(tokens)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    with torch.inference_mode():
        assert torch.equal(network(tokens), logits)
    logits.backward(grad)
    for name, value in network.named_parameters():
        wanted = shard(weights[name].grad, value.spec, state.tp_rank, state.tp_size)
        assert wanted.abs().sum() > 0 or value.spec.real_size(rank, world_size) == 0, f"blind: {name}"
        torch.testing.assert_close(value.grad, wanted, msg=lambda m, name=name: f"{name}: {m}", **TOLERANCE)
    return len(list(network.parameters()))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_logits_and_gradients_are_those_of_the_unsharded_network(world_size: int, sequence_parallel: bool) -> None:
    assert run_distributed(compare, world_size, sequence_parallel) == [12] * world_size


class Block(nn.Module):
    """What a transformer block does with these layers."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.norm = sharding.parameter(ParamSpec(shape=(HIDDEN,), init=normal, sequence_reduced=True), state)
        self.up = ColumnParallelLinear(HIDDEN, 32, blocks=BLOCKS + (8,), state=state, init=normal, bias_init=normal)
        self.down = RowParallelLinear(32, HIDDEN, state=state, init=normal, bias_init=normal)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, (HIDDEN,), sum_gradient(self.norm, self.state))
        return x + self.down(F.gelu(self.up(normed)))


def compiled_block(rank: int, world_size: int, sequence_parallel: bool) -> None:
    topology = Topology({"pipe": 1, "data": 1, "model": world_size})
    state = ParallelState.build(topology, rank, "cpu", sequence_parallel)
    blocks = nn.ModuleList(Block(state) for _ in range(3))
    for index, block in enumerate(blocks):
        sharding.bind(block, index)
        initial_weights.initialize(block, 1, state)
    x = torch.randn(8 // (world_size if sequence_parallel else 1), HIDDEN, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()  # as in a network: every block's input comes from trained layers

    def step() -> tuple[Tensor, list[Tensor]]:
        y = x
        for block in blocks:
            y = block(y)
        return y, torch.autograd.grad(y.square().sum(), list(blocks.parameters()))

    eager = step()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):  # three blocks share one graph
        for block in blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        compiled = step()
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_blocks_compile_as_one_graph_without_recompiling(sequence_parallel: bool) -> None:
    run_distributed(compiled_block, 2, sequence_parallel, timeout=110)


def test_linear_is_a_seam() -> None:
    x, w, bias = torch.randn(3, 4), torch.randn(2, 4), torch.randn(2)
    assert torch.equal(linear(x, w, bias), F.linear(x, w, bias))
    assert torch.equal(linear(x, w, bias, lambda x, w, b: F.linear(x, 2 * w, b)), F.linear(x, 2 * w, bias))
    with pytest.raises(UserError, match="linear recipe: 'fp7'"):
        linear(x, w, recipe="fp7")
    assert "fp7" not in LINEAR_RECIPES


def test_a_recipe_may_bring_parameters() -> None:
    """An adapter set as a layer's recipe is part of the layer and sees every product, whichever way it is called."""
    state = ParallelState.single()

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = sharding.parameter(ParamSpec(shape=(4,), init=sharding.ones), state)

        def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            return F.linear(x, w, bias) + x * self.scale

    layer = RowParallelLinear(4, 4, state=state, init=normal)
    layer.recipe = Adapter()
    sharding.bind(layer, 2)
    initial_weights.initialize(layer, 1, state)
    assert [name for name, _ in sharding.named_parameters(layer)] == ["2.weight", "2.bias", "2.recipe.scale"]
    x = torch.randn(3, 4)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias) + x)
    assert torch.equal(layer(x, reduce=False), F.linear(x, layer.weight) + x)


def test_declarations_of_the_layers() -> None:
    topology = Topology({"model": 2})
    state = ParallelState(topology, 1, torch.device("cpu"))
    column = ColumnParallelLinear(4, 8, state=state, init=normal, blocks=(4, 2, 2))
    row = RowParallelLinear(8, 4, state=state, init=normal)
    table = VocabParallelEmbedding(67, 80, 4, state=state, init=normal, tied="0.word_embeddings.weight")
    assert column.weight.shape == (4, 4) and column.bias.shape == (4,)
    assert column.bias.spec.blocks == (4, 2, 2) and column.bias.model_parallel
    assert row.weight.shape == (4, 4) and row.bias.shape == (4,)
    assert row.bias.spec.sequence_reduced and not row.bias.model_parallel and row.weight.model_parallel
    assert table.weight.shape == (40, 4) and table.weight.spec.kind == "embedding"
    assert table.weight.spec.tied == "0.word_embeddings.weight"
    assert [p.spec.decay for p in (column.weight, column.bias, row.weight, row.bias, table.weight)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert ColumnParallelLinear(4, 8, state=state, init=normal, bias=False).bias is None
