"""Texts that a copy of the model continues together, a token at a time; others may join and leave between two tokens.

Shapes: `b` texts, `s` columns so far, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.inference.stage import Stage
from megatron.layers.kv_cache import left_padded_positions


class RunningBatch:
    """Rows are padded on the left, so that all continue in the same column. The same calls on every rank of the copy.

    Args:
        prompts: token ids; none is empty.
        steps: most tokens that any of them gets.
        pad: the id in columns before a text.
        use_cache: keep keys and values of earlier tokens.
    """

    def __init__(
        self, stage: Stage, prompts: Sequence[Sequence[int]], steps: int, pad: int, use_cache: bool = True
    ) -> None:
        self.stage, self.steps, self.pad, self.use_cache = stage, steps, pad, use_cache
        longest = max(map(len, prompts))
        device = stage.state.device
        self.padded = [longest - len(prompt) for prompt in prompts]
        rows = [[pad] * padding + list(prompt) for padding, prompt in zip(self.padded, prompts, strict=True)]
        self.columns = torch.tensor(rows, device=device)
        self._start_anew()

    def _start_anew(self) -> None:
        """Nothing has been run yet."""
        self.start = torch.tensor(self.padded, device=self.stage.state.device)
        capacity = self.columns.shape[1] + (self.steps if self.use_cache else 0)
        self.cache = self.stage.new_cache(capacity, self.start)
        self.done = 0

    def logits(self) -> Tensor | None:
        """[b, v] fp32 of the next tokens, on ranks of the last stage; None elsewhere."""
        stage, length = self.stage, self.columns.shape[1]
        if not self.use_cache or stage.switch_length in [length - 1 - padding for padding in self.padded]:
            self._start_anew()
        # A text that has ended may ride along until the others do; its position must stay inside the model's tables.
        positions = left_padded_positions(self.start, self.done, length - self.done)
        positions = positions.clamp(max=stage.max_positions - 1)
        logits = stage.last_logits(self.columns[:, self.done :], positions, self.cache)
        self.done = length
        return logits

    def append(self, tokens: Tensor) -> None:
        """The next tokens [b], whose logits were asked for just now."""
        self.columns = torch.cat((self.columns, tokens[:, None]), dim=1)
        self.steps -= 1

    def keep(self, rows: Sequence[int]) -> None:
        """The other rows leave; call it after `append`. At least one stays."""
        self.padded = [self.padded[row] for row in rows]
        first = min(self.padded)
        self.padded = [padding - first for padding in self.padded]
        index = torch.tensor(rows, device=self.columns.device)
        self.columns = self.columns[index, first:]
        self.cache.keep(index, first)
        self.done -= first
        self.start = torch.tensor(self.padded, device=self.columns.device)

    def join(self, other: RunningBatch) -> None:
        """Take the rows of another batch behind one's own; call it after `append` on both, with a cache."""
        length = max(self.columns.shape[1], other.columns.shape[1])
        for batch in (self, other):
            ahead = length - batch.columns.shape[1]
            batch.padded = [padding + ahead for padding in batch.padded]
            batch.columns = torch.nn.functional.pad(batch.columns, (ahead, 0), value=self.pad)
        self.columns, self.padded = torch.cat((self.columns, other.columns)), self.padded + other.padded
        self.cache.join(other.cache)
        self.steps, self.done = max(self.steps, other.steps), length - 1
        self.start = torch.tensor(self.padded, device=self.columns.device)
