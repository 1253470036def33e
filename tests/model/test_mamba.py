"""Networks of Mamba: what is not shared with other mixers that keep a state (test_recurrent.py).

That they compute what transformers computes, at every layout, is tested with the families (tests/convert).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.layers.kv_cache import KVCache
from megatron.model.partition import layer_rows, partition
from megatron.mpu.sharding import named_parameters
from megatron.neox_arguments.formulas import flops_per_token
from tests.model.networks import VOCAB, batch, build, tiny
from tests.model.recurrent import MAMBA, MAMBA2, MAMBA_HYBRID, STATES

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(("changes", "state"), [(MAMBA, 64 * 8), (MAMBA2, 64 * 8)], ids=["mamba", "mamba2"])
@torch.no_grad()
def test_the_cache_does_not_grow(changes: dict[str, Any], state: int) -> None:
    network = build(tiny(**changes)).eval()
    tokens, positions, _ = batch()
    cache = KVCache(network.sequential, 16)
    held = []
    for column in range(16):
        network((tokens[:, column : column + 1], positions[:, column : column + 1]), cache=cache)
        held.append(cache.bytes())
    tail = 3 * (64 if changes is MAMBA else 64 + 2 * 8)  # k - 1 tokens of the convolution's channels
    assert set(held) == {4 * 2 * 2 * (state + tail)}  # fp32, layers, rows


# -- sizes, stages, compilation ---------------------------------------------------------------------------------------


def test_work_grows_with_the_state_and_not_with_the_length() -> None:
    work = [flops_per_token(tiny(**MAMBA, **more), VOCAB) for more in ({}, {"seq_length": 8})]
    assert work[0] == work[1]
    assert flops_per_token(tiny(**{**MAMBA, "mamba_d_state": 9}), VOCAB) > work[0]


def test_no_vector_of_the_state_decays_and_matrices_do() -> None:
    network = build(tiny(**MAMBA_HYBRID))
    decay = {name: p.spec.decay for name, p in named_parameters(network) if ".mixer." in name}
    undecayed = {name.split(".mixer.")[1] for name, decays in decay.items() if not decays}
    biases = {"in_proj.bias", "x_proj.bias", "dt_proj.bias", "out_proj.bias", "conv1d.bias"}
    assert undecayed == {"A_log", "D", "dt_bias", "norm.scale"} | biases
    # Muon orthogonalises what is a matrix that multiplies.
    matrices = {
        n.split(".mixer.")[1] for n, p in named_parameters(network) if ".mixer." in n and p.spec.kind == "matrix"
    }
    assert matrices == {"in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight"}


def test_stages_count_blocks_of_every_kind_unless_configured_otherwise() -> None:
    names = [row.name for row in layer_rows(tiny(**MAMBA_HYBRID))]
    assert names == [
        "Embedding", "MambaBlock", "TransformerBlock", "MambaBlock", "TransformerBlock", "FinalNorm", "Head"
    ]  # fmt: skip
    rows = layer_rows(tiny(**{**MAMBA, "num_layers": 4}))
    assert partition(rows, 2, "type:transformer|mlp") == [0, 3, 7]  # GPT-NeoX's default
    rows = layer_rows(tiny(**{**STATES, "num_layers": 4, "attention_config": ["global", "mamba", "mamba", "global"]}))
    assert partition(rows, 2, "type:mamba") == [0, 3, 7]
