"""Labels per token, and how a chat ends."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.chat.labelling import LabelRules, find_covered, label

pytestmark = pytest.mark.cpu


def offsets(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def test_tokens_that_hold_a_trained_character() -> None:
    tokens = offsets((0, 2), (2, 4), (4, 4), (4, 6), (6, 7), (6, 7), (7, 9))
    expected = {
        ((2, 4),): [0, 1, 0, 0, 0, 0, 0],
        ((3, 5),): [0, 1, 1, 1, 0, 0, 0],
        ((0, 1), (6, 7)): [1, 0, 0, 0, 1, 1, 0],
        ((0, 9),): [1] * 7,
        ((9, 12),): [0] * 7,
        (): [0] * 7,
    }
    for spans, wanted in expected.items():
        assert find_covered(tokens, spans).tolist() == [bool(one) for one in wanted], spans


def test_no_token() -> None:
    assert find_covered(offsets(), [(0, 1)]).tolist() == []
    tokens, labels = label("", np.array([], dtype=np.int64), offsets(), [], LabelRules(eos=9))
    assert (tokens.tolist(), labels.tolist()) == ([9], [-100])


AT = offsets((0, 1), (1, 2), (2, 3), (3, 4))


@pytest.mark.parametrize(
    ("text", "ids", "rules", "spans", "tokens", "labels"),
    [
        # eos follows a trained token: it is trained; the prompt is not
        ("abcd", [1, 2, 3, 4], LabelRules(9), [(1, 4)], [1, 2, 3, 4, 9], [-100, 2, 3, 4, 9]),
        # ... and after an untrained one it only ends the chat
        ("abcd", [1, 2, 3, 4], LabelRules(9), [(1, 3)], [1, 2, 3, 4, 9], [-100, 2, 3, -100, -100]),
        # never twice, also when blanks follow
        ("abc.", [1, 2, 3, 9], LabelRules(9), [(1, 4)], [1, 2, 3, 9], [-100, 2, 3, 9]),
        ("ab.\n", [1, 2, 9, 4], LabelRules(9), [(1, 3)], [1, 2, 9, 4], [-100, 2, 9, -100]),
        # an earlier eos is no end
        ("a.cd", [1, 9, 3, 4], LabelRules(9), [(2, 4)], [1, 9, 3, 4, 9], [-100, -100, 3, 4, 9]),
        ("abcd", [1, 2, 3, 4], LabelRules(None), [(1, 4)], [1, 2, 3, 4], [-100, 2, 3, 4]),
        ("abcd", [1, 2, 3, 4], LabelRules(9, leave_open=True), [(1, 4)], [1, 2, 3, 4], [-100, 2, 3, 4]),
        ("abcd", [1, 2, 3, 4], LabelRules(9, no_mask=True), [], [1, 2, 3, 4, 9], [1, 2, 3, 4, 9]),
        # for a reward model: one eos to read at, one as its target
        ("abcd", [1, 2, 3, 4], LabelRules(9, for_rm=True), [(1, 4)], [1, 2, 3, 4, 9, 9], [-100] * 5 + [9]),
        ("abc.", [1, 2, 3, 9], LabelRules(9, for_rm=True), [(1, 4)], [1, 2, 3, 9, 9], [-100] * 4 + [9]),
        ("ab.\n", [1, 2, 9, 4], LabelRules(9, for_rm=True), [], [1, 2, 9, 4, 9, 9], [-100] * 5 + [9]),
    ],
)
def test_the_end_of_a_chat(
    text: str,
    ids: list[int],
    rules: LabelRules,
    spans: list[tuple[int, int]],
    tokens: list[int],
    labels: list[int],
) -> None:
    found = label(text, np.array(ids), AT, spans, rules)
    assert [array.tolist() for array in found] == [tokens, labels]
