"""What an attention back-end is, what it is called with, and the table of them.

Legend: b batch, s queries, s_k keys, n query heads, n_kv key/value heads (n a multiple of n_kv: grouped queries, head
i uses key head i // (n / n_kv)), d head dim. All tensors are [b, s, n, d] with any strides, the last one 1.

All back-ends take the softmax in fp32, which is what `attention_softmax_in_fp32` and `apply_query_key_layer_scaling` (a
division by the layer number undone inside the softmax) ask for: both keys change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.layers.attention_masks import visible_mask
from megatron.layers.documents import Documents, Form
from megatron.registry import Registry


class Call(NamedTuple):
    """How one attention call weighs and masks: softmax(cap(q kᵀ · scale) + ALiBi + bias + mask) v.

    * `causal`, `window`, `key_start`: see `attention_masks.visible_mask`; `documents`: only keys of the same one.
    * `slopes` fp32 [n]: ALiBi's. `dropout`: the probability now (0 outside training).
    * `softcap` c bounds scores by c · tanh(score / c), before ALiBi and masks; only back-ends with `softcap` get it.
    * `bias` [1, n, s, s_k], with a gradient, is added to scores; only back-ends with `bias` get it.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    documents: Documents | None = None
    key_start: Tensor | None = None
    slopes: Tensor | None = None
    dropout: float = 0.0
    softcap: float | None = None
    bias: Tensor | None = None

    def only_causal(self, s: int, s_k: int) -> bool:
        """Whether `causal` is the whole mask, and a back-end's own flag can say it (square, or a single query)."""
        plain = (self.window is None or self.window >= s_k - 1) and self.documents is None and self.key_start is None
        return plain and (not self.causal or s == s_k or s == 1)

    def mask(self, s: int, s_k: int, device: torch.device) -> Tensor:
        """bool, broadcastable to [b, 1, s, s_k]; True = visible. The micro-batch's, if it has this one ready."""
        ids = None
        if self.documents is not None:
            ids, ready = self.documents.ids, self.documents.masks.get(self.window)
            if ready is not None and self.causal and self.key_start is None:
                return ready
        return visible_mask(
            s, s_k, device, causal=self.causal, window=self.window, doc_ids=ids, key_start=self.key_start
        )


Attention = Callable[[Tensor, Tensor, Tensor, Call], Tensor]
"""q [b, s, n, d], k and v [b, s_k, n_kv, d], a `Call` -> [b, s, n, d]."""


@dataclass(frozen=True)
class Task:
    """What a layer will ask of its back-end.

    * `kind`: the layer's entry of attention_config; "flash" asks for flash-attn where it is installed.
    * `documents`: intra_document_masking; `window`: a sliding one; `alibi`: slopes on the scores; `dropout` of weights;
      `softcap`: attn_logit_softcapping; `bias`: a learned one on the scores (pos_emb: rpe).
    """

    device: torch.device
    kind: str = "global"
    documents: bool = False
    window: bool = False
    alibi: bool = False
    dropout: bool = False
    softcap: bool = False
    head_dim: int = 64
    bias: bool = False


def _no_obstacle(task: Task) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """`attend` and what it reads of packed documents.

    * `form` of `Documents` it wants; `cuda_fp32_form`: in fp32 on a GPU, where some kernels do not exist.
    * `softcap`, `bias`: whether it can bound scores, and add a bias to them; else it is never given such a task.
    * `one_graph(task)`: whether torch.compile can take it whole.
    * `obstacle(task)`: why else it cannot do the task (the key and what to do), None if it can; ask `why_not`.
    """

    attend: Attention
    form: Form = "mask"
    cuda_fp32_form: Form | None = None
    softcap: bool = False
    bias: bool = False
    one_graph: Callable[[Task], bool] = lambda task: True
    obstacle: Callable[[Task], str | None] = _no_obstacle

    def why_not(self, task: Task) -> str | None:
        """Why it cannot do the task; None if it can."""
        if task.softcap and not self.softcap:
            return "it cannot cap scores (attn_logit_softcapping)"
        if task.bias and not self.bias:
            return "it cannot add a learned bias to scores (pos_emb: rpe)"
        return self.obstacle(task)

    def form_for(self, weight: Tensor) -> Form:
        """The form for a layer with this weight."""
        return self.cuda_fp32_form or self.form if weight.is_cuda and weight.dtype == torch.float32 else self.form


ATTENTION_BACKENDS: Registry[Callable[[], Backend]] = Registry(
    "attention_backend", wants="a function without arguments that returns a Backend", fits=callable
)
"""Loaders of back-ends: an entry imports what it needs and returns a `Backend`, or raises a `UserError` that names the
missing package and the requirements file. `auto` takes Deepy's own only; a plugin's is named in the config.
"""
