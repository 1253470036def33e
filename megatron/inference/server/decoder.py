"""The texts that one copy of the model is writing. New ones join between two tokens, finished ones leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.inference.generate import Completion, Limits, Text
from megatron.inference.running import RunningBatch
from megatron.inference.sampling import Draws, Sampling, next_tokens
from megatron.inference.stage import Stage
from megatron.inference.stop_strings import StopStrings


@dataclass(frozen=True)
class Order:
    """A text to be written.

    Attributes:
        number: its name among all orders.
        prompt: token ids, not empty, that leave a position for a new one.
        maximum_tokens: most new ones.
        stop_strings: texts that end it, too.
        seed, stream: of its random numbers.
        alternatives: how many of the likeliest tokens to report with each new one; None: no log-probabilities.
    """

    number: int
    prompt: list[int]
    maximum_tokens: int
    sampling: Sampling
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    stream: int = 0
    alternatives: int | None = None


class NewToken(NamedTuple):
    """A token of the order with that number.

    Attributes:
        finish: None while the text goes on; "end": the token ended it and is no part of it; "stop": with it the text
            holds a stop string; "length": no more are allowed.
        logprob: of the model as it is (temperature 1, no token left out).
        alternatives: the likeliest tokens with theirs, best first.
    """

    number: int
    token: int
    finish: str | None
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass
class _Row:
    order: Order
    text: Text
    limits: Limits
    draws: Draws


class Decoder:
    """The same calls on every rank of the copy.

    Args:
        decode: the text of tokens.
        ends: the tokens that end a text.
        pad: any id.
    """

    def __init__(self, stage: Stage, decode: Callable[[Sequence[int]], str], ends: Collection[int], pad: int) -> None:
        self.stage, self.decode, self.ends, self.pad = stage, decode, frozenset(ends), pad
        self._rows: list[_Row] = []
        self._batch: RunningBatch | None = None

    def step(self, orders: Sequence[Order], dropped: Collection[int]) -> list[NewToken]:
        """The next token of every text; on the rank with the results with its log-probability. `orders` begin, and the
        texts with the numbers `dropped` end, before it."""
        self._drop(dropped)
        found = self._advance(self._rows, self._batch) if self._batch is not None else []
        if orders:
            rows = [self._row(order) for order in orders]
            steps = max(self._room(row) for row in rows)
            batch = RunningBatch(self.stage, [row.order.prompt for row in rows], steps, self.pad)
            found += self._advance(rows, batch)
            if self._batch is None:
                self._batch = batch
            else:
                self._batch.join(batch)
            self._rows += rows
        self._drop([row.order.number for row in self._rows if not row.text.open])
        return found

    def _row(self, order: Order) -> _Row:
        stops = StopStrings(order.stop_strings, self.decode)
        limits = Limits(order.maximum_tokens, self.pad, self.ends, stops.ended if order.stop_strings else None)
        draws = Draws(order.seed, [order.stream])
        return _Row(order, Text(order.number, order.prompt, Completion()), limits, draws)

    def _room(self, row: _Row) -> int:
        return min(row.order.maximum_tokens, self.stage.max_positions - len(row.order.prompt))

    def _drop(self, numbers: Collection[int]) -> None:
        if self._batch is None or not numbers:
            return
        kept = [i for i, row in enumerate(self._rows) if row.order.number not in numbers]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in kept]
        if kept:
            self._batch.keep(kept)
        else:
            self._batch = None

    def _advance(self, rows: Sequence[_Row], batch: RunningBatch) -> list[NewToken]:
        logits = batch.logits()
        picked = _pick(logits, rows) if logits is not None and self.stage.has_results else None
        picked = self.stage.share(picked, len(rows))
        batch.append(picked)
        tokens = picked.tolist()
        probabilities = _probabilities(logits, picked, rows) if logits is not None and self.stage.has_results else {}
        found = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            row.text.take(token, row.limits, self.stage.max_positions)
            found.append(NewToken(row.order.number, token, _finish(row.text), *probabilities.get(i, ())))
        return found


def _finish(text: Text) -> str | None:
    if text.open:
        return None
    if text.completion.end is not None:
        return "end"
    return "stop" if text.completion.finished else "length"


def _pick(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """One token [b] a row of logits [b, v], each row by its own sampling."""
    picked = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for sampling in {row.order.sampling for row in rows}:
        same = [i for i, row in enumerate(rows) if row.order.sampling == sampling]
        draws = None if sampling.greedy else torch.cat([rows[i].draws.next(logits.device) for i in same])
        picked[same] = next_tokens(logits[same], sampling, draws)
    return picked


def _probabilities(
    logits: Tensor, picked: Tensor, rows: Sequence[_Row]
) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """The log-probability of the picked tokens [b] by logits [b, v] and the likeliest ones, by row, where asked for."""
    asked = [i for i, row in enumerate(rows) if row.order.alternatives is not None]
    if not asked:
        return {}
    logprobs = logits[asked].float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, picked[asked, None])[:, 0].tolist()
    most = max(rows[i].order.alternatives or 0 for i in asked)
    best = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    found = {}
    for place, i in enumerate(asked):
        pairs = zip(ids[place], values[place], strict=True)
        found[i] = (chosen[place], tuple(pairs)[: rows[i].order.alternatives])
    return found
