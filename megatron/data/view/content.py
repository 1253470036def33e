"""What is shown to people: rows of tokens, which are documents of a dataset or samples of a run.

Shapes: n tokens of a row; s inputs of a sample, whose row has n = s + 1 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from megatron.data.collate import CollateRules, StepArrays, allocate, fill
from megatron.data.sample import Sample
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.view.origin import Origin


@dataclass(frozen=True)
class Part:
    """Tokens `[start, end)` of a row with a title: a document, a piece of one, or padding."""

    title: str
    start: int
    end: int
    padding: bool = False


@dataclass(frozen=True)
class View:
    """A row to be shown.

    Attributes:
        title, facts: its description; facts are (name, value) pairs.
        tokens: int64 `[n]`.
        trained: bool `[n]`, the tokens that the model learns to predict.
        parts: the whole row, in order.
        source: its group in statistics.
        positions, doc_ids: int64 `[s]`, as the model gets them; only of samples.
        targets: int64 `[s]`, the token to predict at each input, 0 where labels exclude it; only of samples.
    """

    title: str
    tokens: np.ndarray
    trained: np.ndarray
    parts: tuple[Part, ...]
    facts: tuple[tuple[str, str], ...] = ()
    source: str = ""
    positions: np.ndarray | None = field(default=None, compare=False)
    doc_ids: np.ndarray | None = field(default=None, compare=False)
    targets: np.ndarray | None = field(default=None, compare=False)

    @property
    def real(self) -> int:
        """Number of tokens without padding."""
        return sum(part.end - part.start for part in self.parts if not part.padding)

    @property
    def marked(self) -> bool:
        """Whether a token that could be trained is not, so that trained ones need a mark."""
        first = {part.start for part in self.parts}
        silent = np.flatnonzero(~self.trained).tolist()
        padding = next((part.start for part in self.parts if part.padding), len(self.tokens))
        return any(at not in first and at < padding for at in silent)


def document_view(
    data: IndexedDataset,
    index: int,
    labels: IndexedDataset | None = None,
    reward: float | int | None = None,
    what: str = "document",
) -> View:
    """Item `index` of a dataset, with its trained tokens by its labels."""
    tokens = np.asarray(data.get(index), dtype=np.int64)
    trained = np.full(len(tokens), True) if labels is None else np.asarray(labels.get(index)) >= 0
    facts = [("tokens", f"{len(tokens):,}"), ("trained", f"{int(trained.sum()):,}" if labels is not None else "all")]
    if reward is not None:
        facts.append(("reward", f"{reward:g}"))
    part = Part(f"{what} {index}", 0, len(tokens))
    return View(f"{what} {index} of {data.prefix}", tokens, trained, (part,), tuple(facts), data.prefix)


def sample_view(sample: Sample, origin: Origin, rules: CollateRules, title: str) -> View:
    """A sample as the model gets it: masks, positions and document numbers are the loader's own."""
    arrays = collate_one(sample, rules)
    tokens = np.asarray(sample.tokens, dtype=np.int64)
    trained = np.concatenate([[False], arrays.mask[0, 0] > 0])
    doc_ids = None if arrays.doc_ids is None else arrays.doc_ids[0, 0]
    real = len(tokens) if sample.length is None else sample.length
    parts = _split_at(_parts_of(origin, len(tokens)), doc_ids)
    facts = (
        ("source", origin.description),
        ("tokens", f"{len(tokens) - 1} inputs and as many targets, {int(trained.sum())} of them trained"),
        ("padding", f"{len(tokens) - real} tokens"),
        ("attention", _attention(doc_ids, real)),
        *((name, ", ".join(f"{value:g}" for value in values)) for name, values in sample.extras.items()),
    )
    positions, targets = arrays.positions[0, 0], arrays.targets[0, 0]
    return View(title, tokens, trained, parts, facts, origin.source, positions, doc_ids, targets)


def collate_one(sample: Sample, rules: CollateRules) -> StepArrays:
    """The arrays of a step with this one sample, `[1, 1, s]`."""
    arrays = allocate(rules, 1, 1)
    fill(arrays, 0, 0, sample, rules)
    return arrays


def _attention(doc_ids: np.ndarray | None, real: int) -> str:
    if doc_ids is None:
        return "crosses documents"
    return f"stays inside a document ({len(np.unique(doc_ids[:real]))} here), where positions begin at 0"


def _parts_of(origin: Origin, total: int) -> list[Part]:
    parts, at = [], 0
    for piece in origin.pieces:
        end, last = at + piece.length, piece.offset + piece.length - 1
        whole = "" if piece.length == piece.size else f", its tokens {piece.offset}..{last} of {piece.size}"
        parts.append(Part(f"document {piece.document} of {piece.file}{whole}", at, end))
        at = end
    if at < total:  # also an empty sample, which fills the last batch of a validation set
        parts.append(Part(f"padding: {total - at} tokens, never trained", at, total, padding=True))
    return parts


def _split_at(parts: list[Part], doc_ids: np.ndarray | None) -> tuple[Part, ...]:
    """The parts, cut where attention stops within them: at end-of-document tokens inside a document."""
    if doc_ids is None:
        return tuple(parts)
    borders = [int(at) + 1 for at in np.flatnonzero(np.diff(doc_ids))]
    cut: list[Part] = []
    for part in parts:
        inner = [] if part.padding else [at for at in borders if part.start < at < part.end]
        for start, end in zip([part.start, *inner], [*inner, part.end], strict=True):
            title = part.title if start == part.start else "the same continued after an end-of-document token"
            cut.append(replace(part, title=title, start=start, end=end))
    return tuple(cut)
