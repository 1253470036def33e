"""Choosing the encoder that does a tokenizer's work: the fastest one that gives the very same ids.

An encoder is believed after it agreed with the tokenizer's own library on a fixed hostile set and on a sample of the
input, and it is asked again now and then while it runs. There is no list of files for which one is known to be right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from megatron.errors import DeepyError, UserError
from megatron.home import installs
from megatron.log import get_logger
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fast import FAST, FastEncoder, Own, Recipe
from megatron.tokenizer.probes import hostile_texts
from megatron.tokenizer.ragged import Ragged

AUTO, OWN = "auto", "tokenizers"
ORDER = ("gigatoken", "fastokens", "tiktoken")  # fastest first
CHOICES = (AUTO, OWN, *ORDER)
NOT_INSTALLED = f"it is not installed: {installs('fast-tokenizers')}"
SLOWER = 16  # measured on 20 MB of source code and manuals, a vocabulary of 8192
SAMPLE_CHARACTERS = 1 << 16  # of the input: the tokenizer's own library needs 30 ms for them
AUDIT_EVERY = 32 << 20  # characters between two texts that are encoded twice
AUDIT_CHARACTERS = 1 << 13

logger = get_logger(__name__)


class ProvenEncoder:
    """A fast encoder that passed the test, and is tested again on a piece of text every `AUDIT_EVERY` characters.

    Raises `DeepyError` when it gives other ids after all: what it made of earlier texts cannot be trusted either.
    """

    def __init__(self, encoder: FastEncoder, own: Own) -> None:
        """`own` gives the ids that are right."""
        self.name, self._encoder, self._own, self._characters = encoder.name, encoder, own, 0

    def encode(self, texts: Sequence[str]) -> Ragged:
        """The ids of each text."""
        self._characters += sum(map(len, texts))
        if self._characters >= AUDIT_EVERY:
            piece = [texts[self._characters % len(texts)][:AUDIT_CHARACTERS]]
            self._characters = 0
            if problem := difference(piece, self._own(piece), self._encoder.encode(piece, self._own)):
                raise DeepyError(f"{self.name} {problem}. Give --encoder {OWN}, and report the text.")
        return self._encoder.encode(texts, self._own)


def choose_encoder(tokenizer: Tokenizer, wanted: str = AUTO, sample: Iterable[str] = ()) -> str:
    """Let `tokenizer.encode_batch` use the fastest encoder that is exact for it; returns its name, which is logged.

    Args:
        wanted: `auto`, `tokenizers` (the tokenizer's own library, whatever it is called), or another of `CHOICES` to
            insist on.
        sample: texts of the input; the first 64 thousand characters are tried.

    Raises `UserError` when the one insisted on is not installed, cannot do this tokenizer, or gives other ids.
    """
    if wanted not in CHOICES:
        raise UserError(f"--encoder {wanted}: choose one of {', '.join(CHOICES)}")
    tokenizer.fast = None
    recipe = tokenizer.recipe() if wanted != OWN else None
    if recipe is None:
        if wanted not in (AUTO, OWN):
            raise UserError(f"--encoder {wanted} works from a tokenizer.json; {tokenizer.name} has none: leave it out")
        return OWN
    texts = [*hostile_texts(recipe.added, tokenizer.detokenize, tokenizer.vocab_size), *_first(sample)]
    right = tokenizer.encode_batch(texts)
    refused = {}
    for name in ORDER if wanted == AUTO else (wanted,):
        encoder, reason = _try(lambda name=name: FAST[name](recipe), texts, right, tokenizer.encode_exactly)  # type: ignore[misc]
        if encoder is not None:
            for other, why in refused.items():
                logger.info(f"encoder: not {other}: {why}")
            logger.info(f"encoder: {name}, which gave the ids of {OWN} on {len(texts)} hostile and sampled texts")
            tokenizer.fast = ProvenEncoder(encoder, tokenizer.encode_exactly)
            return name
        refused[name] = reason
        if wanted != AUTO:
            raise UserError(f"--encoder {name}: {reason}. Leave it out to use one that is exact.")
    for other, why in refused.items():
        logger.debug(f"encoder: not {other}: {why}")
    if wanted == AUTO:
        logger.info(f"encoder: {OWN}, some {SLOWER} times slower than the fast ones: {_cure(recipe, refused)}")
    return OWN


def _cure(recipe: Recipe, refused: Mapping[str, str]) -> str:
    """Why no fast encoder does this tokenizer, and what to do."""
    if all(why == NOT_INSTALLED for why in refused.values()):
        return NOT_INSTALLED
    normalizer = json.loads(recipe.tokenizer_json).get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        what = f"the tokenizer changes texts first (normalizer {normalizer.get('type')}), which loses some of them"
        return f"{what}. train_tokenizer.py --normalizer none makes one that does not"
    return next(f"{name}: {why}" for name, why in refused.items() if why != NOT_INSTALLED)


def difference(texts: Sequence[str], right: Ragged, given: Ragged) -> str | None:
    """What is wrong with the ids `given` for `texts`, None when they are `right`."""
    if len(given.lengths) != len(texts):
        return f"gave {len(given.lengths)} rows for {len(texts)} texts"
    if np.array_equal(right.lengths, given.lengths) and np.array_equal(right.ids, given.ids):
        return None
    for text, one, other in zip(texts, right.rows(), given.rows()):
        if not np.array_equal(one, other):
            return _show(text, one, other)
    return "gave more ids than it announced"


def _show(text: str, right: np.ndarray, given: np.ndarray) -> str:
    shared = min(len(right), len(given))
    differing = np.flatnonzero(right[:shared] != given[:shared])
    at = int(differing[0]) if len(differing) else shared
    shown = repr(text if len(text) <= 60 else text[:60] + "...")
    return f"gives {given[at : at + 4].tolist()} and not {right[at : at + 4].tolist()} as ids {at}.. of {shown}"


def _try(make: Callable[[], FastEncoder], texts: list[str], right: Ragged, own: Own) -> tuple[FastEncoder | None, str]:
    """An encoder that gives the right ids, or None and the reason."""
    try:
        encoder = make()
        problem = difference(texts, right, encoder.encode(texts, own))
    except ImportError:
        return None, NOT_INSTALLED
    except (KeyboardInterrupt, SystemExit):
        raise
    # A panic of a library in Rust arrives as an exception that is no Exception.
    except BaseException as error:
        reason = re.sub(r",? (at|Location:) \S+\.rs:[\d:]+", "", " ".join(str(error).split()))
        return None, reason[:200] or type(error).__name__
    return (encoder, "") if problem is None else (None, f"it {problem}")


def _first(sample: Iterable[str]) -> list[str]:
    texts, left = [], SAMPLE_CHARACTERS
    for text in sample:
        if left <= 0:
            break
        texts.append(text[: min(left, 1 << 13)])
        left -= len(texts[-1])
    return texts
