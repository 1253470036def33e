"""What travels from layer to layer (`Carry`), and what the parts of a block are given of it (`Context`).

Legend: b batch, s sequence, t = b·s, h hidden, /tp = this rank's part.

Between pipeline stages the carry is a plain tuple of the tensors that it has: DeepSpeed moves nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron.layers.documents import Documents, Need


class Context(NamedTuple):
    """The tokens of a micro-batch, as mixers and feed-forwards see them next to their hidden states.

    * `positions` [b, s] int64.
    * `documents`: the packed documents that are kept apart (intra_document_masking); None: a row is one document.
    * `cache`: in generation, this layer's entry with the earlier tokens (`Mixer.new_cache`); s counts the new ones.
    * `shared`: what a scheme of positions hands to all layers (`PositionScheme.shared`).
    * `tokens` [b, s] int64, for value embeddings; None in a model without them.
    """

    positions: Tensor
    documents: Documents | None = None
    cache: Any = None
    shared: Tensor | None = None
    tokens: Tensor | None = None


class Carry(NamedTuple):
    """The input and output of a layer.

    * `hidden` [t, h] ([t/tp, h] under sequence parallelism); in front of the embedding the token ids [b, s].
    * `positions`, `documents`: as in `Context`.
    * `balance`: what the feed-forwards have added to the loss so far, 0-dim fp32, if any of the model's may
      (`parts.adds_loss`). The embedding starts it at zero; the head passes it to the objective.
    * `shared`: as in `Context`. It travels between stages too, and its gradient comes back the same way.
    * `tokens`: as in `Context`; the embedding puts them there.
    * `inner`: `hidden` as it was behind the block that the objective names (`Objective.inner_layer`), from there on.
    """

    hidden: Tensor
    positions: Tensor
    documents: Documents | None = None
    balance: Tensor | None = None
    shared: Tensor | None = None
    tokens: Tensor | None = None
    inner: Tensor | None = None

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Any], fields: Sequence[str] = ("hidden", "positions", "documents")
    ) -> Carry:
        """From the tensors at the border of a stage; `fields` names them, in order (the last may be missing).
        Documents come as their numbers [b, s], or as they are."""
        found: dict[str, Any] = dict(zip(fields, tensors, strict=False))
        if isinstance(found.get("documents"), Tensor):
            found["documents"] = Documents(found["documents"])
        return cls(**found)

    def to_tensors(self) -> tuple[Tensor, ...]:
        """The inverse, for the next stage."""
        return tuple(x.ids if isinstance(x, Documents) else x for x in self if x is not None)

    def prepare_documents(self, needs: Collection[Need]) -> Carry:
        """With the documents in the forms that the layers of a stage read (`Documents.prepare`).

        Once for all of them, and not in a block: it depends on the data, which a compiled graph must not, and it would
        be computed again with every block that activation checkpointing recomputes.
        """
        return self if self.documents is None else self._replace(documents=self.documents.prepare(needs))

    def replace_hidden(self, hidden: Tensor, loss: Tensor | None = None) -> Carry:
        """Behind a layer that made `hidden`, and adds `loss` to the balance loss."""
        balance = self.balance if loss is None or self.balance is None else self.balance + loss
        return self._replace(hidden=hidden, balance=balance)
