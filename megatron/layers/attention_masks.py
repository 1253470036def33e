"""Which keys a query may see.

Legend: b batch, s queries, s_k keys. The s queries are always the last s of the s_k keys, so that the same rules hold
in training (s = s_k) and with a cache (s < s_k).
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_mask(
    s: int,
    s_k: int,
    device: torch.device,
    *,
    causal: bool = True,
    window: int | None = None,
    doc_ids: Tensor | None = None,
    key_start: Tensor | None = None,
) -> Tensor:
    """bool, broadcastable to [b, 1, s, s_k]; True = visible. Each query sees itself, even a padded one: no NaN.

    Args:
        causal: no key after the query.
        window: w keys before the query and the query itself (GPT-NeoX counts so; transformers counts the query in).
        doc_ids: [b, s] int64: only keys of the same document (s = s_k).
        key_start: [b] int64: keys before it are padding (left-padded prompts in a cache).
    """
    query = torch.arange(s_k - s, s_k, device=device).unsqueeze(1)  # [s, 1]
    key = torch.arange(s_k, device=device).unsqueeze(0)  # [1, s_k]
    seen = key <= query if causal else torch.ones(s, s_k, dtype=torch.bool, device=device)
    if window is not None:
        near = query - key <= window
        seen = seen & (near if causal else near & (key - query <= window))
    seen = seen[None, None]
    if doc_ids is not None:
        seen = seen & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    if key_start is not None:
        seen = (seen & (key >= key_start.view(-1, 1, 1, 1))) | (key == query)
    return seen


def linear_bias(slopes: Tensor, s: int, s_k: int) -> Tensor:
    """ALiBi's bias -slope · (query - key): [1, n, s, s_k] fp32. Only for causal attention (keys after are masked)."""
    query = torch.arange(s_k - s, s_k, device=slopes.device).unsqueeze(1)
    key = torch.arange(s_k, device=slopes.device).unsqueeze(0)
    return (key - query) * slopes.view(1, -1, 1, 1)
