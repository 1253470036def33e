"""Attention by torch's scaled_dot_product_attention, and the formula written out.

Legend: b batch, s queries, s_k keys, n query heads, n_kv key/value heads, d head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.layers.attention_contract import ATTENTION_BACKENDS, Backend, Task
from megatron.layers.attention_masks import Visibility, linear_bias
from megatron.layers.documents import Documents


def _seen(
    q: Tensor, k: Tensor, causal: bool, window: int | None, documents: Documents | None, key_start: Tensor | None
) -> tuple[Visibility, Tensor | None]:
    """(the rules, their mask if the micro-batch has it ready)."""
    if documents is None:
        return Visibility(causal, window, None, key_start), None
    ready = documents.masks.get(window) if causal and key_start is None else None
    return Visibility(causal, window, documents.ids, key_start), ready


def manual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    documents: Documents | None = None,
    scale: float,
    dropout: float = 0.0,
    slopes: Tensor | None = None,
    key_start: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The formula: fp32 scores and softmax. The reference for the others, O(s²) memory."""
    s, s_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (k, v))
    scores = torch.einsum("bsnd,btnd->bnst", q.float(), k.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + linear_bias(slopes, s, s_k)
    rules, mask = _seen(q, k, causal, window, documents, key_start)
    if mask is None:
        mask = rules.mask(s, s_k, q.device)
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return torch.einsum("bnst,btnd->bsnd", weights, v.float()).to(q.dtype)


@ATTENTION_BACKENDS.register("manual")
def _load_manual() -> Backend:
    return Backend(manual, softcap=True)


def torch_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    documents: Documents | None = None,
    scale: float,
    dropout: float = 0.0,
    slopes: Tensor | None = None,
    key_start: Tensor | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention`, asked so that it keeps a fused kernel.

    `is_causal` without a mask wherever that is the whole rule. Grouped heads natively where the kernel has them: on a
    CPU always, on CUDA in half precision without a mask. Elsewhere torch would fall back to the O(s²) formula, so heads
    are repeated.
    """
    s, s_k, n = q.shape[1], k.shape[1], q.shape[2]
    rules, mask = _seen(q, k, causal, window, documents, key_start)
    if mask is None and (slopes is not None or not rules.only_causal(s, s_k)):
        mask = rules.mask(s, s_k, q.device)
    if slopes is not None:
        assert mask is not None
        mask = linear_bias(slopes, s, s_k).to(q.dtype).masked_fill(~mask, -math.inf)
    grouped = n != k.shape[2]
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        k, v = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and causal and s > 1,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


@ATTENTION_BACKENDS.register("torch")
def _load_torch() -> Backend:
    return Backend(torch_sdpa)


# torch 2.11 takes cuDNN's kernel first on Hopper by itself; other versions and GPUs have other orders.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def cudnn_sdpa(q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> Tensor:
    """The same with cuDNN's kernel first, where it can (half precision on CUDA). `rules` are those of `torch_sdpa`."""
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        return torch_sdpa(q, k, v, **rules)


def _cudnn_obstacle(task: Task) -> str | None:
    return None if task.device.type == "cuda" else "cuDNN needs a GPU"


@ATTENTION_BACKENDS.register("cudnn")
def _load_cudnn() -> Backend:
    return Backend(cudnn_sdpa, obstacle=_cudnn_obstacle)
