"""The packed documents of one micro-batch, in the forms that attention back-ends read.

Legend: b batch, s sequence, t = b·s, N documents of the micro-batch (a document that continues in the next row counts
again there).

Every layer of a stage masks alike, so what follows from the document numbers is made once per micro-batch, before the
first block and outside any compiled graph, and travels next to the hidden states in place of the numbers. Each
pipeline stage has the numbers from its own batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers.attention_masks import visible_mask

Form = Literal["mask", "bounds", "blocks"]
Need = tuple[Form, int | None]  # a form, for layers with this sliding window

# The longest document is rounded up to whole tiles of an attention kernel: fewer distinct numbers, the same work.
TILE = 128


@dataclass(frozen=True, eq=False)
class Documents:
    """`ids` [b, s] int64, equal inside a document. A back-end whose form is missing works from the numbers.

    * `bounds` int32 [N + 1]: where each document starts among the t tokens, then t. Documents of no length may follow.
    * `reach`: a tensor without content, as long as the longest document. A length, unlike a number, may change from
      step to step without torch.compile making a new graph.
    * `masks`: by sliding window, bool [b, 1, s, s], True = visible. `blocks`: the same for FlexAttention.
    """

    ids: Tensor
    bounds: Tensor | None = None
    reach: Tensor | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    blocks: dict[int | None, Any] = field(default_factory=dict)

    @classmethod
    def with_bounds(cls, ids: Tensor, bounds: Tensor, longest: int) -> Documents:
        """With bounds that somebody knows without asking the device. `longest`: the length of the longest document."""
        return cls(ids, bounds, bounds.new_empty(1).expand(-(-longest // TILE) * TILE))

    def prepare(self, needs: Collection[Need]) -> Documents:
        """In the forms that layers with these needs read, and no other. Call it outside compiled code.

        Waits for the device for bounds that are needed and not there.
        """
        ids, bounds, reach = self.ids, None, None
        if any(form == "bounds" for form, _ in needs):
            known = self if self.bounds is not None else Documents.with_bounds(ids, *document_bounds(ids))
            bounds, reach = known.bounds, known.reach
            assert bounds is not None and reach is not None
            _may_change_length(bounds, reach)
        s, device = ids.shape[1], ids.device
        masks = {w: visible_mask(s, s, device, window=w, doc_ids=ids) for form, w in needs if form == "mask"}
        blocks = {w: block_mask(ids, w) for form, w in needs if form == "blocks"}
        return Documents(ids, bounds, reach, masks, blocks)


def document_starts(ids: Tensor | None) -> Tensor | None:
    """bool [b, s]: the first token of each packed document. A row always starts one."""
    return None if ids is None else _starts(ids)


def _starts(ids: Tensor) -> Tensor:
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return starts


def document_of_tokens(ids: Tensor) -> Tensor:
    """ids [b, s] -> int64 [b·s]: documents numbered through the micro-batch from 0; one that continues in the next row
    is another there. Does not wait for the device.
    """
    return _starts(ids).flatten().cumsum(0) - 1


def document_bounds(ids: Tensor) -> tuple[Tensor, int]:
    """ids [b, s] -> (int32 starts of each document among the b·s tokens, then b·s; the longest one's length).

    Reads from the device, once.
    """
    starts = _starts(ids)
    bounds = F.pad(starts.flatten().nonzero().flatten().int(), (0, 1), value=ids.numel())
    return bounds, int(bounds.diff().max())


def _may_change_length(*tensors: Tensor) -> None:
    from torch._dynamo import maybe_mark_dynamic  # imported by torch.optim in any case, too slow for everybody else

    for tensor in tensors:
        maybe_mark_dynamic(tensor, 0)


def block_mask(ids: Tensor, window: int | None) -> Any:
    """FlexAttention's blocks for causal attention inside documents [b, s]."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (ids[batch, query] == ids[batch, key])
        return seen if window is None else seen & (query - key <= window)

    b, s = ids.shape
    # Compiled, it never holds the [s, s] numbers that the blocks are counted from.
    return create_block_mask(visible, b, None, s, s, device=ids.device, _compile=ids.is_cuda)
