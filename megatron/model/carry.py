"""What travels from layer to layer: (hidden, positions[, documents][, balance]).

* hidden [t, h] ([t/tp, h] under sequence parallelism), positions [b, s] int64;
* documents: with intra_document_masking their numbers [b, s] int64, or inside a stage `Documents`;
* balance: with moe_aux_loss_coeff or moe_z_loss_coeff, what mixtures of experts have added to the loss so far: 0-dim
  fp32. The embedding starts it at zero; the head hands it to the objective. It is the only other floating-point tensor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.layers.documents import Documents

Carry = tuple[Any, ...]


def documents_of(carry: Carry) -> Documents | Tensor | None:
    """The documents, or their numbers; None when a row is one document."""
    return carry[2] if len(carry) > 2 and not _is_balance(carry[2]) else None


def balance_of(carry: Carry) -> Tensor | None:
    """The balance loss so far; None in a model, or in inference behind the first stage, that has none."""
    return carry[-1] if len(carry) > 2 and _is_balance(carry[-1]) else None


def passed_on(carry: Carry, hidden: Tensor, loss: Tensor | None = None) -> Carry:
    """The carry behind a layer that made `hidden` of its own and adds `loss` to the balance loss."""
    balance = balance_of(carry)
    if loss is None or balance is None:
        return (hidden, *carry[1:])
    return (hidden, *carry[1:-1], balance + loss)


def _is_balance(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
