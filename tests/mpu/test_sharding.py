"""Parameter declarations: cutting and joining, initial values that no layout changes, who counts what."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.mpu import initial_weights, owned, random, sharding
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.mpu.sharding import ParamSpec, shard, unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

GOLDEN_SEED = 9222188155762191376
GOLDEN_DRAW = [1.354478120803833, -1.9704698324203491, 0.16274024546146393]


def normal(full: Tensor, generator: torch.Generator) -> None:
    full.normal_(0.0, 0.02, generator=generator)


def alone(tp_rank: int, tp_size: int, pp_rank: int = 0, pp_size: int = 1) -> ParallelState:
    """The state of one rank of a larger layout, for code that does not communicate."""
    topology = Topology({"pipe": pp_size, "data": 1, "model": tp_size})
    return ParallelState(topology, topology.rank(pipe=pp_rank, data=0, model=tp_rank), torch.device("cpu"))


@st.composite
def declarations(draw: st.DrawFn) -> tuple[ParamSpec, int]:
    """A declaration and a number of ranks over which it can be split."""
    tp_size = draw(st.sampled_from([1, 2, 3, 4]))
    ndim = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 5)) for _ in range(ndim)]
    how = draw(st.sampled_from(["replicated", "whole", "blocks", "padded"]))
    if how == "replicated":
        return ParamSpec(shape=tuple(shape), init=normal), tp_size
    dim = draw(st.integers(0, ndim - 1))
    if how == "padded":
        shape[dim] = draw(st.integers(1, 40))
        unit = draw(st.sampled_from([1, 8])) * tp_size
        padded = -(-shape[dim] // unit) * unit
        return ParamSpec(shape=tuple(shape), init=normal, split_dim=dim, padded=padded), tp_size
    blocks = tuple(n * tp_size for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    shape[dim] = sum(blocks)
    blocks = blocks if how == "blocks" else ()
    return ParamSpec(shape=tuple(shape), init=normal, split_dim=dim, blocks=blocks), tp_size


@given(declarations())
def test_joining_undoes_cutting(case: tuple[ParamSpec, int]) -> None:
    spec, tp_size = case
    full = torch.randn(spec.shape)
    parts = [shard(full, spec, rank, tp_size) for rank in range(tp_size)]
    assert {tuple(part.shape) for part in parts} == {spec.local_shape(tp_size)}
    assert torch.equal(unshard(parts, spec), full)
    if spec.split_dim is not None:
        assert sum(spec.real_size(rank, tp_size) for rank in range(tp_size)) == spec.shape[spec.split_dim]


@given(declarations())
@example((ParamSpec(shape=(1,), init=normal, split_dim=0, padded=2), 2))  # a part is as large as the whole
def test_padding_is_zero_and_comes_last(case: tuple[ParamSpec, int]) -> None:
    spec, tp_size = case
    for rank in range(tp_size if spec.split_dim is not None else 0):
        part = shard(torch.randn(spec.shape), spec, rank, tp_size)
        real = spec.real_size(rank, tp_size)
        assert part.narrow(spec.split_dim, real, part.shape[spec.split_dim] - real).abs().sum() == 0
        assert part.narrow(spec.split_dim, 0, real).count_nonzero() == part.count_nonzero()


def test_each_sub_block_is_split_separately() -> None:
    """Rank 1 of 2 holds the second half of q, of k and of v, not the second half of the fused matrix."""
    fused = torch.arange(16.0).unsqueeze(1)
    spec = ParamSpec(shape=(16, 1), init=normal, split_dim=0, blocks=(8, 4, 4))
    assert shard(fused, spec, 0, 2).flatten().tolist() == [0, 1, 2, 3, 8, 9, 12, 13]
    assert shard(fused, spec, 1, 2).flatten().tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


@pytest.mark.parametrize(
    ("divisor", "tp_size", "padded", "rows"),
    [(128, 1, 384, [259]), (128, 2, 512, [256, 3]), (128, 4, 512, [128, 128, 3, 0])],
)
def test_real_rows_of_a_padded_vocabulary(divisor: int, tp_size: int, padded: int, rows: list[int]) -> None:
    """Known fault 31's numbers: vocabulary 259, divisor 128."""
    spec = ParamSpec(shape=(259, 2), init=normal, split_dim=0, padded=padded, kind="embedding")
    assert -(-259 // (divisor * tp_size)) * divisor * tp_size == padded
    assert [spec.real_size(rank, tp_size) for rank in range(tp_size)] == rows
    assert spec.shape == (259, 2)


def test_resharding_a_vocabulary_over_other_ranks_keeps_every_real_row() -> None:
    table = torch.randn(259, 3)
    one = ParamSpec(shape=(259, 3), init=normal, split_dim=0, padded=384)
    four = ParamSpec(shape=(259, 3), init=normal, split_dim=0, padded=512)
    there = unshard([shard(table, four, rank, 4) for rank in range(4)], four)
    assert torch.equal(unshard([shard(there, one, 0, 1)], one), table)


class Layers(nn.Module):
    """One of each sharded layer, with a vocabulary that pads differently per number of ranks."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        padded = -(-67 // (8 * state.tp_size)) * 8 * state.tp_size
        self.word_embeddings = VocabParallelEmbedding(67, padded, 8, state=state, init=normal)
        self.column = ColumnParallelLinear(8, 24, state=state, init=normal, blocks=(16, 8), bias_init=normal)
        self.row = RowParallelLinear(24, 8, state=state, init=normal, bias_init=normal)
        self.norm = sharding.parameter(ParamSpec(shape=(8,), init=sharding.ones, sequence_reduced=True), state)


REAL_COUNT = 67 * 8 + 24 * 8 + 24 + 24 * 8 + 8 + 8


def build(state: ParallelState, seed: int = 1, index: int = 3) -> Layers:
    module = Layers(state)
    sharding.bind(module, index)
    initial_weights.initialize(module, seed, state)
    return module


@pytest.mark.parametrize("tp_size", [2, 4])
def test_initial_values_do_not_depend_on_the_layout(tp_size: int) -> None:
    """Known fault 85: shards differ from each other, and together they are the unsharded initial value."""
    whole = dict(sharding.named_parameters(build(alone(0, 1))))
    parts = [dict(sharding.named_parameters(build(alone(rank, tp_size)))) for rank in range(tp_size)]
    for name, value in whole.items():
        spec = value.spec
        joined = unshard([part[name].detach() for part in parts], parts[0][name].spec)
        assert torch.equal(joined, value.detach()[: spec.shape[0]]), name
        if spec.split_dim is not None:
            assert not torch.equal(parts[0][name], parts[1][name]), name
            assert parts[0][name].model_parallel and not value.model_parallel
        else:
            assert not parts[0][name].model_parallel
        if spec.padded:
            assert all(
                part[name].detach()[part[name].spec.real_size(i, tp_size) :].eq(0).all() for i, part in enumerate(parts)
            )


def test_initial_values_depend_on_seed_and_name_only() -> None:
    def weight(**kwargs: int) -> Tensor:
        return build(alone(0, 1), **kwargs).column.weight.detach()

    torch.manual_seed(1)
    first = weight()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(first, weight())
    assert torch.equal(torch.get_rng_state(), before)  # nor does drawing them disturb the default generator
    assert not torch.equal(first, weight(seed=2))
    assert not torch.equal(first, weight(index=4))
    assert abs(first.std().item() / 0.02 - 1) < 0.2


def test_a_golden_initial_value() -> None:
    """Runs are compared across versions of this code: the seed of a name must never change."""
    assert random.stable_seed(1234, "2.attention.query_key_value.weight") == GOLDEN_SEED
    generator = torch.Generator().manual_seed(GOLDEN_SEED)
    assert torch.allclose(torch.randn(3, generator=generator), torch.tensor(GOLDEN_DRAW), atol=1e-6)


def test_names_are_neox_names() -> None:
    module = build(alone(0, 1), index=2)
    assert [name for name, _ in sharding.named_parameters(module)] == [
        "2.norm",
        "2.word_embeddings.weight",
        "2.column.weight",
        "2.column.bias",
        "2.row.weight",
        "2.row.bias",
    ]


def tied_copy(state: ParallelState, index: int) -> nn.Module:
    module = nn.Module()
    spec = ParamSpec(
        shape=(6, 4), init=normal, split_dim=0, padded=8, kind="embedding", tied="0.word_embeddings.weight"
    )
    module.add_module("word_embeddings", nn.Module())
    module.word_embeddings.weight = sharding.parameter(spec, state)
    sharding.bind(module, index)
    initial_weights.initialize(module, 5, state)
    return module


def test_a_tied_copy_starts_like_its_original_and_is_counted_once() -> None:
    first, last = alone(0, 2, 0, 2), alone(0, 2, 1, 2)
    original, copy = tied_copy(first, 0), tied_copy(last, 9)
    assert torch.equal(original.word_embeddings.weight, copy.word_embeddings.weight)
    assert dict(sharding.named_parameters(copy)).keys() == {"0.word_embeddings.weight"}
    assert copy.word_embeddings.weight.spec.name == "9.word_embeddings.weight"
    assert owned.is_owned(original.word_embeddings.weight.spec, first)
    assert not owned.is_owned(copy.word_embeddings.weight.spec, last)
    # without a pipeline the one parameter is both, whichever layer named it last
    assert owned.is_owned(copy.word_embeddings.weight.spec, alone(0, 2))


def test_replicated_parameters_are_counted_by_the_first_rank_only() -> None:
    spec = ParamSpec(shape=(8,), init=normal)
    split = ParamSpec(shape=(8,), init=normal, split_dim=0)
    assert [owned.is_owned(spec, alone(rank, 2)) for rank in range(2)] == [True, False]
    assert [owned.is_owned(split, alone(rank, 2)) for rank in range(2)] == [True, True]


def counts(rank: int, world_size: int, tp_size: int) -> tuple[int, float]:
    """Parameter count, and the squared norm of the owned parts, over (pipe, model)."""
    state = ParallelState.build(Topology({"pipe": world_size // tp_size, "data": 1, "model": tp_size}), rank, "cpu")
    modules = [build(state, index=3 + state.pp_rank), tied_copy(state, 0 if state.is_first_stage else 9)]
    module = nn.ModuleList(modules)
    square = torch.zeros((), dtype=torch.float64)
    for _, value in sharding.named_parameters(module):
        if owned.is_owned(value.spec, state):
            square += value.detach().double().square().sum()
    torch.distributed.all_reduce(square, group=state.group("model_pipe"))
    return owned.count_parameters(module, state), float(square)


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 2), (2, 1), (4, 2), (4, 4)])
def test_count_and_norm_do_not_depend_on_the_layout(world_size: int, tp_size: int) -> None:
    """Known fault 40: every parameter counts once, whatever the ranks; padding never."""
    stages = world_size // tp_size
    whole = [build(alone(0, 1), index=3 + stage) for stage in range(stages)] + [tied_copy(alone(0, 1), 0)]
    values = [value for module in whole for value in module.parameters()]
    square = sum(value.detach().double().square().sum().item() for value in values)
    for count, norm in run_distributed(counts, world_size, tp_size):
        assert count == stages * REAL_COUNT + 24
        assert norm == pytest.approx(square, rel=1e-12)


def test_one_full_parameter_at_a_time() -> None:
    """Initialising holds the shards and one full parameter, never two full ones."""
    state = alone(0, 4)
    module = nn.ModuleList(ColumnParallelLinear(64, 256, state=state, init=normal, bias=False) for _ in range(6))
    alive: list[int] = []

    def watching(full: Tensor, generator: torch.Generator) -> None:
        gc.collect()
        tensors = [
            o for o in gc.get_objects() if isinstance(o, Tensor) and o.untyped_storage().nbytes() == 64 * 256 * 4
        ]
        alive.append(len({o.untyped_storage().data_ptr() for o in tensors}))

    for layer in module:
        layer.weight.spec = ParamSpec(shape=(256, 64), init=watching, split_dim=0)
    sharding.bind(module, 2)
    initial_weights.initialize(module, 1, state)
    assert alive == [1] * 6


def test_wrong_declarations_are_refused() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        ParamSpec(shape=(8,), init=normal, split_dim=0, blocks=(4, 2))
    with pytest.raises(ValueError, match="padded size 4"):
        ParamSpec(shape=(8,), init=normal, split_dim=0, padded=4)
    with pytest.raises(ValueError, match="need a split_dim"):
        ParamSpec(shape=(8,), init=normal, padded=16)
    with pytest.raises(ValueError, match="kind 'tensor'"):
        ParamSpec(shape=(8,), init=normal, kind="tensor")
    with pytest.raises(UserError, match=r"shape \[7, 2\]: 3 along dimension 0 .*model_parallel_size=2\b"):
        ParamSpec(shape=(7, 2), init=normal, split_dim=0, blocks=(4, 3)).local_shape(2)
    with pytest.raises(UserError, match=r"expected the shape \[8\], got \[9\]"):
        shard(torch.zeros(9), ParamSpec(shape=(8,), init=normal), 0, 1)
    with pytest.raises(UserError, match=r"2 parts of shape \[4\], got \[8\]"):
        unshard([torch.zeros(4), torch.zeros(8)], ParamSpec(shape=(8,), init=normal, split_dim=0))


def test_modules_with_foreign_or_doubled_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="not made by mpu.sharding.parameter"):
        sharding.bind(nn.Linear(2, 2), 0)
    state = alone(0, 1)
    with pytest.raises(ValueError, match=r"2\.row\.weight .*3\.row\.weight, .*tied"):
        sharding.bind(nn.ModuleDict({"row": build(state, index=2).row}), 3)
    with pytest.raises(ValueError, match="no canonical name yet"):
        initial_weights.initialize(Layers(state), 1, state)
    twice = nn.ModuleList([tied_copy(state, 0), tied_copy(state, 9)])
    with pytest.raises(ValueError, match=r"two .* 0\.word_embeddings\.weight$"):
        list(sharding.named_parameters(twice))


def test_defaults_of_decay_and_kind() -> None:
    matrix, vector = ParamSpec(shape=(2, 2), init=normal), ParamSpec(shape=(2,), init=normal)
    assert (matrix.kind, matrix.decay, vector.kind, vector.decay) == ("matrix", True, "vector", False)
    assert ParamSpec(shape=(2,), init=normal, decay=True).decay


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.text(max_size=8), st.text(max_size=8))
def test_seeds_of_different_names_differ(seed: int, one: str, other: str) -> None:
    assert 0 <= random.stable_seed(seed, one) < 2**63
    assert (random.stable_seed(seed, one) == random.stable_seed(seed, other)) == (one == other)
