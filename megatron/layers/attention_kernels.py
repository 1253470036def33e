"""Attention by kernels made for packed documents: variable lengths, FlexAttention, the flash-attn package.

Legend: b batch, s queries, s_k keys, t = b·s, n query heads, n_kv key/value heads, d head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.home import installs
from megatron.layers.attention_contract import ATTENTION_BACKENDS, Backend, Call, Task
from megatron.layers.attention_packed import gpu_kernel, packed_attention
from megatron.layers.attention_sdpa import manual, torch_sdpa
from megatron.layers.documents import document_bounds


def _no_dropout(task: Task, name: str) -> str | None:
    return f"{name} has no dropout, and attention_dropout is not 0" if task.dropout else None


def _varlen(kernel: Callable[..., Tensor] | None, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Each document by itself; on a GPU also whole rows with a window, for which torch's SDPA would need a mask.

    What is left is torch's SDPA: plain causal attention, fp32 on a GPU, a cache. `kernel`: the GPU's.
    """
    documents = call.documents
    rows_alone = documents is None and call.window is not None and q.is_cuda and q.dtype != torch.float32
    ready = documents is not None and documents.bounds is not None
    if not (rows_alone or ready) or call.key_start is not None or not call.causal or q.shape[1] != k.shape[1]:
        return torch_sdpa(q, k, v, call)
    if call.dropout > 0.0:
        raise UserError("attention_dropout: varlen has no dropout; use the torch back-end or set it to 0")
    window = -1 if call.window is None else call.window
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    if documents is None:
        b, longest = q.shape[:2]
        bounds = torch.arange(0, (b + 1) * longest, longest, dtype=torch.int32, device=q.device)
    else:
        assert documents.bounds is not None and documents.reach is not None
        bounds, longest = documents.bounds, documents.reach.shape[0]
    if not q.is_cuda:
        return packed_attention(*rows, bounds, call.scale, window, call.slopes)[0].view(q.shape)
    if call.slopes is not None:
        raise UserError("pos_emb: on a GPU varlen has no ALiBi; use the flex or torch back-end")
    assert kernel is not None
    out = kernel(*rows, bounds, bounds, longest, longest, scale=call.scale, window_size=(window, 0))
    return out.view(q.shape)


def _varlen_obstacle(task: Task) -> str | None:
    if task.device.type != "cuda":
        return _no_dropout(task, "varlen")
    if task.alibi:
        return "on a GPU varlen has no ALiBi (pos_emb: alibi)"
    if task.head_dim % 8 or task.head_dim > 256:
        return f"varlen wants heads of a multiple of 8 and at most 256 wide, not {task.head_dim}"
    if torch.cuda.get_device_capability(task.device) < (8, 0):
        return "varlen needs a GPU of compute capability 8.0 or newer"
    return _no_dropout(task, "varlen")


@ATTENTION_BACKENDS.register("varlen")
def _load_varlen() -> Backend:
    """torch's variable-length attention; on a CPU our own operator of that kind."""
    # Looked up here: a forward pass is compiled, and must not ask again.
    kernel = gpu_kernel() if torch.cuda.is_available() else None

    def varlen(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return _varlen(kernel, q, k, v, call)

    return Backend(varlen, form="bounds", cuda_fp32_form="mask", obstacle=_varlen_obstacle)


@ATTENTION_BACKENDS.register("flex")
def _load_flex() -> Backend:
    """torch's FlexAttention: windows and documents skip whole blocks. Compiled on a GPU; no dropout."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def flex(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        b, s, s_k = q.shape[0], q.shape[1], k.shape[1]
        scale, causal, window, documents, key_start, slopes, dropout, softcap, _ = call
        if softcap is not None and (key_start is not None or s != s_k):
            # A cache grows by one at every step, and each length would be compiled; one query's scores are small.
            return manual(q, k, v, call)
        if dropout > 0.0:
            raise UserError("attention_dropout: FlexAttention has no dropout; use the torch back-end or set it to 0")
        if not q.is_cuda and torch.is_grad_enabled() and q.requires_grad:
            raise UserError(
                "attention_backend: 'flex' cannot train on a CPU (torch has no backward there); use 'torch'"
            )
        shift = s_k - s
        ids = None if documents is None else documents.ids

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = query + shift - key
            seen = distance >= 0 if causal else distance == distance
            if window is not None:
                seen = seen & (distance <= window) & (distance >= -window)
            if ids is not None:
                seen = seen & (ids[batch, query] == ids[batch, key])
            if key_start is not None:
                seen = (seen & (key >= key_start[batch])) | (distance == 0)
            return seen

        def modified(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            return score if slopes is None else score + slopes[head] * (key - query - shift)

        blocks = None
        if documents is not None and causal and key_start is None:
            blocks = documents.blocks.get(window)
        if blocks is None:
            rows = None if ids is None and key_start is None else b  # else one mask serves all rows
            blocks = create_block_mask(visible, rows, None, s, s_k, device=q.device)
        out = (compiled if q.is_cuda else flex_attention)(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=None if slopes is None and softcap is None else modified,
            block_mask=blocks,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
            # Else short sequences get the kernel for decoding, which has no variant for some types.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
        return out.transpose(1, 2)

    return Backend(flex, form="blocks", softcap=True, obstacle=lambda task: _no_dropout(task, "flex"))


@ATTENTION_BACKENDS.register("flash")
def _load_flash() -> Backend:
    """The flash-attn package: bf16/fp16 on a GPU, windows and ALiBi in the kernel, documents as variable lengths."""
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise UserError(
            f"attention back-end 'flash' needs the flash-attn package: {installs('flashattention')}"
        ) from error

    def flash(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.key_start is not None or q.dtype == torch.float32:
            return (torch_sdpa if call.softcap is None else manual)(q, k, v, call)
        documents, window = call.documents, -1 if call.window is None else call.window
        options = {
            "dropout_p": call.dropout,
            "softmax_scale": call.scale,
            "causal": call.causal,
            "window_size": (window, 0 if call.causal else window),
            "alibi_slopes": call.slopes,
            **({} if call.softcap is None else {"softcap": call.softcap}),
            **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}),
        }
        if documents is None:
            return flash_attn_func(q, k, v, **options)
        if documents.bounds is not None and documents.reach is not None:
            bounds, longest = documents.bounds, documents.reach.shape[0]
        else:
            bounds, longest = document_bounds(documents.ids)
        rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return flash_attn_varlen_func(*rows, bounds, bounds, longest, longest, **options).view_as(q)

    return Backend(
        flash,
        form="bounds",
        cuda_fp32_form="mask",
        softcap=True,
        one_graph=lambda task: not task.documents,  # their borders become lengths that depend on the data
        obstacle=_flash_obstacle,
    )


def _flash_obstacle(task: Task) -> str | None:
    if task.device.type != "cuda":
        return "flash-attn needs a GPU"
    if not task.softcap:
        return None
    import flash_attn  # else `_load_flash` has raised

    version = str(flash_attn.__version__)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < (2, 6, 2):
        return f"flash-attn caps scores in both directions from 2.6.2 on, not in {version}"
    return "flash-attn has no dropout of capped scores, and attention_dropout is not 0" if task.dropout else None
