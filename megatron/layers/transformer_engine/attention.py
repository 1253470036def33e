"""Attention by Transformer Engine's DotProductAttention, which takes flash-attn or cuDNN, in FP8 too.

Legend: b batch, s queries, s_k keys, n query heads, n_kv key/value heads, d head dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers.attention_contract import ATTENTION_BACKENDS, Backend, Call, Task
from megatron.layers.attention_sdpa import torch_sdpa
from megatron.layers.transformer_engine import load
from megatron.layers.transformer_engine.linear import NAME


def _obstacle(task: Task) -> str | None:
    try:
        load(task.device)
    except UserError as error:
        return str(error)
    if task.documents:
        return "Transformer Engine's attention is not called with packed documents (intra_document_masking)"
    if task.alibi:
        return "Transformer Engine's attention is not called with ALiBi (pos_emb: alibi)"
    return None


@ATTENTION_BACKENDS.register(NAME)
def load_attention() -> Backend:
    """Transformer Engine's DotProductAttention: causal attention in bf16, fp16 and, with te_fp8_mha, FP8."""
    modules: dict[tuple[object, ...], nn.Module] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        heads, d, kv_heads = q.shape[2], q.shape[3], k.shape[2]
        square = q.shape[1] == k.shape[1] and call.causal
        if not square or call.key_start is not None or call.documents is not None:
            return torch_sdpa(q, k, v, call)  # with a cache
        key = (heads, kv_heads, d, call.scale, call.window, call.dropout)
        if key not in modules:
            modules[key] = load(q.device).DotProductAttention(
                heads,
                d,
                num_gqa_groups=kv_heads,
                attention_dropout=call.dropout,
                qkv_format="bshd",
                attn_mask_type="causal",
                window_size=(-1 if call.window is None else call.window, 0),
                softmax_scale=call.scale,
            )
        out: Tensor = modules[key](q.contiguous(), k.contiguous(), v.contiguous())
        return out.view(q.shape)

    return Backend(attend, one_graph=lambda task: False, obstacle=_obstacle)
