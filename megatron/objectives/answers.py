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
