"""Generation of a batch of prompts, with or without a key/value cache. Both give the same text.

Shapes: `b` prompts, `s` columns so far.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.inference.running import RunningBatch
from megatron.inference.sampling import Draws, Sampling, next_tokens
from megatron.inference.stage import Stage


@dataclass
class Completion:
    """What was generated for one prompt.

    Attributes:
        tokens: new tokens, without the one of `Limits.ends` that ended the text.
        end: that one; None when the text ended otherwise.
        finished: the model ended the text itself (one of `Limits.ends`, or what `Limits.ended` looks for).
        message: why nothing or less than asked was generated, else None.
        logits: per new token the logits over the vocabulary (fp32), when asked for; on the last stage only.
        logprobs: per new token, and then of `end`, the logarithm of its probability as the model has it (no token left
            out), at temperature 1 or the one that was asked for; on the last stage only.
    """

    tokens: list[int] = field(default_factory=list)
    end: int | None = None
    finished: bool = False
    message: str | None = None
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """Where a text begins and stops.

    Attributes:
        maximum_tokens: most new tokens. A text stops at the model's last position too.
        start: what an empty prompt begins with.
        ends: tokens that end a text.
        ended: whether the new tokens end it.
    """

    maximum_tokens: int
    start: int
    ends: Container[int]
    ended: Callable[[list[int]], bool] | None = None


Grew = Callable[[int, Sequence[int]], None]
"""`grew(row, tokens)`: the new tokens so far of the prompt with that number."""


@torch.no_grad()
def generate(
    stage: Stage,
    prompts: Sequence[list[int]],
    limits: Limits,
    sampling: Sampling,
    draws: Draws | None = None,
    *,
    use_cache: bool = True,
    return_logits: bool = False,
    return_logprobs: bool | float = False,
    grew: Grew | None = None,
) -> list[Completion]:
    """Complete every prompt. The same call with the same prompts on every rank of a copy of the model.

    An empty prompt begins with `Limits.start`. A prompt that leaves no
    position for a new token gets nothing but a message.

    Args:
        draws: one stream of random numbers per prompt; not needed when `sampling` is greedy.
        return_logprobs: whether, or at which temperature.
        grew: called on this rank for each new token.
    """
    completions = [Completion() for _ in prompts]
    batch = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        text = Text(row, list(prompt) or [limits.start], completion)
        if len(text.prompt) >= stage.max_positions:
            completion.message = (
                f"the prompt has {len(text.prompt)} tokens, the model takes {stage.max_positions} with the new ones"
            )
        else:
            batch.append(text)
    if batch and limits.maximum_tokens > 0:
        _run(stage, batch, limits, sampling, draws, use_cache, _Wanted(return_logits, float(return_logprobs), grew))
    return completions


@dataclass
class Text:
    """A prompt being completed; `row` is its number among all prompts of the call."""

    row: int
    prompt: list[int]
    completion: Completion
    open: bool = True

    def take(self, token: int, limits: Limits, max_positions: int) -> bool:
        """Add a token, unless the text ends with it; whether it was added."""
        done = self.completion
        if token in limits.ends:
            done.end, done.finished, self.open = token, True, False
            return False
        done.tokens.append(token)
        if limits.ended is not None and limits.ended(done.tokens):
            done.finished, self.open = True, False
        elif len(done.tokens) == limits.maximum_tokens:
            self.open = False
        elif len(self.prompt) + len(done.tokens) >= max_positions:
            done.message, self.open = f"stopped at the model's {max_positions} positions", False
        return True


@dataclass(frozen=True)
class _Wanted:
    """What is asked for besides the tokens."""

    logits: bool
    logprobs: float  # their temperature; 0: none
    grew: Grew | None

    def note(
        self,
        batch: Sequence[Text],
        were_open: Sequence[bool],
        added: Sequence[bool],
        logits: Tensor | None,
        picked: Tensor,
    ) -> None:
        """Of the tokens [b] that were picked just now by logits [b, v], each for the text of its row, if that was open;
        `added`: and is part of it."""
        if logits is not None and self.logprobs:
            logprobs = (logits.float() / self.logprobs).log_softmax(dim=-1).gather(1, picked[:, None])[:, 0].tolist()
        for row, text in enumerate(batch):
            if logits is not None and self.logprobs and were_open[row]:
                text.completion.logprobs.append(logprobs[row])
            if not added[row]:
                continue
            if logits is not None and self.logits:
                text.completion.logits.append(logits[row].float().cpu())
            if self.grew is not None:
                self.grew(text.row, text.completion.tokens)


def _run(
    stage: Stage,
    batch: Sequence[Text],
    limits: Limits,
    sampling: Sampling,
    draws: Draws | None,
    use_cache: bool,
    wanted: _Wanted,
) -> None:
    device = stage.state.device
    lengths = [len(text.prompt) for text in batch]
    rows = torch.tensor([text.row for text in batch])
    steps = min(limits.maximum_tokens, stage.max_positions - min(lengths))
    running = RunningBatch(stage, [text.prompt for text in batch], steps, limits.start, use_cache)
    for _ in range(steps):
        logits = running.logits()
        uniform = None if draws is None or sampling.greedy else draws.next()[rows].to(device)
        picked = next_tokens(logits, sampling, uniform) if logits is not None and stage.has_results else None
        picked = stage.share(picked, len(batch))
        running.append(picked)
        taken, were_open = zip(batch, picked.tolist(), strict=True), [text.open for text in batch]
        added = [text.open and text.take(token, limits, stage.max_positions) for text, token in taken]
        wanted.note(batch, were_open, added, logits, picked)
        if not any(text.open for text in batch):
            return
