#!/usr/bin/env python
"""Steps of post-training, compared: DPO with a plain training step, DPO and GRPO with TRL's, as ratios of seconds.

The model is a llama of 6 layers, 384 wide, 6 heads, vocabulary 8192 untied, built alike for TRL by transformers; fp32,
AdamW with clipping at 1.0, no recomputation. Contenders take turns, so that changes of the machine's speed affect all;
ratios are medians over rounds of one contender's seconds divided by the other's in the same round, also in CPU
seconds, which other processes disturb less.

    python tools/bench/post_training.py                            # DPO and GRPO, on DeepSpeed
    python tools/bench/post_training.py --parts dpo --engine native --rounds 9
    python tools/bench/post_training.py --parts dpo --no-trl       # where TRL is not installed

dpo: 2 pairs of 512 tokens (--tokens), a quarter of them prompts; the log-probabilities of the reference are there
before. `normal` is a step of `train_impl: normal` on the same 4 rows with the same tokens trained, `dpo` our step,
`trl` that of DPOTrainer with precompute_ref_log_probs. A DPO step should take at most 1.05 of a normal one.

grpo: 4 completions of 64 tokens of each of 4 prompts of 32, one optimizer step on them, no reference, a reward that
costs nothing. `grpo` is our step, `trl` that of GRPOTrainer with the generation of transformers. The share of the
rollout is the seconds until completions have their rewards, divided by those of the step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from flags import positive
from train_step import HEADS, HIDDEN, LAYERS, VOCAB, alone, prepare, ratio
from trl_steps import LR, WIDTH, Step, trl_dpo, trl_grpo

from megatron.errors import UserError, run_cli
from megatron.flags import Parser

PAIRS = 2
PROMPTS, EACH, ASKED, WRITTEN = 4, 4, 32, 64
END = "<end>"


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: both)")
    parser.add_argument("--engine", choices=["deepspeed", "native"], default="deepspeed", help="(default deepspeed)")
    parser.add_argument("--rounds", type=positive, default=7, help="steps of each (default 7, after a warm-up)")
    parser.add_argument("--tokens", type=positive, default=512, help="of a text of dpo (default 512)")
    parser.add_argument("--threads", type=positive, default=2, help="of torch (default 2)")
    parser.add_argument("--no-trl", action="store_true", help="measure nothing but this library")
    options = parser.parse_args()
    if options.tokens < 4:
        parser.error("argument --tokens: a prompt and its answer need 4 or more")
    if not options.no_trl and importlib.util.find_spec("trl") is None:
        raise UserError("trl is not installed: pip install -r requirements/requirements-dev.txt, or give --no-trl")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    prepare(options.threads)
    with tempfile.TemporaryDirectory(prefix="deepy-bench-") as folder:
        for part in dict.fromkeys(options.parts):
            PARTS[part](Path(folder), options)


def dpo(folder: Path, options: argparse.Namespace) -> None:
    tokenizer = vocabulary(folder)
    steps = {impl: our_pairs(impl, options.engine, tokenizer, options.tokens) for impl in ("normal", "dpo")}
    if not options.no_trl:
        steps["trl"] = trl_dpo(folder, [pair_of_texts(pair, options.tokens) for pair in range(PAIRS)], options.tokens)
    print(f"\ndpo, {PAIRS} pairs of {options.tokens} tokens, {about(options)}")
    measured = Measured(steps, options.rounds)
    measured.compare("our DPO step / a normal step", "dpo", "normal")
    if not options.no_trl:
        measured.compare("TRL's DPO step / ours", "trl", "dpo")


def grpo(folder: Path, options: argparse.Namespace) -> None:
    steps = {"grpo": our_grpo(folder, options.engine, vocabulary(folder))}
    if not options.no_trl:
        steps["trl"] = trl_grpo(folder, prompt_texts(), EACH, WRITTEN, ASKED + WRITTEN)
    print(f"\ngrpo, {PROMPTS * EACH} completions of {WRITTEN} tokens, {about(options)}")
    measured = Measured(steps, options.rounds)
    for name in steps:
        print(f"  share of the rollout in a step of {name}: {ratio(measured.rollout[name], measured.seconds[name])}")
    if not options.no_trl:
        measured.compare("TRL's GRPO step / ours", "trl", "grpo")
        print(f"  TRL's rollout / ours: {ratio(measured.rollout['trl'], measured.rollout['grpo'])}")


PARTS = {"dpo": dpo, "grpo": grpo}


def about(options: argparse.Namespace) -> str:
    return f"fp32, {options.engine}, torch threads: {options.threads}, {options.rounds} rounds"


class Measured:
    """Seconds of the steps of each contender, by turns, after one that is not counted; and of their rollouts."""

    def __init__(self, steps: dict[str, Step], rounds: int) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in steps}
        self.cpu: dict[str, list[float]] = {name: [] for name in steps}
        self.rollout: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(-1, rounds):
            for name, step in steps.items():
                wall, work = time.perf_counter(), time.process_time()
                rollout = step()
                if number >= 0:
                    self.seconds[name].append(time.perf_counter() - wall)
                    self.cpu[name].append(time.process_time() - work)
                    self.rollout[name].append(rollout)
        for name in steps:
            print(f"  {name:8s} {median(self.seconds[name]):8.3f} s, {median(self.cpu[name]):8.3f} CPU s")

    def compare(self, what: str, one: str, other: str) -> None:
        wall, work = (ratio(took[one], took[other]) for took in (self.seconds, self.cpu))
        print(f"  {what}: {wall}, in CPU time {work}")


def vocabulary(folder: Path) -> Any:
    """Words w0, w1, ... and an end of text, as our tokenizer, and in the folder for transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from megatron.tokenizer.hugging_face import hf_tokenizer

    words = Tokenizer(models.WordLevel({END: 0, **{f"w{i}": i for i in range(1, VOCAB)}}, unk_token=END))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=END).save_pretrained(folder)
    return hf_tokenizer(str(folder / "tokenizer.json"), None)


def ids(count: int, seed: int) -> list[int]:
    """Random words."""
    import numpy as np

    return np.random.default_rng(seed).integers(1, VOCAB, count).tolist()


def text(words: Sequence[int]) -> str:
    return " ".join(f"w{word}" for word in words)


def pair_of_texts(pair: int, length: int) -> dict[str, str]:
    """As TRL reads it, without the end that TRL adds to answers."""
    prompt = length // 4
    answers = [" " + text(ids(length - 1 - prompt, PAIRS + 2 * pair + side)) for side in (0, 1)]
    return {"prompt": text(ids(prompt, pair)), "chosen": answers[0], "rejected": answers[1]}


def prompt_texts() -> list[str]:
    return [text(ids(ASKED, seed)) for seed in range(PROMPTS)]


def keys(engine: str, items: int, length: int) -> dict[str, Any]:
    """The network and its optimizer."""
    return {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "no_weight_tying": True,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "intermediate_size": WIDTH,
        "gated_width_rule": "final",
        "pos_emb": "rotary",
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        "seq_length": length,
        "max_position_embeddings": length,
        "make_vocab_size_divisible_by": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "weight_decay": 0.1,
        "gradient_clipping": 1.0,
        "precision": "fp32",
        "engine": engine,
        "train_iters": 1000,
        "train_batch_size": items,
        "train_micro_batch_size_per_gpu": items,
    }


def our_pairs(impl: str, engine: str, tokenizer: Any, length: int) -> Step:
    import numpy as np

    from megatron.data.batch import StepBatch
    from megatron.data.collate import CollateRules, allocate, complete, fill
    from megatron.data.sample import IGNORE, Sample
    from megatron.training.setup import build_engine, build_model, build_objective

    prompt = length // 4
    items = PAIRS if impl == "dpo" else 2 * PAIRS
    process = alone({**keys(engine, items, length), "train_impl": impl}, tokenizer)
    our_engine = build_engine(process, build_model(process, 0))
    rules = CollateRules(length, reads=build_objective(process.args).reads)
    arrays = allocate(rules, 1, 2 * PAIRS)
    for row in range(2 * PAIRS):
        tokens = np.array([*ids(prompt, row // 2), *ids(length + 1 - prompt, PAIRS + row)])
        labels = np.where(np.arange(length + 1) < prompt, IGNORE, tokens)
        reference = np.full(length + 1, -np.log(VOCAB))  # what random weights give, about
        fill(arrays, 0, row, Sample(tokens, labels=labels, extras={"reference": reference}), rules)
    complete(arrays)
    batch = StepBatch.from_arrays(arrays, step=0, consumed=0)
    return lambda: our_engine.train_batch(batch, LR) and 0.0


def our_grpo(folder: Path, engine: str, tokenizer: Any) -> Step:
    import json

    from megatron.inference.rewards import REWARDS
    from megatron.run.rollouts import Rollouts
    from megatron.training.setup import build_engine, build_model
    from megatron.training.trainer import Trainer

    REWARDS.register("words")(lambda rollout: float(len(rollout.completion)))
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompt_texts()))
    own = {"train_impl": "grpo", "reward": "words", "rollout_prompts": [str(file)], "kl_div_beta": 0.0}
    own |= {"rollouts_per_prompt": EACH, "rollout_tokens": WRITTEN}
    process = alone({**keys(engine, PROMPTS * EACH, ASKED + WRITTEN), **own}, tokenizer)
    rollouts = Rollouts(process, None)
    trainer = Trainer(process.args, process.state, rollouts.batches, [rollouts], lambda step: LR)
    trainer.engine = build_engine(process, build_model(process, 0))
    rollouts.start(trainer)
    batches = rollouts.batches()

    def step() -> float:
        began = time.perf_counter()
        batch = next(batches)
        rollout = time.perf_counter() - began
        trainer.engine.train_batch(batch, LR)
        return rollout

    return step


if __name__ == "__main__":
    run_cli(main)
