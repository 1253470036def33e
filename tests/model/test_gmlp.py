"""Blocks of gMLP and aMLP against their formula in fp64, with gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import UserError
from megatron.layers.carry import Carry
from megatron.layers.kv_cache import KVCache
from tests.model.networks import batch, build, tiny
from tests.model.recurrent import AMLP, GMLP

pytestmark = pytest.mark.cpu


def _formula(x: Tensor, w: dict[str, Tensor], b: int, s: int, model: Any) -> Tensor:
    """x [b·s, h]; GPT-NeoX's names."""

    def norm(x: Tensor, name: str) -> Tensor:
        if model.norm == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt() * w[f"{name}.scale"]
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    x = F.gelu(norm(x, "norm") @ w["input_linear.weight"].T).view(b, s, -1)
    rest, gate = x.chunk(2, -1)
    gate = norm(gate, "sgu.norm")
    spatial = w["sgu.proj.weight"][:s, :s].tril()
    mixed = torch.einsum("ij,bjf->bif", spatial, gate) + w["sgu.proj.bias"][None, :s, None]
    if "sgu.attn.proj_qkv.weight" in w:
        q, k, v = (x @ w["sgu.attn.proj_qkv.weight"].T + w["sgu.attn.proj_qkv.bias"]).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf)
        mixed = mixed + scores.softmax(-1) @ v @ w["sgu.attn.proj_ffn.weight"].T + w["sgu.attn.proj_ffn.bias"]
    return (mixed * rest).reshape(b * s, -1) @ w["output_linear.weight"].T


@pytest.mark.parametrize("changes", [GMLP, AMLP], ids=["gmlp", "amlp"])
@pytest.mark.parametrize("s", [16, 11])
def test_a_block_is_the_formula(changes: dict[str, Any], s: int) -> None:
    model = tiny(**changes)
    block = build(model).sequential[1]
    x = torch.randn(2 * s, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out = block(Carry(x, torch.arange(s).expand(2, s))).hidden
    named = dict(block.named_parameters())
    wide = {name: p.detach().double().requires_grad_() for name, p in named.items()}
    wide_x = x.detach().double().requires_grad_()
    expected = _formula(wide_x, wide, 2, s, model)
    assert (out - expected).abs().max() < 1e-5 * expected.abs().max()
    mine = torch.autograd.grad(out.square().sum(), (x, *named.values()))
    theirs = torch.autograd.grad(expected.square().sum(), (wide_x, *wide.values()))
    for name, a, b in zip(("x", *named), mine, theirs, strict=True):
        assert (a - b).abs().max() < 2e-5 * b.abs().max(), name


def test_more_positions_than_the_matrix_has_are_refused() -> None:
    network = build(tiny(**GMLP)).eval()
    tokens, positions, _ = batch()
    cache = KVCache(network.sequential, 20)
    with torch.no_grad():
        network((tokens, positions), cache=cache, then=lambda out: out.logits())
        with pytest.raises(UserError, match="seq_length 16"):
            network((tokens[:, :1], positions[:, :1] + 16), cache=cache, then=lambda out: out.logits())
