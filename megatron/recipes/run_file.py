"""The YAML of a new run: short, with the reason for every number."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts
from megatron.plan.memory import estimate
from megatron.plan.stages import stage_sizes
from megatron.recipes.scaling import CHOICES, WITHOUT_MUON, Training, parameter_groups
from megatron.recipes.shapes import Shape

if TYPE_CHECKING:
    from megatron.recipes.machine import Machine

_VALIDATIONS, _CHECKPOINTS = 20, 10  # in a run
_MOST_TOKENS = {True: 1 << 16, False: 1 << 13}  # of a micro-batch, on a GPU or not: more gains nothing


@dataclass(frozen=True)
class Places:
    """What the run reads and writes, as the YAML names it; `split`: of the documents."""

    data_path: str
    split: str
    tokenizer_type: str
    vocab_file: str
    save: str


def sections(shape: Shape, training: Training, machine: Machine, valid_samples: int) -> dict[str, dict[str, Any]]:
    """The keys of the run by title, but for its places. Micro-batch and recomputation are what the memory allows."""
    muon = machine.precision != "fp16" and "num_attention_heads" in shape.keys
    recipe = {
        "optimizer": _optimizer(CHOICES["optimizer"] if muon else WITHOUT_MUON, training),
        "parameter_groups": parameter_groups(shape.keys),
        "weight_decay": _short(training.decay),
        "gradient_clipping": CHOICES["gradient_clipping"],
        "warmup": f"{training.warmup} steps",
        "lr_decay_style": CHOICES["lr_decay_style"],
        "min_lr": CHOICES["min_lr"],
        **CHOICES["more"],
    }
    every = max(1, training.steps // _VALIDATIONS)
    evaluations = {
        "eval_interval": every,
        "eval_iters": min(max(1, valid_samples // training.batch), max(1, every // _VALIDATIONS))
        if valid_samples
        else 0,
        "checkpoint_factor": max(1, training.steps // _CHECKPOINTS),
        "log_interval": max(1, min(10, training.steps // 20)),
    }
    found = {
        "network": dict(shape.keys),
        "training": recipe,
        "length": {"train_batch_size": training.batch, "train_iters": training.steps},
        # In fp32 stage 1 would cut the matrices that Muon wants whole.
        "machine": {
            "precision": machine.precision,
            "zero_optimization": {"stage": 0 if machine.precision == "fp32" else 1},
        },
        "evaluation": evaluations,
    }
    found["machine"] |= _fit(found, machine, shape.vocab_size, training)
    if found["machine"]["zero_optimization"]["stage"] == 3:
        found["training"]["optimizer"] = _optimizer(WITHOUT_MUON, training)
    return {title: {key: value for key, value in keys.items() if value != []} for title, keys in found.items()}


def _optimizer(chosen: Mapping[str, Any], training: Training) -> dict[str, Any]:
    return {**chosen, "params": {"lr": _short(training.rate), **chosen["params"]}}


def _fit(found: Mapping[str, Mapping[str, Any]], machine: Machine, vocab: int, training: Training) -> dict[str, Any]:
    """The largest micro-batch that fits into memory, with recomputation only where one sample does not."""
    ranks = machine.ranks
    used = {"num_gpus": ranks} if machine.spare else {}
    most = min(training.batch // ranks, max(1, _MOST_TOKENS[machine.gpus] // training.context))
    keys = {key: value for section in found.values() for key, value in section.items()}
    tried: dict[str, Any] = {}
    for recompute in (False, True):
        micro = most
        while micro:
            tried = {"train_micro_batch_size_per_gpu": micro, "checkpoint_activations": recompute}
            if _memory({**keys, **tried}, ranks, vocab) <= machine.memory:
                return used | tried
            micro //= 2
    return used | tried | {"zero_optimization": {"stage": 3}}


def _memory(keys: Mapping[str, Any], ranks: int, vocab: int) -> float:
    """Bytes of a rank, without the tokenizer's own count of padding."""
    args = NeoXArgs.from_dict(dict(keys), facts=Facts(vocab_size=vocab, num_devices=ranks))
    stages, held = stage_sizes(args, vocab)
    blocks = [layer.index - 2 for layer in stages[0].layers if layer.is_block]
    return estimate(
        args, held=held[0], stage=0, blocks=blocks, padded_vocab_size=args.tokenizer.padded_vocab_size or vocab
    ).total


def _short(value: float) -> float:
    """With two significant digits."""
    return float(f"{value:.2g}")


def write_yaml(found: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str], head: str, places: Places) -> str:
    """The text of the file: a comment at the top, then the sections, each under its comment."""
    data = {
        **found["data"],
        "data_path": places.data_path,
        "split": places.split,
        "tokenizer_type": places.tokenizer_type,
        "vocab_file": places.vocab_file,
        "save": places.save,
        "load": places.save,
    }
    parts = [_commented(head)]
    for title, keys in {**found, "data": data}.items():
        parts.append(_commented(comments[title]) + "".join(map(_line, keys.items())))
    return "\n".join(parts)


def _commented(text: str) -> str:
    lines = (part for line in text.split("\n") for part in textwrap.wrap(line, 110, drop_whitespace=False) or [""])
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _line(item: tuple[str, Any]) -> str:
    """`key: value`, a value of one line however deep it is; numbers that YAML reads as such (1.0e-8, not 1e-8)."""
    key, value = item
    if isinstance(value, (dict, list)):
        return f"{key}: {yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9).strip()}\n"
    return yaml.safe_dump({key: value}, sort_keys=False, width=10**9)
