"""Generation of a batch of prompts, with or without a key/value cache. Both give the same text.

Shapes: `b` prompts, `s` columns so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.inference.sampling import Sampling, next_tokens
from megatron.inference.stage import Stage
from megatron.layers.kv_cache import left_padded_positions


@dataclass
class Completion:
    """What was generated for one prompt.

    Attributes:
        tokens: new tokens, the end-of-document token excluded.
        finished: the model ended the text itself (end of document or a stop sequence).
        message: why nothing or less than asked was generated, else None.
        logits: per new token the logits over the vocabulary (fp32), when asked for; on the last stage only.
    """

    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    message: str | None = None
    logits: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """When to stop: at `eod`, at any of the token sequences `stop`, after `maximum_tokens`, at `max_positions`."""

    maximum_tokens: int
    max_positions: int
    eod: int
    stop: tuple[tuple[int, ...], ...] = ()


def generate(
    stage: Stage,
    prompts: Sequence[list[int]],
    limits: Limits,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    *,
    use_cache: bool = True,
    return_logits: bool = False,
) -> list[Completion]:
    """Complete every prompt. The same call with the same prompts on every rank of a model replica.

    An empty prompt starts from the end-of-document token, as a document does in training.
    """
    prompts = [prompt or [limits.eod] for prompt in prompts]
    completions = [Completion() for _ in prompts]
    for prompt, completion in zip(prompts, completions, strict=True):
        if len(prompt) >= limits.max_positions:
            completion.message = (
                f"the prompt has {len(prompt)} tokens, the model takes {limits.max_positions} with at least one new"
            )
    alive = [i for i, completion in enumerate(completions) if completion.message is None]
    if alive:
        batch = [prompts[i] for i in alive]
        _run(stage, batch, [completions[i] for i in alive], limits, sampling, generator, use_cache, return_logits)
    return completions


def _run(
    stage: Stage,
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    limits: Limits,
    sampling: Sampling,
    generator: torch.Generator | None,
    use_cache: bool,
    return_logits: bool,
) -> None:
    device = stage.state.device
    longest = max(len(p) for p in prompts)
    start = torch.tensor([longest - len(p) for p in prompts], device=device)
    columns = torch.tensor([[limits.eod] * (longest - len(p)) + p for p in prompts], device=device)
    open_rows = set(range(len(prompts)))
    cache = stage.new_cache(longest + limits.maximum_tokens, start)
    for new in range(limits.maximum_tokens):
        if not use_cache:
            cache = stage.new_cache(columns.shape[1], start)
        done = cache.length
        # A row that has ended rides along until the others do; its position must stay inside the model's tables.
        positions = left_padded_positions(start, done, columns.shape[1] - done).clamp(max=limits.max_positions - 1)
        logits = stage.last_logits(columns[:, done:], positions, cache)
        picked = None if logits is None else next_tokens(logits, sampling, generator)
        picked = stage.share(picked, len(prompts))
        columns = torch.cat((columns, picked[:, None]), dim=1)
        for row, token in enumerate(picked.tolist()):
            if row not in open_rows:
                continue
            row_logits = logits[row].float() if return_logits and logits is not None else None
            ended = _take(completions[row], token, row_logits, limits)
            if not ended and len(prompts[row]) + new + 1 >= limits.max_positions:
                completions[row].message = f"stopped at the model's {limits.max_positions} positions"
                ended = True
            if ended:
                open_rows.discard(row)
        if not open_rows:
            return


def _take(completion: Completion, token: int, logits: Tensor | None, limits: Limits) -> bool:
    """Add a token to a completion. Returns whether the completion has ended."""
    if token == limits.eod:
        completion.finished = True
        return True
    completion.tokens.append(token)
    if logits is not None:
        completion.logits.append(logits)
    if any(len(s) > 0 and tuple(completion.tokens[-len(s) :]) == s for s in limits.stop):
        completion.finished = True
        return True
    return False
