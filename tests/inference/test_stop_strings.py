"""Stop strings end a text wherever its tokens begin and end, and a text that is shown while it grows takes nothing
back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from megatron.errors import UserError
from megatron.inference.stop_strings import GrowingText, StopStrings
from megatron.neox_arguments.schema_data import TokenizerConfig
from megatron.tokenizer import Tokenizer, build_tokenizer
from tests.tokenizer.vocabularies import byte_level, write_json

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: a character may be several tokens, a token several characters."""
    file = write_json(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", byte_level())
    return build_tokenizer(TokenizerConfig(tokenizer_type="HFTokenizer", vocab_file=str(file)))


def by_definition(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> tuple[int, str]:
    """(tokens until one of the stop strings is complete, the text before it)."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.detokenize(tokens[:count])
        if found := [text.index(stop) for stop in stops if stop in text]:
            return count, text[: min(found)]
    return len(tokens), tokenizer.detokenize(tokens)


@pytest.mark.parametrize("stops", [("lo w",), ("🤖", "\n\n"), ("hello world hello",), ("中文", "x"), ()])
def test_a_text_ends_at_the_first_stop_string_and_is_shown_as_it_grows(tokenizer: Tokenizer, stops: tuple[str, ...]):
    draw = random.Random(len(stops))
    parts = ["hello", " world", " hello", "lo", " w", "l", "文", "中", "🤖", "\n", "x", "naïve ", *stops]
    ended = 0
    for _ in range(60):
        written = "".join(draw.choices(parts, k=12))
        # Encoded in pieces, so that tokens begin and end where a tokenizer alone would not have them do it.
        cut = sorted(draw.sample(range(len(written)), 3))
        pieces = [written[a:b] for a, b in zip([0, *cut], [*cut, None], strict=True)]
        tokens = [token for piece in pieces for token in tokenizer.tokenize(piece)]
        if draw.random() < 0.3:
            tokens = tokens[: draw.randrange(1, len(tokens))]  # in the middle of a character, perhaps
        count, expected = by_definition(tokenizer, tokens, stops)
        stop = StopStrings(stops, tokenizer.detokenize)
        shown: list[str] = []
        growing = GrowingText(stop, shown.append)
        for number in range(1, len(tokens) + 1):
            growing.grew(tokens[:number])
            if stop.ended(tokens[:number]):
                break
        assert number == count
        assert stop.cut(tokenizer.detokenize(tokens[:number])) == expected
        assert expected.startswith("".join(shown)) and all(shown)
        ended += count < len(tokens)
        if not stops and not expected.endswith("\ufffd"):
            assert "".join(shown) == expected
    assert (ended > 10) == bool(stops)


def test_what_may_become_a_stop_string_is_not_shown_yet(tokenizer: Tokenizer):
    shown: list[str] = []
    growing = GrowingText(StopStrings(["END"], tokenizer.detokenize), shown.append)
    tokens: list[int] = []
    seen = []
    for letter in "aEENEND":
        tokens += tokenizer.tokenize(letter)
        growing.grew(tokens)
        seen.append("".join(shown))
    assert seen == ["a", "a", "aE", "aE", "aEEN", "aEEN", "aEEN"]


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer):
    with pytest.raises(UserError, match="stop_strings: .*empty"):
        StopStrings(["a", ""], tokenizer.detokenize)
