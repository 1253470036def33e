"""Frequencies of rotary positions, also of those stretched to longer texts than the model first learned.

In fp32 and in the order of GPT-NeoX's and transformers' operations, so that exported models see the same angles bit for
bit. Legend: r rotated dims of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Scaling = Mapping[str, Any]


def frequencies(dims: int, base: float, scaling: Scaling | None = None, *, long: bool = False) -> Tensor:
    """Radians per position of each rotated pair: fp32 [r/2]. `scaling`: as the key `rope_scaling`.

    `long`: of texts longer than `switch_length`.
    """
    powers = base ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    scaling = scaling or {}
    if scaling.get("rope_type") == "longrope":
        factors = scaling["long_factor" if long else "short_factor"]
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    return _KINDS[scaling.get("rope_type", "default")](powers, base, scaling)


def switch_length(scaling: Scaling | None) -> int | None:
    """The length up to which a text has other frequencies than a longer one (LongRoPE, Ding et al. 2024, arXiv
    2402.13753); None where all have the same."""
    if not scaling or scaling["rope_type"] != "longrope":
        return None
    return int(scaling["original_max_position_embeddings"])


def attention_factor(scaling: Scaling | None, longest: int) -> float:
    """What cosines and sines are multiplied by: `attention_factor`; by default, of factor f, 0.1 ln(f) + 1 (yarn) or
    sqrt(1 + ln(f) / ln(original length)) (longrope, f by default `longest` / original length)."""
    if not scaling or scaling["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling["rope_type"] == "longrope":
        original = scaling["original_max_position_embeddings"]
        factor = scaling.get("factor") or longest / original
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dims:
        return _magnitude(scaling["factor"], mscale) / _magnitude(scaling["factor"], all_dims)
    return _magnitude(scaling["factor"], 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _plain(powers: Tensor, base: float, scaling: Scaling) -> Tensor:
    """Also of `dynamic` (NTK by the length of the text): it changes beyond max_position_embeddings only, where no
    sequence of ours reaches."""
    return 1.0 / powers


def _linear(powers: Tensor, base: float, scaling: Scaling) -> Tensor:
    """All of them divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""
    return 1.0 / powers / scaling["factor"]


def _llama3(powers: Tensor, base: float, scaling: Scaling) -> Tensor:
    """Llama 3.1: those that turn less than `low_freq_factor` times in the original length are divided by `factor`,
    those that turn more than `high_freq_factor` times stay, and between them it is interpolated."""
    plain = 1.0 / powers
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / plain)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - share) * (plain / scaling["factor"]) + share * plain


def _yarn(powers: Tensor, base: float, scaling: Scaling) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): pairs that turn more than `beta_fast` times in the original length
    stay, those that turn less than `beta_slow` times are divided by `factor`, and over the pairs between it is a ramp.
    `truncate` (the default) rounds the ramp's ends outwards to whole pairs."""
    dims = 2 * len(powers)
    original = scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        """The number of the pair that turns so often in the original length."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - first) / (last - first if last != first else 0.001)
    kept = 1.0 - ramp.clamp(0.0, 1.0)
    return 1.0 / (scaling["factor"] * powers) * (1.0 - kept) + 1.0 / powers * kept


_KINDS: dict[str, Callable[[Tensor, float, Scaling], Tensor]] = {
    "default": _plain,
    "dynamic": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
