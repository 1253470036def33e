"""Tokens as text for people: token by token, and in trained and untrained parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what half a character decodes to
_LONGEST = 16  # tokens of a character; more are not text


def trained_spans(
    tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray | None
) -> list[tuple[str, bool]]:
    """The text of `tokens` `[n]`, cut where trained and untrained parts meet: (text, trained), in order.

    The parts joined are the text of all tokens. A character whose bytes are spread over several tokens belongs to the
    part in which it ends. `labels` `[n]` belong to the tokens at the same positions (-100: not
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


def bracket_trained(
    tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray | None
) -> str:
    """The text with its trained parts in brackets: `user: hello\\nmodel: ⟦hi⟧`."""
    return "".join(f"⟦{text}⟧" if trained else text for text, trained in trained_spans(tokenizer, tokens, labels))


def _text_before(tokenizer: Tokenizer, ids: list[int], border: int, whole: str) -> int:
    """How many characters of `whole` the first `border` tokens complete."""
    text = tokenizer.detokenize(ids[:border])
    if whole.startswith(text):
        return len(text)
    text = text.rstrip(_UNFINISHED)
    return next((i for i, (a, b) in enumerate(zip(text, whole)) if a != b), min(len(text), len(whole)))


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each token `[n]`. A character whose bytes are spread over several tokens belongs to the last.

    Tokens are decoded together with the ones before them, as some tokenizers drop a leading blank. Where decoding does
    more than joining, each token is decoded alone.
    """
    ids = [int(token) for token in tokens]
    texts: list[str] = []
    begin = read = 0  # start of what is decoded together, and of what is new
    for end in range(1, len(ids) + 1):
        before, now = tokenizer.detokenize(ids[begin:read]), tokenizer.detokenize(ids[begin:end])
        unfinished = now.endswith(_UNFINISHED) and end < len(ids) and end - read < _LONGEST
        if unfinished or len(now) <= len(before):
            texts.append("")
        else:
            texts.append(now[len(before) :])
            begin, read = read, end
    if "".join(texts) == tokenizer.detokenize(ids):
        return texts
    return [tokenizer.detokenize([token]) for token in ids]
