"""The engines that compute softmax(q kᵀ · scale + mask) v.

Legend: b batch, s queries, s_k keys, n query heads, n_kv key/value heads (n a multiple of n_kv: grouped queries, head
i uses key head i // (n / n_kv)), d head dim. All tensors are [b, s, n, d] with any strides, the last one 1.

An entry of `ATTENTION_BACKENDS` is a loader without arguments that imports what it needs and returns an `Attention`;
a missing package is a `UserError` naming the requirements file. All back-ends take the softmax in fp32, which is what
`attention_softmax_in_fp32` and `apply_query_key_layer_scaling` (a division by the layer number undone inside the
softmax) ask for: both keys change nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import UserError
from megatron.layers.attention_masks import Visibility, linear_bias
from megatron.registry import Registry


class Attention(Protocol):
    """The contract of a back-end."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        window: int | None = None,
        doc_ids: Tensor | None = None,
        scale: float,
        dropout: float = 0.0,
        slopes: Tensor | None = None,
        key_start: Tensor | None = None,
    ) -> Tensor:
        """q [b, s, n, d], k and v [b, s_k, n_kv, d] -> [b, s, n, d]. See `Visibility` for the masking arguments;
        `slopes` fp32 [n] are ALiBi's; `dropout` is the probability now (0 outside training)."""


ATTENTION_BACKENDS: Registry[Callable[[], Attention]] = Registry("attention_backend")

# By device, the first that can be imported; torch's SDPA where nothing is named.
PRIORITY: dict[str, tuple[str, ...]] = {"cuda": ("torch",)}
FLASH_PRIORITY: dict[str, tuple[str, ...]] = {"cuda": ("flash", "torch")}


def choose_backend(kind: str, device: torch.device, wanted: str = "auto") -> tuple[str, Attention]:
    """(name, function) of the back-end for a layer of `kind` (`attention_config`); all compute the same numbers.

    `wanted` (`attention_backend`) is a name, or "auto": flash-attn for kind "flash" where it is installed and the
    device is a GPU, else torch's.
    """
    if wanted != "auto":
        return wanted, ATTENTION_BACKENDS[wanted]()
    table = FLASH_PRIORITY if kind == "flash" else PRIORITY
    for name in table.get(device.type, ()):
        try:
            return name, ATTENTION_BACKENDS[name]()
        except UserError:
            continue
    return "torch", torch_sdpa


def manual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    doc_ids: Tensor | None = None,
    scale: float,
    dropout: float = 0.0,
    slopes: Tensor | None = None,
    key_start: Tensor | None = None,
) -> Tensor:
    """The formula, written out: fp32 scores and softmax. The reference for the others, O(s²) memory."""
    s, s_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (k, v))
    scores = torch.einsum("bsnd,btnd->bnst", q.float(), k.float()) * scale
    if slopes is not None:
        scores = scores + linear_bias(slopes, s, s_k)
    seen = Visibility(causal, window, doc_ids, key_start).mask(s, s_k, q.device)
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return torch.einsum("bnst,btnd->bsnd", weights, v.float()).to(q.dtype)


@ATTENTION_BACKENDS.register("manual")
def _load_manual() -> Attention:
    return manual


def torch_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    doc_ids: Tensor | None = None,
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
    seen = Visibility(causal, window, doc_ids, key_start)
    mask: Tensor | None = None
    if slopes is not None:
        mask = linear_bias(slopes, s, s_k).to(q.dtype).masked_fill(~seen.mask(s, s_k, q.device), -math.inf)
    elif not seen.only_causal(s, s_k):
        mask = seen.mask(s, s_k, q.device)
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
def _load_torch() -> Attention:
    return torch_sdpa


@ATTENTION_BACKENDS.register("flex")
def _load_flex() -> Attention:
    """torch's FlexAttention: windows and documents skip whole blocks. Compiled on a GPU; no dropout."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def flex(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        window: int | None = None,
        doc_ids: Tensor | None = None,
        scale: float,
        dropout: float = 0.0,
        slopes: Tensor | None = None,
        key_start: Tensor | None = None,
    ) -> Tensor:
        if dropout > 0.0:
            raise UserError("attention_dropout: FlexAttention has no dropout; use the torch back-end or set it to 0")
        if not q.is_cuda and torch.is_grad_enabled() and q.requires_grad:
            raise UserError(
                "attention_backend: 'flex' cannot train on a CPU (torch has no backward there); use 'torch'"
            )
        b, s, s_k = q.shape[0], q.shape[1], k.shape[1]
        shift = s_k - s

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = query + shift - key
            seen = distance >= 0 if causal else distance == distance
            if window is not None:
                seen = seen & (distance <= window) & (distance >= -window)
            if doc_ids is not None:
                seen = seen & (doc_ids[batch, query] == doc_ids[batch, key])
            if key_start is not None:
                seen = (seen & (key >= key_start[batch])) | (distance == 0)
            return seen

        def alibi(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + slopes[head] * (key - query - shift)

        blocks = create_block_mask(visible, b, None, s, s_k, device=q.device)
        out = (compiled if q.is_cuda else flex_attention)(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=None if slopes is None else alibi,
            block_mask=blocks,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)

    return flex


@ATTENTION_BACKENDS.register("flash")
def _load_flash() -> Attention:
    """The flash-attn package: bf16/fp16 on a GPU, windows and ALiBi in the kernel, documents as variable lengths."""
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise UserError(
            "attention back-end 'flash' needs the flash-attn package: "
            "pip install -r requirements/requirements-flashattention.txt"
        ) from error

    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        window: int | None = None,
        doc_ids: Tensor | None = None,
        scale: float,
        dropout: float = 0.0,
        slopes: Tensor | None = None,
        key_start: Tensor | None = None,
    ) -> Tensor:
        if key_start is not None or q.dtype == torch.float32:
            rules = {"causal": causal, "window": window, "doc_ids": doc_ids, "key_start": key_start}
            return torch_sdpa(q, k, v, **rules, scale=scale, dropout=dropout, slopes=slopes)
        w = -1 if window is None else window
        options = {
            "dropout_p": dropout,
            "softmax_scale": scale,
            "causal": causal,
            "window_size": (w, 0 if causal else w),
            "alibi_slopes": slopes,
        }
        if doc_ids is None:
            return flash_attn_func(q, k, v, **options)
        bounds, longest = document_bounds(doc_ids)
        rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return flash_attn_varlen_func(*rows, bounds, bounds, longest, longest, **options).view_as(q)

    return flash


def document_bounds(doc_ids: Tensor) -> tuple[Tensor, int]:
    """doc_ids [b, s] -> (int32 starts of each run of equal ids in the b·s tokens, then b·s; the longest run).

    A row always starts a new run. Reads one number back from the device.
    """
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    bounds = F.pad(starts.flatten().nonzero().flatten().int(), (0, 1), value=doc_ids.numel())
    return bounds, int(bounds.diff().max())
