"""Parameter groups: which parameters decay, and whose learning rate is scaled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter


def parameter_groups(
    params: Iterable[Parameter], *, weight_decay: float, matrix_lr_mult: float = 1.0
) -> list[dict[str, Any]]:
    """Split parameters by their declaration (`ParamSpec`). Empty groups are left out.

    As in GPT-NeoX, weights and embeddings decay, norms and biases do not. `matrix_lr_mult` scales the learning
    rate of hidden matrices (muP: 1 / width multiplier); `lr_mult` is applied by the engine at each step. What stays in
    fp32 in a half-precision model has a group of its own, as DeepSpeed flattens each.
    """
    groups: dict[tuple[bool, float, bool], list[Parameter]] = {}
    for p in params:
        if not p.requires_grad:
            continue  # moved by other means (biases that balance experts)
        mult = matrix_lr_mult if p.spec.kind == "matrix" else 1.0
        groups.setdefault((p.spec.decay, mult, p.spec.keep_fp32), []).append(p)
    return [
        {"params": members, "weight_decay": weight_decay if decay else 0.0, "lr_mult": mult}
        for (decay, mult, _), members in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]
