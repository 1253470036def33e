"""Networks of RWKV: what is not shared with other mixers that keep a state (test_recurrent.py).

That they compute what transformers computes, at every layout, is tested with the families (tests/convert).
"""

from __future__ import annotations

import pytest
import torch

from megatron.layers.kv_cache import KVCache
from megatron.model.partition import layer_rows, partition
from megatron.mpu.sharding import named_parameters
from megatron.neox_arguments.formulas import flops_per_token
from tests.model.networks import VOCAB, batch, build, tiny
from tests.model.recurrent import RWKV, RWKV_HYBRID, WIDTHS

pytestmark = pytest.mark.cpu


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


# -- sizes, stages, compilation ---------------------------------------------------------------------------------------


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
    for changes in (RWKV, RWKV_HYBRID, {**RWKV_HYBRID, "attention_config": ["global", "rwkv4"] * 2}):
        names = [name for name, _ in named_parameters(build(tiny(**changes))) if "pre_layernorm" in name]
        first = tiny(**changes).attention_config[0] == "rwkv4"
        assert names == (["2.pre_layernorm.weight", "2.pre_layernorm.bias"] if first else [])


def test_stages_count_blocks_of_every_kind_unless_configured_otherwise() -> None:
    names = [row.name for row in layer_rows(tiny(**RWKV_HYBRID))]
    assert names == [
        "Embedding", "RwkvBlock", "TransformerBlock", "RwkvBlock", "TransformerBlock", "FinalNorm", "Head"
    ]  # fmt: skip
    rows = layer_rows(tiny(**{**RWKV_HYBRID, "attention_config": ["global", "rwkv4", "rwkv4", "global"]}))
    assert partition(rows, 2, "type:transformer|mlp") == [0, 3, 7]  # GPT-NeoX's default
    assert partition(rows, 2, "type:rwkv") == [0, 3, 7]
