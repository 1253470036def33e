"""Texts that join and leave while others are written are those of each prompt alone, at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.inference.sampling import Sampling
from megatron.inference.server.decoder import Decoder, NewToken, Order
from megatron.inference.stage import Stage
from tests.distributed import run_distributed
from tests.inference.models import (
    ALONE,
    EOD,
    GPT_LLAMA,
    GPT_NEOX,
    GREEDY,
    PROMPTS,
    SEQUENCE,
    Layout,
    Letters,
    complete,
    greedy_by_hand,
    make_checkpoint,
    stage_of,
)
from tests.model.recurrent import MAMBA, RWKV

pytestmark = pytest.mark.cpu

HALF = SEQUENCE // 2
LONG = {"rope_type": "longrope", "original_max_position_embeddings": HALF, "factor": 6.0}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
MODELS = {
    "neox": GPT_NEOX,
    "llama": GPT_LLAMA,
    "alibi": {**GPT_NEOX, "pos_emb": "alibi"},
    "window": {**GPT_NEOX, "attention_config": [[["local"], 2]], "sliding_window_width": 4},
    # A text has other angles from its ninth token on, each at another step.
    "longrope": {**GPT_LLAMA, "rope_scaling": LONG},
    "mamba": {**GPT_NEOX, **MAMBA},
    "rwkv": {**GPT_NEOX, **RWKV},
}
TOKENS = 9


def staggered(stage: Stage, sampling: Sampling = GREEDY) -> dict[int, list[NewToken]]:
    """The prompts join at steps 0, 0, 2 and 4; the second one is given up at step 3."""
    decoder = Decoder(stage, Letters().detokenize, (EOD,), EOD)
    orders = [Order(i, prompt, TOKENS, sampling, seed=7, stream=i, alternatives=3) for i, prompt in enumerate(PROMPTS)]
    joining, found = {0: orders[:2], 2: orders[2:3], 4: orders[3:]}, dict[int, list[NewToken]]()
    for step in range(4 + TOKENS):
        for token in decoder.step(joining.get(step, ()), [1] if step == 3 else []):
            found.setdefault(token.number, []).append(token)
    assert decoder.step((), ()) == []
    return found


@pytest.mark.parametrize("name", MODELS)
def test_texts_that_join_others_are_those_of_the_prompt_alone_by_definition(tmp_path: Path, name: str):
    stage = stage_of(make_checkpoint(tmp_path, MODELS[name]), MODELS[name])
    found = staggered(stage)
    for number, prompt in enumerate(PROMPTS):
        expected = greedy_by_hand(stage, prompt, 3 if number == 1 else TOKENS)
        tokens = [one.token for one in found[number]]
        assert tokens == expected + [EOD] * (tokens[-1:] == [EOD])
        assert [one.finish for one in found[number]][:-1] == [None] * (len(tokens) - 1)


def on_ranks(rank: int, world: int, folder: Path, keys: dict[str, Any], layout: Layout) -> Any:
    stage = stage_of(folder, keys, layout, rank)
    return staggered(stage), staggered(stage, Sampling(1.0, 20, 0.9)), stage.has_results


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2)], ids=lambda x: x.name)
def test_tokens_and_their_probabilities_are_the_same_at_every_layout(tmp_path: Path, layout: Layout):
    folder = make_checkpoint(tmp_path, GPT_NEOX, Layout(tp=2))
    stage = stage_of(folder, GPT_NEOX)
    alone = complete(stage, tokens=TOKENS, return_logprobs=True)
    drawn = complete(stage, tokens=TOKENS, sampling=Sampling(1.0, 20, 0.9), seed=7)
    results = run_distributed(on_ranks, layout.world, folder, GPT_NEOX, layout)
    assert sum(has_results for *_, has_results in results) == 1
    for greedy, sampled, has_results in results:
        for number in (0, 2, 3):
            tokens = [one.token for one in greedy[number] if one.finish != "end"]
            assert tokens == alone[number].tokens
            assert [one.token for one in sampled[number] if one.finish != "end"] == drawn[number].tokens
            if has_results:
                logprobs = torch.tensor([one.logprob for one in greedy[number]])
                torch.testing.assert_close(logprobs, torch.tensor(alone[number].logprobs), atol=1e-4, rtol=1e-4)
                for one in greedy[number]:  # greedy: the likeliest is the one that was taken
                    assert len(one.alternatives) == 3 and one.alternatives[0] == (one.token, one.logprob)


def test_ends_are_told_apart(tmp_path: Path):
    stage = stage_of(make_checkpoint(tmp_path, GPT_NEOX), GPT_NEOX, ALONE)
    free = greedy_by_hand(stage, PROMPTS[0], TOKENS)
    letters = Letters().detokenize(free)

    def finish(ends: tuple[int, ...] = (EOD,), **more: Any) -> tuple[str | None, int]:
        decoder = Decoder(stage, Letters().detokenize, ends, EOD)
        tokens, orders = list[NewToken](), [Order(0, PROMPTS[0], more.pop("tokens", TOKENS), GREEDY, **more)]
        while not tokens or tokens[-1].finish is None:
            tokens += decoder.step(orders, ())
            orders = []
        return tokens[-1].finish, len(tokens)

    assert finish() == ("length", TOKENS) and finish(tokens=2) == ("length", 2)
    assert finish(stop_strings=(letters[2:4],)) == ("stop", letters.index(letters[2:4]) + 2)
    assert finish(ends=(free[4],)) == ("end", free.index(free[4]) + 1)
    assert finish(tokens=10**6)[1] == stage.max_positions - len(PROMPTS[0])
