"""What is added to the loss so that experts are used alike.

Legend: b sequences, s tokens of each, t = b·s, k experts per token, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def balance_loss(shares: Tensor, chosen: Tensor, sequences: int) -> Tensor:
    """Mean over the sequences of E · Σ_e f_e · P_e, 0-dim fp32; k when all is balanced.

    f_e is the number of the sequence's assignments to expert e over s, P_e the mean of `shares` [t, E], a token's
    scores with sum 1 (Fedus et al. 2021, eq. 4-6, scaled as in transformers' `load_balancing_loss_func`). The gradient
    goes through P alone. Taken over one sequence each, it does not depend on how a batch is split into micro-batches.
    `chosen` [t, k] int64.
    """
    experts = shares.shape[1]
    share = shares.view(sequences, -1, experts)
    counts = torch.zeros(sequences, experts, dtype=shares.dtype, device=shares.device)
    flat = chosen.view(sequences, -1)
    counts.scatter_add_(1, flat, torch.ones((), dtype=shares.dtype, device=shares.device).expand_as(flat))
    return experts * (counts / share.shape[1] * share.mean(1)).sum(1).mean()


def z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of (log Σ_e exp logit)², 0-dim: keeps the router's logits small (Zoph et al. 2022, eq. 5).
    logits [t, E] fp32."""
    return torch.logsumexp(logits, dim=1).square().mean()
