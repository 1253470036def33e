"""The outputs of raw LLaMA weights by the published formulas: nothing of our layers or our row order is used.

Legend: b batch, s sequence, n heads, d head size, h hidden. The rotation multiplies pairs of a head, taken as complex
numbers, by e^(i · position · frequency). Source: the reference code of LLaMA (github.com/meta-llama/llama).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.convert.outputs import EMBEDDING, LOGITS, NORM, block, keep_ends
from megatron.convert.raw.files import EMBEDDING as EMBEDDING_TENSOR
from megatron.convert.raw.files import HEAD, RawFolder


@torch.no_grad()
def raw_outputs(
    raw: RawFolder, keys: dict[str, Any], tokens: Tensor, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """A stream as `outputs.py` describes, one layer in memory at a time, in fp32.

    `keys`: our keys, of which only sizes and numbers are taken; `dtype`: weights are rounded to it first.
    """

    def read(name: str) -> Tensor:
        return raw.tensor(name).to(dtype).float()

    hidden = F.embedding(tokens, read(EMBEDDING_TENSOR))
    yield EMBEDDING, keep_ends(hidden)
    heads, kv_heads = keys["num_attention_heads"], keys["num_kv_heads"]
    d = keys.get("head_dim", keys["hidden_size"] // heads)
    turn = _rotation(tokens.shape[1], d, keys["rotary_emb_base"], keys.get("rope_scaling"))
    mask = _mask(tokens.shape[1], keys.get("sliding_window_width"))
    epsilon = keys["rms_norm_epsilon"]
    for index in range(keys["num_layers"]):
        layer = f"layers.{index}."
        x = _norm(hidden, read(f"{layer}attention_norm.weight"), epsilon)
        q, k, v = (
            F.linear(x, read(f"{layer}attention.w{name}.weight")).unflatten(-1, (count, d))
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = _rotate(q, turn), _rotate(k, turn)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=2) for part in (k, v))
        scores = torch.einsum("bind,bjnd->bnij", q, k) / math.sqrt(d) + mask
        mixed = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v).flatten(2)
        hidden = hidden + F.linear(mixed, read(f"{layer}attention.wo.weight"))
        x = _norm(hidden, read(f"{layer}ffn_norm.weight"), epsilon)
        gate = F.silu(F.linear(x, read(f"{layer}feed_forward.w1.weight")))
        up = F.linear(x, read(f"{layer}feed_forward.w3.weight"))
        hidden = hidden + F.linear(gate * up, read(f"{layer}feed_forward.w2.weight"))
        yield block(index), keep_ends(hidden)
    hidden = keep_ends(_norm(hidden, read("norm.weight"), epsilon))
    yield NORM, hidden
    yield LOGITS, F.linear(hidden, read(HEAD if HEAD in raw.tensors else EMBEDDING_TENSOR))


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _rotation(s: int, d: int, base: float, scaling: dict[str, Any] | None) -> Tensor:
    """[s, 1, d/2] complex."""
    frequencies = 1.0 / base ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    if scaling:
        frequencies = _stretch(frequencies, scaling)
    angles = torch.outer(torch.arange(s, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1)


def _stretch(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: waves longer than the trained context are slowed down, short ones kept, those between are mixed."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / scaling["factor"] + share * frequencies


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def _mask(s: int, window: int | None) -> Tensor:
    """[s, s]: 0 where a row sees a column, else -inf; `window`: how many tokens before itself it sees."""
    back = torch.arange(s)[:, None] - torch.arange(s)[None, :]
    seen = (back >= 0) & (back <= (s if window is None else window))
    return torch.zeros(s, s).masked_fill(~seen, float("-inf"))
