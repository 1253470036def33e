"""The text of every single token, such that together they are the text of the row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.view.spans import UNFINISHED
from megatron.tokenizer import Tokenizer

_LONGEST = 16  # tokens of a character; what does not end by then is no text


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each token `[n]`. A character whose bytes are spread over several tokens belongs to the last.

    Tokens are decoded after the ones before them, as some tokenizers drop a leading blank. Where decoding does more
    than joining, each token is decoded alone.
    """
    ids = [int(token) for token in tokens]
    texts: list[str] = []
    begin = read = 0  # what is decoded along, and what has been shown
    for end in range(1, len(ids) + 1):
        before, now = tokenizer.detokenize(ids[begin:read]), tokenizer.detokenize(ids[begin:end])
        unfinished = now.endswith(UNFINISHED) and end < len(ids) and end - read < _LONGEST
        if unfinished or len(now) <= len(before):
            texts.append("")
        else:
            texts.append(now[len(before) :])
            begin, read = read, end
    if "".join(texts) == tokenizer.detokenize(ids):
        return texts
    return [tokenizer.detokenize([token]) for token in ids]
