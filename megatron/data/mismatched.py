"""Prompts with the answers to other prompts: how likely a model finds texts that answer nothing (KTO's z0)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron.data.sample import IGNORE, Item, Provenance, Sample, SampleDataset, Wanted, untrained_like
from megatron.data.tokens.cache import content_key
from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan


class Mismatched:
    """A `SampleDataset`: item n has the prompt of item n of `dataset` and the answer of the one behind it in its global
    batch, that of the last in a batch has the first's: (x0, y1), (x1, y2), (x2, y0).

    An answer is what is trained, and what is between; it is cut where it does not fit behind the prompt. What fills the
    last batch of a set up takes no part. Where there is nothing to exchange (one text, one without an answer) the item
    is padding. Raises `UserError` for texts without labels, and for a batch of one.

    Args:
        dataset: one text for each item, with labels.
        plan: batch sizes by step.
        begin: the number of the item that the first step of the plan begins with.
    """

    def __init__(self, dataset: SampleDataset, plan: BatchPlan, begin: int = 0) -> None:
        self.dataset, self.plan, self.begin = dataset, plan, begin

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Item:
        own, partner = self._sample(index), self.partner(index)
        return joined(own, self._sample(partner)) if partner != index else untrained_like(own)

    def partner(self, index: int) -> int:
        """The item whose answer item `index` gets."""
        step = self.plan.whole_steps(index - self.begin)
        first, size = self.begin + self.plan.samples(step), self.plan.batch_size(step)
        if size < 2:
            raise UserError("train_batch_size: 1 has no two answers to exchange between prompts (KTO); set 2 or more")
        # What is left behind the last whole batch is never read, but a pass over all items looks at it.
        following = first + (index - first + 1) % min(size, len(self) - first)
        return following if self._sample(following).length != 1 else first

    def locate(self, index: int) -> Provenance:
        return self.dataset.locate(index)

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        return self.dataset.may_hold(wanted)

    def digest(self) -> str:
        return content_key({"mismatched": self.dataset.digest(), "plan": str(self.plan), "begin": self.begin})

    def _sample(self, index: int) -> Sample:
        found = self.dataset[index]
        if not isinstance(found, Sample) or found.labels is None:
            raise UserError(
                f"{self.dataset.locate(index).path[-1]}: texts without labels, which tell prompts from answers; set "
                "train_label_data_paths (valid_, test_)"
            )
        return found


def joined(own: Sample, other: Sample) -> Sample:
    """The prompt of one text and the answer of another, as long as the first; an answer begins at its first label.
    Padding where one of them has none."""
    assert own.labels is not None and other.labels is not None and other.length is not None
    size, prompt, start = len(own.tokens), _prompt(own.labels), _prompt(other.labels)
    if size in (prompt, start):
        return untrained_like(own)
    kept = min(other.length - start, size - prompt)
    tokens, labels = np.zeros_like(own.tokens), np.full_like(own.labels, IGNORE)
    tokens[:prompt] = own.tokens[:prompt]
    tokens[prompt : prompt + kept] = other.tokens[start : start + kept]
    labels[prompt : prompt + kept] = other.labels[start : start + kept]
    return replace(own, tokens=tokens, labels=labels, length=prompt + kept, answers=None)


def _prompt(labels: np.ndarray) -> int:
    """Tokens before the first one that is trained; the first of all never is."""
    trained = np.flatnonzero(labels[1:] >= 0)
    return int(trained[0]) + 1 if len(trained) else len(labels)
