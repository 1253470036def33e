"""Text is the same at every layout, with and without a cache, alone and in a batch, and as transformers writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.find import open_checkpoint
from megatron.inference.build import build_stage
from megatron.inference.generate import Completion, Limits, generate
from megatron.inference.live import live_stage
from megatron.inference.sampling import Sampling
from megatron.inference.stage import Stage
from megatron.inference.team import Control
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from tests.distributed import run_distributed
from tests.inference.models import (
    EOD,
    GPT_LLAMA,
    GPT_NEOX,
    LEARNED,
    PROMPTS,
    SEQUENCE,
    VOCAB,
    Layout,
    Letters,
    complete,
    greedy_by_hand,
    make_checkpoint,
    stage_of,
)
from tests.model.recurrent import AMLP, GMLP
from tests.training.tiny import build

pytestmark = pytest.mark.cpu

MODELS = {
    "neox": GPT_NEOX,
    "llama": GPT_LLAMA,  # tied: the embedding is on the first and on the last stage
    "mha": {**GPT_NEOX, "num_kv_heads": 4},  # as many as heads, or no class of transformers has it
    "learned": LEARNED,
    "alibi": {**GPT_NEOX, "pos_emb": "alibi"},
    "window": {**GPT_NEOX, "attention_config": [[["local"], 2]], "sliding_window_width": 4},
    "documents": {**GPT_NEOX, "intra_document_masking": True},
    # The embedding hands a table and the tokens to all layers, on three stages if there are.
    "rpe": {
        **GPT_NEOX,
        "pos_emb": "rpe",
        "rotary_pct": 1.0,
        "rpe_num_buckets": 6,
        "num_layers": 3,
        "value_embedding_interval": 1,
    },
}
DRAWN = Sampling(temperature=1.0, top_k=20, top_p=0.9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """`checkpoint(name)`: the folder of a model, written once, by two tensor-parallel ranks."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = make_checkpoint(tmp_path_factory.mktemp(name), MODELS[name], Layout(tp=2))
        return folders[name]

    return make


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_batch_of_different_lengths_is_each_prompt_alone_by_definition(checkpoint, name: str, use_cache: bool):
    stage = stage_of(checkpoint(name), MODELS[name])
    length = min(12, stage.max_positions - max(map(len, PROMPTS)))
    expected = [greedy_by_hand(stage, prompt, length) for prompt in PROMPTS]
    assert tokens_of(complete(stage, tokens=length, use_cache=use_cache)) == expected
    assert len({token for tokens in expected for token in tokens}) >= 6  # no model that says one thing


def test_logits_with_and_without_cache_agree_at_every_token(checkpoint):
    stage = stage_of(checkpoint("neox"), GPT_NEOX)
    cached, whole = (complete(stage, return_logits=True, use_cache=flag) for flag in (True, False))
    assert tokens_of(cached) == tokens_of(whole)
    for one, other in zip(cached, whole, strict=True):
        assert len(one.logits) == len(one.tokens) and one.logits[0].shape == (VOCAB,)
        torch.testing.assert_close(torch.stack(one.logits), torch.stack(other.logits), atol=2e-4, rtol=1e-5)


def generate_on_ranks(rank: int, world: int, folder: Path, keys: dict[str, Any], layout: Layout) -> list[Any]:
    stage = stage_of(folder, keys, layout, rank)
    sampled = complete(stage, sampling=DRAWN, seed=3)
    held = sum(p.numel() for layer in stage.layers for p in layer.parameters())
    return [tokens_of(complete(stage)), tokens_of(complete(stage, use_cache=False)), tokens_of(sampled), held]


@pytest.mark.parametrize("name", ["neox", "llama"])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(pp=2, tp=2), Layout(dp=2)], ids=lambda x: x.name)
def test_same_text_at_every_layout(checkpoint, name: str, layout: Layout):
    keys, folder = MODELS[name], checkpoint(name)
    stage = stage_of(folder, keys)
    greedy, sampled = tokens_of(complete(stage)), tokens_of(complete(stage, sampling=DRAWN, seed=3))
    assert greedy != sampled
    whole = sum(p.numel() for layer in stage.layers for p in layer.parameters())
    results = run_distributed(generate_on_ranks, layout.world, folder, keys, layout)
    for rank, (cached, uncached, drawn, held) in enumerate(results):
        assert (cached, uncached, drawn) == (greedy, greedy, sampled), f"rank {rank}"
        # Embedding and head are on different stages, so half is only about half; padding adds a little.
        assert held <= 1.25 * whole / (layout.tp * layout.pp), f"rank {rank} holds too much of the model"


@torch.no_grad()
def logits_of_two_batches(stage: Stage) -> Tensor | None:
    tokens = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    parts = [stage.run(part, positions, then=lambda out: out.logits()) for part in (tokens, tokens.flip(0))]
    return None if parts[0] is None else torch.cat(parts)


def stored_and_live_logits(rank: int, world: int, folder: Path, keys: dict[str, Any], layout: Layout) -> list[Any]:
    """Of the checkpoint, and of an engine with the same weights."""
    engine, args, _ = build(rank, keys, layout)
    with engine.evaluating():
        live = logits_of_two_batches(live_stage(engine, args, Control(engine.state), lambda: False))
    return [logits_of_two_batches(stage_of(folder, keys, layout, rank)), live]


@pytest.mark.parametrize("layout", [Layout(pp=3), Layout(pp=2, tp=2)], ids=lambda x: x.name)
def test_every_stage_knows_relative_positions(checkpoint, layout: Layout):
    keys, folder = MODELS["rpe"], checkpoint("rpe")
    expected = logits_of_two_batches(stage_of(folder, keys))
    *_, last = run_distributed(stored_and_live_logits, layout.world, folder, keys, layout)
    for found in last:
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("pipe_parallel_size", [0, 1])
def test_no_pipeline_is_spelled_0_or_1(checkpoint, pipe_parallel_size: int):
    keys = {**GPT_NEOX, "pipe_parallel_size": pipe_parallel_size, "sequence_parallel": True}
    args = derive(for_inference(NeoXArgs.from_saved(keys)), Facts(vocab_size=VOCAB, num_devices=1))
    stage = build_stage(args, ParallelState.single(), Letters(), open_checkpoint(checkpoint("neox")))
    assert tokens_of(complete(stage)) == tokens_of(complete(stage_of(checkpoint("neox"), GPT_NEOX)))


@pytest.mark.parametrize("name", ["mha", "llama"])
def test_equals_transformers_on_the_exported_model(checkpoint, tmp_path: Path, name: str):
    from transformers import AutoModelForCausalLM

    from megatron.convert.hf.export_hf import export

    exported = export(checkpoint(name), tmp_path / "hf", tokenizer=False)
    theirs = AutoModelForCausalLM.from_pretrained(exported.folder, dtype=torch.float32).eval()
    ours = tokens_of(complete(stage_of(checkpoint(name), MODELS[name])))
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        out = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=EOD, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert tokens == [token for token in out if token != EOD]


@pytest.mark.parametrize("seed", range(5))
def test_temperature_0_is_greedy_on_every_seed_whatever_top_k(checkpoint, seed: int):
    stage = stage_of(checkpoint("neox"), GPT_NEOX)
    greedy = tokens_of(complete(stage))
    assert tokens_of(complete(stage, sampling=Sampling(0.0, top_k=40), seed=seed)) == greedy


def test_sampling_repeats_with_its_seed_and_does_not_depend_on_the_batch(checkpoint):
    stage = stage_of(checkpoint("neox"), GPT_NEOX)
    first, again, other = (tokens_of(complete(stage, sampling=DRAWN, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    alone = complete(stage, PROMPTS[:1], sampling=DRAWN, seed=1)
    assert tokens_of(alone) == first[:1]


def test_stops_at_the_end_of_the_document(checkpoint):
    """The token after which greedy decoding would go on is declared the end: the text is cut before it."""
    stage = stage_of(checkpoint("neox"), GPT_NEOX)
    free = complete(stage, PROMPTS[:2])
    end = free[0].tokens[5]
    cut = free[0].tokens.index(end)
    stopped, other = generate(stage, PROMPTS[:2], Limits(12, EOD, (end,)), Sampling())
    assert stopped.tokens == free[0].tokens[:cut] and stopped.finished and stopped.message is None
    if end not in free[1].tokens:  # the other row goes on as if nothing had happened
        assert other.tokens == free[1].tokens and not other.finished


def test_stops_when_the_caller_says_so(checkpoint):
    stage = stage_of(checkpoint("neox"), GPT_NEOX)
    (done,) = generate(stage, PROMPTS[:1], Limits(12, EOD, (EOD,), ended=lambda tokens: len(tokens) == 3), Sampling())
    assert len(done.tokens) == 3 and done.finished


@pytest.mark.parametrize("name", ["learned", "neox"])
def test_stops_at_the_last_position_and_refuses_longer_prompts(checkpoint, name: str):
    stage = stage_of(checkpoint(name), MODELS[name])
    limit = MODELS[name]["max_position_embeddings"]
    assert stage.max_positions == limit
    prompts = [[1] * (limit - 2), [1, 2], [1] * limit, [1] * (limit - 1)]
    near, short, full, last = complete(stage, prompts, tokens=limit)
    assert len(near.tokens) == 2 and f"{limit} positions" in near.message and not near.finished
    assert short.tokens[:4] == greedy_by_hand(stage, [1, 2], 4)
    assert len(short.tokens) == limit - 2 or short.finished
    assert full.tokens == [] and f"has {limit} tokens, the model takes {limit}" in full.message
    assert len(last.tokens) == 1 or last.finished


def test_an_offset_table_has_fewer_positions(tmp_path: Path):
    keys = {**LEARNED, "opt_pos_emb_offset": 2, "max_position_embeddings": SEQUENCE + 2}
    stage = stage_of(make_checkpoint(tmp_path, keys), keys)
    assert stage.max_positions == SEQUENCE
    (done,) = complete(stage, [[1] * (SEQUENCE - 1)])
    assert len(done.tokens) == 1


@pytest.mark.parametrize("changes", [GMLP, AMLP], ids=["gmlp", "amlp"])
def test_gates_have_weights_for_seq_length_positions(tmp_path: Path, changes: dict[str, Any]):
    keys = {**GPT_NEOX, **changes, "num_kv_heads": None, "rotary_pct": 1.0}
    stage = stage_of(make_checkpoint(tmp_path, keys), keys)
    assert stage.max_positions == SEQUENCE < keys["max_position_embeddings"]
    near, long = complete(stage, [[1] * (SEQUENCE - 1), [1] * (SEQUENCE + 1)])
    assert len(near.tokens) == 1 or near.finished
    assert long.tokens == [] and f"has {SEQUENCE + 1} tokens, the model takes {SEQUENCE}" in long.message


def test_an_empty_prompt_starts_a_document_and_no_tokens_are_no_work(checkpoint):
    stage = stage_of(checkpoint("neox"), GPT_NEOX)
    assert tokens_of(complete(stage, [[]])) == [greedy_by_hand(stage, [EOD], 12)]
    assert tokens_of(complete(stage, [[1]], tokens=0)) == [[]]
    assert complete(stage, []) == []


def test_bfloat16_weights_and_hidden_states_over_stages(checkpoint):
    keys = {**GPT_NEOX, "precision": "bfloat16"}
    alone = stage_of(checkpoint("neox"), keys)
    assert {p.dtype for layer in alone.layers for p in layer.parameters()} == {torch.bfloat16}
    layout = Layout(pp=2)
    for cached, _, _, _ in run_distributed(generate_on_ranks, 2, checkpoint("neox"), keys, layout):
        assert cached == tokens_of(complete(alone))
