"""TRL's side of the benchmark of post-training: steps of its DPO and GRPO trainers on a llama of transformers.

A tokenizer for transformers lies in `folder`. A step says how many of its seconds were rollout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train_step import HEADS, HIDDEN, LAYERS, VOCAB

WIDTH, LR = 1024, 1e-6  # of the feed-forward; small, so that completions stay what random weights write

Step = Callable[[], float]


def trl_keys(folder: Path, rows: int) -> dict[str, Any]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # else it prepares for several ranks
        os.environ.pop(name, None)
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": rows,
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "learning_rate": LR,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "dataloader_num_workers": 0,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def llama(length: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=length, **sizes, **heads, **ends))


def trl_dpo(folder: Path, pairs: Sequence[dict[str, str]], length: int) -> Step:
    """Pairs of texts of `length` tokens, their end included."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        llama(length),
        args=DPOConfig(
            **trl_keys(folder, len(pairs)), precompute_ref_log_probs=True, max_length=length, pad_to_multiple_of=None
        ),
        train_dataset=Dataset.from_list(list(pairs)),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()  # builds optimizer, scheduler and accelerator
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (2 * len(pairs), length), "not padded"

    def step() -> float:
        trl_step(trainer, dict(batch))
        return 0.0

    return step


def trl_grpo(folder: Path, prompts: Sequence[str], each: int, written: int, length: int) -> Step:
    """`each` completions of `written` tokens of every prompt."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    own = {"num_generations": each, "max_completion_length": written, "beta": 0.0, "temperature": 1.0, "top_k": 0}
    trainer = GRPOTrainer(
        llama(length),
        reward_funcs=lambda completions, **fields: [float(len(one)) for one in completions],
        args=GRPOConfig(**trl_keys(folder, len(prompts) * each), **own, loss_type="dapo"),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    write, took = trainer._generate_and_score_completions, [0.0]

    def timed(inputs: Any) -> Any:
        began = time.perf_counter()
        found = write(inputs)
        took[0] = time.perf_counter() - began
        return found

    trainer._generate_and_score_completions = timed

    def step() -> float:
        trl_step(trainer, [dict(one) for one in batch])
        return took[0]

    return step


def trl_step(trainer: Any, inputs: Any) -> None:
    trainer.training_step(trainer.model, inputs, None)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.model.zero_grad()
