"""Networks whose mixers keep a state, and other rare kinds: documents, caches and sizes, the same promises for all.

That they compute what transformers computes, at every layout, is tested with the families (tests/convert).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.layers.kv_cache import KVCache, left_padded_positions
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments.formulas import parameter_count
from tests.distributed import run_distributed
from tests.model.networks import VOCAB, batch, build, logits, tiny
from tests.model.recurrent import (
    AMLP,
    AMLP_HYBRID,
    BOTH,
    GMLP,
    MAMBA,
    MAMBA2,
    MAMBA_HYBRID,
    RPE,
    RWKV,
    RWKV6,
    RWKV_HYBRID,
    WIDTHS,
)
from tests.model.test_documents import LENGTH, check_documents, masked, packed

pytestmark = pytest.mark.cpu

FORMS = {
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "mamba hybrid": MAMBA_HYBRID,
    "rwkv4": RWKV,
    "rwkv4, other widths": WIDTHS,
    "rwkv4 hybrid": RWKV_HYBRID,
    "rwkv6": RWKV6,
    "rwkv hybrid": BOTH,
    "gmlp": GMLP,
    "amlp": AMLP,
    "amlp hybrid": AMLP_HYBRID,
    "relative positions": RPE,
}
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
    network((tokens, positions, ids), (tokens.roll(-1, 1), (ids == 1).float(), torch.tensor([1.0])))[0].backward()
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


# -- sizes ------------------------------------------------------------------------------------------------------------

SIZES: list[dict[str, Any]] = [
    MAMBA,
    MAMBA2,
    MAMBA_HYBRID,
    {**MAMBA, "mamba_use_bias_in_linears": False, "mamba_use_bias_in_conv": False, "mamba_dt_rank": 5},
    {**MAMBA, "mamba_use_bias_in_x_proj": False, "mamba_expand": 3, "mamba_d_conv": 3},
    {**MAMBA2, "mamba_use_bias_in_linears": False, "mamba_n_groups": 4, "mamba_expand": 3},
    {**MAMBA2, "norm": "layernorm", "mamba_use_bias_in_conv": False, "mamba_d_state": None},
    RWKV,
    WIDTHS,
    RWKV_HYBRID,
    {**RWKV, "norm": "rmsnorm"},
    RWKV6,
    BOTH,
    GMLP,
    AMLP,
    AMLP_HYBRID,
]


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
