"""Networks of RWKV-4 and RWKV-6, alone and beside attention: documents, caches, sizes, stages, compilation.

That they compute what transformers computes, at every layout, is tested with the families (tests/convert).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.layers.kv_cache import KVCache, left_padded_positions
from megatron.model.gpt import build_layer, gpt_layers
from megatron.model.partition import layer_rows, partition
from megatron.model.rwkv_block import RwkvBlock
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments.formulas import flops_per_token, parameter_count
from megatron.training.compile import compile_blocks
from tests.distributed import run_distributed
from tests.model.networks import VOCAB, batch, build, logits, tiny
from tests.model.test_documents import LENGTH, check_documents, masked, packed

pytestmark = pytest.mark.cpu

RWKV: dict[str, Any] = {
    "attention_config": [[["rwkv4"], "all"]],
    "pos_emb": "none",
    "norm": "layernorm",
    "init_method_std": 0.2,
    "output_layer_init_method": "normal",
}
WIDTHS = {**RWKV, "dim_att": 48, "ffn_dim": 40}
HYBRID = {**RWKV, "attention_config": ["rwkv4", "global", "rwkv4", "local"], "sliding_window_width": 5}
HYBRID |= {"num_layers": 4, "pos_emb": "rotary"}
RWKV6 = {**RWKV, "attention_config": [[["rwkv"], "all"]], "dim_att": 48, "head_size": 8}
BOTH = {**HYBRID, "attention_config": ["rwkv", "global", "rwkv4", "local"], "ffn_dim": 40, "head_size": 8}
FORMS = {"rwkv4": RWKV, "other widths": WIDTHS, "hybrid": HYBRID, "rwkv6": RWKV6, "both": BOTH}
forms = pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)


# -- packed documents -------------------------------------------------------------------------------------------------


@forms
@torch.no_grad()
def test_another_document_changes_nothing_and_alone_gives_the_same(changes: dict[str, Any]) -> None:
    network = build(masked(**changes))
    check_documents(lambda *inputs: logits(network, *inputs), tolerance=2e-6)


@forms
@torch.no_grad()
def test_without_masking_documents_see_each_other(changes: dict[str, Any]) -> None:
    """The check above must see it."""
    network = build(tiny(**{**changes, "seq_length": LENGTH, "max_position_embeddings": LENGTH}))
    with pytest.raises(AssertionError, match="sees another"):
        check_documents(lambda tokens, positions, ids: logits(network, tokens, positions))


@forms
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_gradients_do_not_cross_either(changes: dict[str, Any], policy: str) -> None:
    network = build(masked(**changes, no_weight_tying=True, checkpoint_policy=policy))
    tokens, positions, ids = packed()
    network((tokens, positions, ids), (tokens.roll(-1, 1), (ids == 1).float(), torch.tensor(1.0))).backward()
    grad = network.sequential[0].word_embeddings.weight.grad
    mine = tokens[ids == 1].unique()
    assert grad[mine].abs().max() > 0
    assert grad[[i for i in range(VOCAB) if i not in mine]].abs().max() == 0


def _ranks(rank: int, world: int) -> None:
    for sequence_parallel in (False, True):
        topology = Topology({"pipe": 1, "data": 1, "model": world})
        state = ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel)
        for changes in FORMS.values():
            network = build(masked(**changes), state, padding=128 * world)

            def run(*inputs: Tensor, network: Any = network) -> Tensor:
                twice = inputs[0].numel() % world  # sequence parallelism splits the tokens evenly
                return logits(network, *(torch.cat((x, x)) if twice else x for x in inputs))[: inputs[0].shape[0]]

            with torch.no_grad():
                check_documents(run, tolerance=2e-6)


@pytest.mark.timeout(150)
def test_documents_over_two_tensor_parallel_ranks() -> None:
    run_distributed(_ranks, 2, timeout=120)


# -- generation -------------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("pieces", [[16], [9, 1, 1, 1, 1, 1, 1, 1], [1] * 16, [5, 4, 7], [2, 14]], ids=str)
@torch.no_grad()
def test_with_a_cache_logits_are_the_same(changes: dict[str, Any], pieces: list[int]) -> None:
    network = build(tiny(**changes)).eval()
    tokens, positions, _ = batch()
    whole = logits(network, tokens, positions)
    cache = KVCache(network.sequential, 16)
    parts, done = [], 0
    for count in pieces:
        inputs = (tokens[:, done : done + count], positions[:, done : done + count])
        parts.append(network(inputs, cache=cache, then=lambda out: out.logits()))
        done += count
        assert cache.length == done
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-5 * whole.abs().max()


@forms
@torch.no_grad()
def test_left_padding_does_not_leak_into_states(changes: dict[str, Any]) -> None:
    """Each row of a padded batch gives what it gives alone, whatever the pad tokens are."""
    network = build(tiny(**changes)).eval()
    tokens, positions, _ = batch(rows=3)
    start = torch.tensor([0, 4, 12])
    alone = [logits(network, tokens[i : i + 1, n:], positions[:1, : 16 - n])[0] for i, n in enumerate(start.tolist())]
    for pad in (0, 66):
        padded = torch.where(torch.arange(16) < start[:, None], pad, tokens)
        for pieces in ((10, 1, 5), (13, 1, 1, 1), (2, 14)):  # padding may end in the first piece or later
            cache = KVCache(network.sequential, 20, start)
            parts = []
            for count in pieces:
                inputs = (padded[:, cache.length :][:, :count], left_padded_positions(start, cache.length, count))
                parts.append(network(inputs, cache=cache, then=lambda out: out.logits()))
            together = torch.cat(parts, dim=1)
            for i, n in enumerate(start.tolist()):
                assert (together[i, n:] - alone[i]).abs().max() < 1e-5 * alone[i].abs().max(), (pad, pieces, i)


@torch.no_grad()
def test_the_cache_does_not_grow() -> None:
    network = build(tiny(**WIDTHS)).eval()
    tokens, positions, _ = batch()
    cache = KVCache(network.sequential, 16)
    held = []
    for column in range(16):
        network((tokens[:, column : column + 1], positions[:, column : column + 1]), cache=cache)
        held.append(cache.bytes())
    # Two layers, two rows: a state of three numbers per channel in fp64, the last inputs of both halves in fp32.
    assert set(held) == {2 * 2 * (3 * 48 * 8 + 2 * 32 * 4)}


@forms
@torch.no_grad()
def test_in_bf16_a_cache_gives_what_the_whole_gives(changes: dict[str, Any]) -> None:
    network = build(tiny(**changes)).eval()
    for parameter in network.parameters():
        if not parameter.spec.keep_fp32:
            parameter.data = parameter.data.bfloat16()
    tokens, positions, _ = batch()
    whole = logits(network, tokens, positions)
    cache = KVCache(network.sequential, 16)
    parts = [
        network((tokens[:, a:b], positions[:, a:b]), cache=cache, then=lambda out: out.logits())
        for a, b in ((0, 9), (9, 10), (10, 16))
    ]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 5e-2 * whole.abs().max()


# -- sizes, stages, compilation ---------------------------------------------------------------------------------------

SIZES: list[dict[str, Any]] = [RWKV, WIDTHS, HYBRID, {**RWKV, "norm": "rmsnorm"}, RWKV6, BOTH]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("changes", SIZES, ids=str)
def test_sizes_are_those_that_are_built(changes: dict[str, Any], tp: int) -> None:
    model = tiny(**changes)
    state = ParallelState(Topology({"pipe": 1, "data": 1, "model": tp}), 0, torch.device("meta"))
    layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=128, state=state)
    count = parameter_count(model, VOCAB)
    for layer, size in zip(layers[1:-2], count.blocks, strict=True):
        parameters = [p for _, p in named_parameters(build_layer(layer, None, state))]
        assert size.local(tp) == sum(p.numel() for p in parameters)
        assert size.total == layer.parameters == sum(torch.Size(p.spec.shape).numel() for p in parameters)


def test_work_grows_with_the_channels_and_not_with_the_length() -> None:
    work = [flops_per_token(tiny(**RWKV, **more), VOCAB) for more in ({}, {"seq_length": 8})]
    assert work[0] == work[1]
    assert flops_per_token(tiny(**WIDTHS), VOCAB) != work[0]


def test_decay_bonus_and_mixing_vectors_do_not_decay_and_stay_wide_where_they_are_exponents() -> None:
    network = build(tiny(**RWKV))
    specs = {name.partition(".")[2]: p.spec for name, p in named_parameters(network) if "_mixing." in name}
    vectors = {name for name, spec in specs.items() if not spec.decay}
    assert vectors == {name for name in specs if not name.endswith(".weight")} and len(vectors) == 7
    assert all(specs[name].kind == "vector" for name in vectors)
    assert {name for name, spec in specs.items() if spec.keep_fp32} == {
        "time_mixing.time_decay",
        "time_mixing.time_first",
    }
    assert {spec.kind for name, spec in specs.items() if name not in vectors} == {"matrix"}


def test_the_embeddings_are_normalised_in_the_first_block_alone() -> None:
    """Also when it is not the first of a stage, or of another kind."""
    for changes in (RWKV, HYBRID, {**HYBRID, "attention_config": ["global", "rwkv4"] * 2}):
        names = [name for name, _ in named_parameters(build(tiny(**changes))) if "pre_layernorm" in name]
        first = tiny(**changes).attention_config[0] == "rwkv4"
        assert names == (["2.pre_layernorm.weight", "2.pre_layernorm.bias"] if first else [])


def test_stages_count_blocks_of_every_kind_unless_told_otherwise() -> None:
    names = [row.name for row in layer_rows(tiny(**HYBRID))]
    assert names == [
        "Embedding", "RwkvBlock", "TransformerBlock", "RwkvBlock", "TransformerBlock", "FinalNorm", "Head"
    ]  # fmt: skip
    rows = layer_rows(tiny(**{**HYBRID, "attention_config": ["global", "rwkv4", "rwkv4", "global"]}))
    assert partition(rows, 2, "type:transformer|mlp") == [0, 3, 7]  # GPT-NeoX's default
    assert partition(rows, 2, "type:rwkv") == [0, 3, 7]


def test_only_blocks_that_are_one_graph_are_compiled() -> None:
    network = build(tiny(**HYBRID))
    assert compile_blocks(network, backend="eager") == 2
    assert not any(block._compiled_call_impl for block in network.modules() if isinstance(block, RwkvBlock))
    tokens, positions, _ = batch()
    expected = logits(build(tiny(**HYBRID)), tokens, positions)
    assert (logits(network, tokens, positions) - expected).abs().max() < 1e-5
