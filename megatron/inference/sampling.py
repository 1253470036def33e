"""From logits to the next token.

Greedy whenever temperature is 0, whatever top_k and top_p say. (GPT-NeoX still sampled at temperature 0 when a
top_k was set.) Otherwise: divide by the temperature, keep the top_k best, then the smallest set whose probability
reaches top_p, and draw. Every sequence has random numbers of its own, which depend on the seed and its number alone:
the text of a prompt is the same in any batch and on any layout.

Shapes: `b` sequences, `v` vocabulary (the real one; padded rows never come here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.mpu.random import stable_seed


@dataclass(frozen=True)
class Sampling:
    """How to pick a token. 0 switches top_k and top_p off; temperature 0 is greedy.

    Raises:
        UserError: a value outside its range, naming the key.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature: {self.temperature} is negative; use 0 for greedy decoding")
        if self.top_k < 0:
            raise UserError(f"top_k: {self.top_k} is negative; use 0 to switch it off")
        if not 0.0 <= self.top_p <= 1.0:
            raise UserError(f"top_p: {self.top_p} is not between 0 and 1; use 0 to switch it off")

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken without drawing."""
        return self.temperature == 0.0


class Draws:
    """Uniform random numbers for a batch: a stream per sequence, from the seed and the sequence's number."""

    def __init__(self, seed: int, sequences: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(stable_seed("sampling", seed, i)) for i in sequences]

    def next(self, device: torch.device | str = "cpu") -> Tensor:
        """The next number of each stream: [b] fp64 in [0, 1)."""
        numbers = [torch.rand((), dtype=torch.float64, generator=generator) for generator in self._generators]
        return torch.stack(numbers).to(device)


def next_tokens(logits: Tensor, sampling: Sampling, draws: Tensor | None = None) -> Tensor:
    """Pick one token a row.

    Args:
        logits: [b, v], any float dtype; computed in fp32 here.
        draws: [b] fp64 uniform in [0, 1), not needed when greedy: the place in the cumulated distribution to take.

    Returns:
        [b] int64.
    """
    if sampling.greedy:
        return logits.argmax(dim=-1)
    if draws is None:
        raise ValueError("sampling needs a random number per row")
    scores = logits.float() / sampling.temperature
    if sampling.top_k > 0:
        scores = keep_top_k(scores, sampling.top_k)
    if 0.0 < sampling.top_p < 1.0:
        scores = keep_top_p(scores, sampling.top_p)
    cumulated = scores.double().softmax(dim=-1).cumsum(dim=-1)
    # right: the first token whose cumulated probability is above the draw, never one of probability 0.
    target = (draws * cumulated[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulated, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """-inf everywhere but at the k largest scores of each row (ties with the k-th are kept)."""
    k = min(k, scores.shape[-1])
    kth = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth, float("-inf"))


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """-inf everywhere but at the smallest set of best tokens whose probability is at least p; the best always stays.

    Source: Holtzman et al. 2019, "The curious case of neural text degeneration", section 3.1.
    """
    ordered, order = scores.sort(dim=-1, descending=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability  # mass of the better tokens
    drop = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= p)
    return scores.masked_fill(drop, float("-inf"))
