"""Attention by torch's scaled_dot_product_attention, and the formula written out.

Legend: b batch, s queries, s_k keys, n query heads, n_kv key/value heads, d head dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.layers.attention_contract import ATTENTION_BACKENDS, Backend, Call, Task
from megatron.layers.attention_masks import linear_bias


def manual(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """The formula: fp32 scores and softmax. The reference for the others, O(s²) memory."""
    s, s_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (k, v))
    scores = torch.einsum("bsnd,btnd->bnst", q.float(), k.float()) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.slopes is not None:
        scores = scores + linear_bias(call.slopes, s, s_k)
    if call.bias is not None:
        scores = scores + call.bias.float()
    weights = scores.masked_fill(~call.mask(s, s_k, q.device), -math.inf).softmax(dim=-1)
    if call.dropout > 0.0:
        weights = F.dropout(weights, call.dropout)
    return torch.einsum("bnst,btnd->bsnd", weights, v.float()).to(q.dtype)


@ATTENTION_BACKENDS.register("manual")
def _load_manual() -> Backend:
    return Backend(manual, softcap=True, bias=True)


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """`F.scaled_dot_product_attention`, asked so that it keeps a fused kernel.

    `is_causal` without a mask wherever that is the whole rule. Grouped heads natively where the kernel has them: on a
    CPU always, on CUDA in half precision without a mask. Elsewhere torch would fall back to the O(s²) formula, so heads
    are repeated.
    """
    s, s_k, n = q.shape[1], k.shape[1], q.shape[2]
    mask = None
    if call.slopes is not None:
        mask = linear_bias(call.slopes, s, s_k).to(q.dtype).masked_fill(~call.mask(s, s_k, q.device), -math.inf)
    elif call.bias is not None:
        mask = call.bias.to(q.dtype).masked_fill(~call.mask(s, s_k, q.device), -math.inf)
    elif not call.only_causal(s, s_k):
        mask = call.mask(s, s_k, q.device)
    grouped = n != k.shape[2]
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        k, v = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=mask is None and call.causal and s > 1,
        scale=call.scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


@ATTENTION_BACKENDS.register("torch")
def _load_torch() -> Backend:
    return Backend(torch_sdpa, bias=True)


# torch 2.11 takes cuDNN's kernel first on Hopper by itself; other versions and GPUs have other orders.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def cudnn_sdpa(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """The same with cuDNN's kernel first, where it can (half precision on CUDA)."""
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        return torch_sdpa(q, k, v, call)


def _cudnn_obstacle(task: Task) -> str | None:
    return None if task.device.type == "cuda" else "cuDNN needs a GPU"


@ATTENTION_BACKENDS.register("cudnn")
def _load_cudnn() -> Backend:
    return Backend(cudnn_sdpa, bias=True, obstacle=_cudnn_obstacle)
