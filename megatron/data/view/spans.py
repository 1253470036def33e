"""Tokens and labels as text for people: which parts are trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what half a character decodes to


def trained_spans(
    tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray | None
) -> list[tuple[str, bool]]:
    """The text of `tokens` `[n]`, cut where trained and untrained parts meet: (text, trained), in order.

    The parts together are the text of all tokens. A character whose bytes are spread over several tokens is whole, and
    belongs to the part in which it ends. `labels` `[n]` belong to the tokens at the same positions (-100: not
    trained); None trains everything.
    """
    ids = [int(token) for token in tokens]
    if not ids:
        return []
    trained = np.full(len(ids), True) if labels is None else np.asarray(labels) >= 0
    if len(trained) != len(ids):
        raise ValueError(f"{len(trained)} labels for {len(ids)} tokens")
    whole, spans, done = tokenizer.detokenize(ids), list[tuple[str, bool]](), 0
    borders = [*(int(at) + 1 for at in np.flatnonzero(trained[1:] != trained[:-1])), len(ids)]
    for border in borders:
        end = len(whole) if border == len(ids) else _text_before(tokenizer, ids, border, whole)
        if end > done:
            spans.append((whole[done:end], bool(trained[border - 1])))
            done = end
    return spans


def bracketed(
    tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray | None
) -> str:
    """The text with its trained parts in brackets: `user: hello\\nmodel: ⟦hi⟧`."""
    return "".join(f"⟦{text}⟧" if trained else text for text, trained in trained_spans(tokenizer, tokens, labels))


def _text_before(tokenizer: Tokenizer, ids: list[int], border: int, whole: str) -> int:
    """How many characters of `whole` the first `border` tokens finish."""
    text = tokenizer.detokenize(ids[:border])
    if whole.startswith(text):
        return len(text)
    text = text.rstrip(UNFINISHED)
    return next((i for i, (a, b) in enumerate(zip(text, whole)) if a != b), min(len(text), len(whole)))
