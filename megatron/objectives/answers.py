"""From numbers per token to numbers per answer.

Legend: b rows of a micro-batch, s sequence, t = b·s, n answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.data.answers import ANSWER_TOKENS
from megatron.objectives import Labels


def sum_by_answer(values: Tensor, labels: Labels) -> Tensor:
    """values [b, s] or [t] -> [n]: the sum over the tokens of each answer, whatever the mask says."""
    count = len(labels.extras[ANSWER_TOKENS])
    answers = labels.answers.flatten()
    place = torch.where(answers < 0, count, answers)
    return values.new_zeros(count + 1).index_add(0, place, values.flatten())[:count]


def sum_trained(values: Tensor, labels: Labels) -> Tensor:
    """values [b, s] or [t] -> fp64 [n]: the sum over the trained tokens of each answer.

    In fp64, because preferences are about differences of sums of a thousand times their size.
    """
    return sum_by_answer(values.flatten().double() * labels.mask.flatten(), labels)


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Per answer [..., n] -> (chosen, rejected) [..., n / 2]. Raises ValueError for an odd number of answers."""
    if values.shape[-1] % 2:
        raise ValueError(f"{values.shape[-1]} answers are not pairs")
    chosen, rejected = values.unflatten(-1, (-1, 2)).unbind(-1)
    return chosen, rejected
