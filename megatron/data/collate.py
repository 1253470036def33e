"""From samples to the arrays of a step: inputs, targets, loss mask, positions, document numbers.

Shapes: b micro-batch, s sequence, gas micro-batches of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.data.answers import Carried
from megatron.data.bounds import document_bounds
from megatron.data.sample import Sample
from megatron.errors import UserError


@dataclass(frozen=True)
class CollateRules:
    """What is done to every sample.

    Attributes:
        seq_length: s; a sample has s + 1 tokens.
        eod: id of the end-of-document token, needed by the two below.
        eod_mask_loss: no loss where the *input* token is end-of-document, as in GPT-NeoX: such a position would have
            to guess how the next document begins.
        intra_document_masking: positions restart and document numbers grow at each document.
        vocab_size: when given, an id outside `[0, vocab_size)` is an error here and not deep in the model.
        reads: which of the samples' extras the objective reads, "answers" for their answers.
    """

    seq_length: int
    eod: int | None = None
    eod_mask_loss: bool = False
    intra_document_masking: bool = False
    vocab_size: int | None = None
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.eod_mask_loss and self.eod is None:
            raise UserError("eod_mask_loss needs a tokenizer with an end-of-document token.")


@dataclass
class StepArrays:
    """The arrays of one rank and step, all `[gas, b, s]`: int64, but for the float32 `mask`.

    * `padding`: how many inputs are padding; `trained`: the sum of the mask.
    * `bounds`, `longest`: see `document_bounds`.
    * `carried`: answers and extras.
    """

    tokens: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    positions: np.ndarray
    doc_ids: np.ndarray | None
    carried: Carried
    padding: int = 0
    trained: int = 0
    bounds: np.ndarray | None = None
    longest: tuple[int, ...] = ()


def allocate(rules: CollateRules, gas: int, rows: int) -> StepArrays:
    """Arrays for `fill`, so many rows a micro-batch: nothing masked, positions counting through."""
    shape = (gas, rows, rules.seq_length)
    return StepArrays(
        tokens=np.empty(shape, np.int64),
        targets=np.empty(shape, np.int64),
        mask=np.ones(shape, np.float32),
        positions=np.broadcast_to(np.arange(rules.seq_length, dtype=np.int64), shape).copy(),
        doc_ids=np.zeros(shape, np.int64) if rules.intra_document_masking else None,
        carried=Carried(shape, rules.reads),
    )


def untrained(rules: CollateRules, gas: int, rows: int) -> StepArrays:
    """The arrays of a step that trains nothing, whatever its samples are."""
    arrays = allocate(rules, gas, rows)
    for part in (arrays.tokens, arrays.targets, arrays.mask):
        part[...] = 0
    complete(arrays)
    return arrays


def fill(arrays: StepArrays, micro: int, row: int, sample: Sample, rules: CollateRules) -> None:
    """Write one sample into row `row` of micro-batch `micro`."""
    at = (micro, row)
    if len(sample.tokens) != rules.seq_length + 1:
        raise ValueError(f"a sample of {len(sample.tokens)} tokens, expected seq_length + 1 = {rules.seq_length + 1}")
    inputs = sample.tokens[:-1]
    arrays.tokens[at], arrays.targets[at] = inputs, sample.tokens[1:]
    if rules.vocab_size is not None:
        _check_range(sample.tokens, rules.vocab_size)
    if sample.labels is not None:
        # Labels move with the targets: the label of the token that is predicted decides.
        labels = sample.labels[1:]
        arrays.mask[at] = labels >= 0
        arrays.targets[at] = np.maximum(labels, 0)
    if sample.length is not None:
        mask_row(arrays.mask[at], sample.starts, sample.length)
        arrays.padding += max(0, rules.seq_length - sample.length)
    if rules.eod_mask_loss:
        arrays.mask[at][inputs == rules.eod] = 0
    if arrays.doc_ids is not None:
        begins = document_begins(sample, rules.eod)
        counter = np.arange(rules.seq_length)
        arrays.doc_ids[at] = np.cumsum(begins) - 1
        arrays.positions[at] = counter - np.maximum.accumulate(np.where(begins, counter, 0))
    arrays.carried.write(at, sample)


def cut(arrays: StepArrays, length: int) -> None:
    """Cut every row `[s]` into s / length rows in its order: the same targets of the same inputs, which see less before
    them. Positions count from the start of a row, or of a document in it."""

    def rows(part: np.ndarray) -> np.ndarray:
        return part.reshape(len(part), -1, length)

    arrays.tokens, arrays.targets, arrays.mask = rows(arrays.tokens), rows(arrays.targets), rows(arrays.mask)
    begins = rows(arrays.positions) == 0
    begins[..., 0] = True
    counter = np.broadcast_to(np.arange(length), begins.shape)
    arrays.positions = counter - np.maximum.accumulate(np.where(begins, counter, 0), axis=-1)
    if arrays.doc_ids is not None:
        arrays.doc_ids = np.cumsum(begins, axis=-1) - 1
    arrays.carried.cut(rows)


def complete(arrays: StepArrays) -> None:
    """Work out what follows from arrays that are filled, where nobody waits for it: a device that is asked makes the
    host wait."""
    arrays.trained = int(arrays.mask.sum(dtype=np.float64))
    if arrays.doc_ids is not None:
        arrays.bounds, arrays.longest = document_bounds(arrays.doc_ids)
    arrays.carried.complete(arrays.mask)


def mask_row(mask: np.ndarray, starts: np.ndarray | None, length: int) -> None:
    """No loss in a row of whole documents where the target is padding or the first token of a document.

    Position i predicts token i + 1, so the last token of every document predicts nothing. The same targets are trained
    however documents are packed, and also when each is alone.

    Args:
        mask: float32 `[s]`, changed in place.
        starts: where documents begin in `[0, s + 1)`.
        length: real tokens of the row.
    """
    mask[length - 1 :] = 0
    if starts is not None:
        mask[starts[starts > 0] - 1] = 0


def document_begins(sample: Sample, eod: int | None) -> np.ndarray:
    """bool `[s]`: which inputs are the first of a document (or of the sample).

    The dataset's own borders count, so data without end-of-document tokens works. In plain text the token after an
    end-of-document also begins a document, for items of several documents. Not with labels: chat templates end every
    turn with that token, and the turns of a chat belong together. Padding is one document, whatever its id.
    """
    inputs = sample.tokens[:-1]
    begins = np.zeros(len(inputs), dtype=bool)
    begins[:1] = True
    if sample.starts is not None:
        begins[sample.starts[sample.starts < len(inputs)]] = True
    real = len(inputs) if sample.length is None else min(sample.length, len(inputs))
    if eod is not None and (sample.labels is None or sample.starts is None):
        begins[1:real] |= inputs[: real - 1] == eod
    begins[real : real + 1] = True
    return begins


def _check_range(tokens: np.ndarray, vocab_size: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"the data has token id {high if high >= vocab_size else low}, but the vocabulary has {vocab_size} "
            "entries: the data was made with another tokenizer. Set that tokenizer, or tokenise the data again."
        )
