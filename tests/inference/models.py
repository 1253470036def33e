"""Small random models in checkpoints as a training run writes them, and what ranks make of them."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.save import save_checkpoint
from megatron.inference.build import build_stage
from megatron.inference.generate import Completion, Limits, generate
from megatron.inference.sampling import Draws, Sampling
from megatron.inference.stage import Stage
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.tokenizer import Tokenizer
from megatron.training.setup import build_engine, build_model
from tests.distributed import run_distributed
from tests.training.tiny import LLAMA, NEOX, SEQUENCE, VOCAB, Layout, process_of, randomize_vectors

ALPHABET = string.ascii_letters + string.digits + " .,\n"
EOD = len(ALPHABET)  # VOCAB - 1
ALONE, GREEDY = Layout(), Sampling()
# Large weights, so that a random model does not repeat one token; room for more positions than it was trained on.
SPREAD = {"init_method": "normal", "output_layer_init_method": "normal", "init_method_std": 0.3, "save": "run"}
SPREAD |= {"max_position_embeddings": 3 * SEQUENCE}
GPT_NEOX = {**NEOX, **SPREAD}
GPT_LLAMA = {**LLAMA, **SPREAD}
LEARNED = {**GPT_NEOX, "pos_emb": "learned", "rotary_pct": 1.0, "max_position_embeddings": SEQUENCE}
PROMPTS = [[5, 9, 33, 2, 17, 40, 11], [8], [3, 3, 60, 1], [21, 22]]


class Letters(Tokenizer):
    """66 characters and an end of document: small, and every id is text."""

    name = "letters"
    eod = EOD

    def tokenize(self, text: str) -> list[int]:
        return [ALPHABET.index(letter) for letter in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(ALPHABET[i] for i in ids if i < EOD)

    def id_map(self) -> dict[int, str]:
        return {**dict(enumerate(ALPHABET)), EOD: "<end>"}

    def files(self) -> dict[str, Path]:
        return {}


def make_checkpoint(root: Path, keys: dict[str, Any], layout: Layout = ALONE, vocab: int = VOCAB) -> Path:
    """`<root>/global_step1` of a randomly initialised model, written by the ranks of `layout`."""
    return run_distributed(save_random, layout.world, str(root), keys, layout, vocab)[0]


def save_random(rank: int, world: int, root: str, keys: dict[str, Any], layout: Layout, vocab: int) -> Path:
    args = derive(NeoXArgs.from_saved({**keys, **layout.keys()}), Facts(vocab_size=vocab, num_devices=layout.world))
    process = dataclasses.replace(process_of(rank, args, layout), tokenizer=SimpleNamespace(vocab_size=vocab))
    model = build_model(process, args.training.seed)
    randomize_vectors(model, process.state)
    return save_checkpoint(
        root,
        1,
        build_engine(process, model),
        process.state,
        heads=Heads.of(args.model),
        consumed=0,
        client={},
        config=args.to_dict(),
        save_optim=False,
        save_rng=False,
    )


def inference_args(keys: dict[str, Any], layout: Layout, vocab: int = VOCAB) -> NeoXArgs:
    """The configuration of a trained model as generate.py derives it."""
    args = for_inference(NeoXArgs.from_saved({**keys, **layout.keys()}))
    return derive(args, Facts(vocab_size=vocab, num_devices=layout.world))


def state_of(rank: int, layout: Layout) -> ParallelState:
    if layout.world == 1:
        return ParallelState.single()
    topology = Topology({"pipe": layout.pp, "data": layout.dp, "model": layout.tp})
    return ParallelState.build(topology, rank, torch.device("cpu"), ep_size=layout.ep)


def stage_of(folder: Path, keys: dict[str, Any], layout: Layout = ALONE, rank: int = 0) -> Stage:
    """A rank's stage of the checkpoint, at any layout."""
    return build_stage(inference_args(keys, layout), state_of(rank, layout), Letters(), open_checkpoint(folder))


def complete(
    stage: Stage,
    prompts: Sequence[list[int]] = PROMPTS,
    tokens: int = 12,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    **options: Any,
) -> list[Completion]:
    """Generate with draws numbered like the prompts."""
    draws = Draws(seed, range(len(prompts)))
    return generate(stage, prompts, Limits(tokens, EOD, (EOD,)), sampling, draws, **options)


def greedy_by_hand(stage: Stage, prompt: list[int], tokens: int) -> list[int]:
    """The definition: the whole text so far through the network, the best last token, again. One rank, no cache."""
    text = list(prompt)
    for _ in range(tokens):
        positions = torch.arange(len(text))[None]
        best = int(stage.run(torch.tensor([text]), positions).logits()[0, -1].argmax())
        if best == EOD:
            break
        text.append(best)
    return text[len(prompt) :]
