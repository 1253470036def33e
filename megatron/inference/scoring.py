"""Log-likelihood of given tokens: whole texts through the network at once, without a cache.

Shapes: `b` texts, `s` columns, `h` hidden, `v` vocabulary, `m` scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.inference.stage import Stage, batches
from megatron.model.head import LMOutput

CHUNK = 256  # logits rows [., v] in memory at a time

# (context, continuation): the tokens before, and those to be scored
Pair = tuple[Sequence[int], Sequence[int]]
# (sum of the continuation's log-probabilities, whether greedy decoding would have written it)
Score = tuple[float, bool]


@torch.no_grad()
def score(stage: Stage, pairs: Sequence[Pair], batch: int, what: str = "") -> list[Score]:
    """Score every pair, `batch` texts at a time. The same call on every rank of a copy of the model.

    Progress is shown under the name `what`, if any. Texts that are too long lose the start of their context. Pairs
    that feed the network the same tokens (answers of one token to a question) share one pass.

    Returns:
        Scores in order on the copy's speaking rank; an empty list elsewhere.

    Raises:
        UserError: a continuation alone is longer than the model's positions.
    """
    texts: dict[tuple[int, ...], list[int]] = {}
    for number, (context, continuation) in enumerate(pairs):
        texts.setdefault(_input_of(context, continuation, stage.max_positions), []).append(number)
    scores: list[Score] = [(0.0, True)] * len(pairs)
    fed = [text for text in texts if text]
    for numbers in batches(stage, [len(text) for text in fed], batch, what):
        chunk = [fed[i] for i in numbers]
        wanted = [(row, number) for row, text in enumerate(chunk) for number in texts[text]]
        found = _score_chunk(stage, chunk, [(row, pairs[number][1]) for row, number in wanted])
        for (_, number), (logprobs, best) in zip(wanted, found or (), strict=found is not None):
            scores[number] = float(logprobs.sum()), bool(best.all())
    return scores if stage.has_results else []


@torch.no_grad()
def token_logprobs(stage: Stage, pairs: Sequence[Pair], batch: int, temperature: float = 1.0) -> list[list[float]]:
    """The log-probability of each token of the continuations, of the distribution at this temperature; as `score`.

    Returns them on the copy's speaking rank, an empty list elsewhere. No text may be longer than the model's positions.
    """
    fed = [_input_of(context, continuation, stage.max_positions) for context, continuation in pairs]
    logprobs: list[list[float]] = [[] for _ in pairs]
    some = [number for number, text in enumerate(fed) if text]
    for places in batches(stage, [len(fed[number]) for number in some], batch):
        numbers = [some[place] for place in places]
        wanted = [(row, pairs[number][1]) for row, number in enumerate(numbers)]
        found = _score_chunk(stage, [fed[i] for i in numbers], wanted, temperature)
        for number, (values, _) in zip(numbers, found or (), strict=found is not None):
            logprobs[number] = values.tolist()
    return logprobs if stage.has_results else []


def _input_of(context: Sequence[int], continuation: Sequence[int], longest: int) -> tuple[int, ...]:
    """The tokens that the network is fed: all but the last, which is only predicted; nothing if nothing is scored."""
    if not continuation:
        return ()
    if len(continuation) > longest:
        raise UserError(f"a continuation of {len(continuation)} tokens does not fit the model's {longest} positions")
    if not context:
        raise ValueError("the first token of a continuation needs something before it")
    return tuple((*context, *continuation)[-(longest + 1) : -1])


def _score_chunk(
    stage: Stage,
    texts: Sequence[tuple[int, ...]],
    wanted: Sequence[tuple[int, Sequence[int]]],
    temperature: float = 1.0,
) -> list[tuple[Tensor, Tensor]] | None:
    """What `_at` finds for each (row, continuation) in a batch of fed texts, on the last stage; None elsewhere.

    Rows are padded on the right, where causal attention does not look.
    """
    device, width = stage.state.device, len(texts[0])
    tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=device)
    positions = torch.arange(width, device=device).expand_as(tokens).contiguous()
    places, targets = [], []
    for row, continuation in wanted:
        end = row * width + len(texts[row])
        places += range(end - len(continuation), end)
        targets += continuation
    at = partial(
        _at,
        places=torch.tensor(places, device=device),
        targets=torch.tensor(targets, device=device),
        temperature=temperature,
    )
    found = stage.run(tokens, positions, then=at)
    if found is None:
        return None
    logprobs, best = found
    lengths = [len(continuation) for _, continuation in wanted]
    return list(zip(logprobs.split(lengths), best.split(lengths), strict=True))


def _at(out: LMOutput, places: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability [m] fp64, whether it is the likeliest token [m]) of `targets` after the tokens `places`."""
    logprobs, best = [], []
    for logits, target in zip(
        out.at_temperature(temperature).logits_at(places, CHUNK), targets.split(CHUNK), strict=True
    ):
        picked = logits.gather(1, target[:, None])[:, 0]
        logprobs.append((picked - logits.logsumexp(dim=-1)).double().cpu())
        best.append((logits.argmax(dim=-1) == target).cpu())
    return torch.cat(logprobs), torch.cat(best)
