"""A folder of PEFT → a checkpoint of adapters; see peft.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.base import base_entry
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tokenizer_identity import kept_identity
from megatron.checkpoint.weights import save_weights
from megatron.convert.families import choose_family
from megatron.convert.hf.peft import CONFIG, OF_REWARDS, PREFIX, SCORE, WEIGHTS, Place, places_of, shortest
from megatron.convert.parts.family import CLASSIFIER_WEIGHT, WORD_EMBEDDINGS
from megatron.convert.settings import open_source
from megatron.errors import UserError
from megatron.files import read_json
from megatron.layers.lora import Adapters
from megatron.model.head import REWARD
from megatron.model.specs import model_specs
from megatron.mpu.initial_weights import initial_value
from megatron.mpu.sharding import ParamSpec
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.neox_arguments.schema_post import ALL_LINEAR

# What changes what an adapter computes, and ours cannot express: its value where it changes nothing.
_NEUTRAL: dict[str, Any] = {
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "exclude_modules": None,
    "alora_invocation_tokens": None,
}


def import_adapters(
    adapter: str | Path, base: str | Path, output: str | Path, *, iteration: int = 0, overwrite: bool = False
) -> Path:
    """Write a folder of PEFT as a checkpoint of adapters for the checkpoint `base`: `<output>/global_step<iteration>`.

    Raises `UserError` naming what cannot be expressed or does not fit; then nothing is left behind.
    """
    config, tensors = _read(Path(adapter))
    output = Path(output)
    if (output / layout.step_folder(iteration)).exists() and not overwrite:
        raise UserError(f"--output-dir: {output} holds {layout.step_folder(iteration)} already; give --overwrite")
    found = find_checkpoint(base, key="--base")
    if found.by_neox or found.manifest.base is not None:
        other = "was written by GPT-NeoX" if found.by_neox else "holds adapters itself"
        raise UserError(f"--base: {found.path} {other}; convert it to Hugging Face and back first")
    reader, settings = open_source(found.path, (), key="--base")
    model, head = _rewarding(config, tensors.pop(CLASSIFIER_WEIGHT, None), settings.model, Path(adapter))
    fused = dict(_fused(tensors, list(places_of(choose_family(settings.model, None).table(settings.model))), reader))
    if tensors:
        raise UserError(f"{adapter}: no layer of {found.path} has a place for {sorted(tensors)[0]}")
    rank = max(len(one.a) for one in fused.values())
    growth = math.sqrt(rank / config["r"]) if config["use_rslora"] else rank / config["r"]
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    every = model_specs(model, vocab_size, Adapters(rank, 1.0, (ALL_LINEAR,), dora=config["use_dora"]))
    layers = [name.removesuffix(".lora.A") for name in every if name.endswith(".lora.A")]
    keys = {
        "lora_r": rank,
        "lora_alpha": config["lora_alpha"] * growth,
        "lora_dropout": config["lora_dropout"],
        "lora_target_modules": [ALL_LINEAR] if set(fused) == set(layers) else shortest(list(fused), layers),
        "use_rslora": config["use_rslora"],
        "use_dora": config["use_dora"],
        "lora_base": str(found.path.absolute()),
        **({} if model is settings.model else {"train_impl": "rm", "output_head": "reward"}),
    }
    return save_weights(
        output,
        iteration,
        _ours(fused, every, head),
        tp_size=1,
        heads=reader.heads,
        config={**reader.manifest.config, **keys},
        dtype=torch.float32,
        client=kept_identity(found),
        base=base_entry(found.path, vocab_size),
    )


def _rewarding(
    config: dict[str, Any], head: Tensor | None, base: ModelConfig, folder: Path
) -> tuple[ModelConfig, Tensor | None]:
    """What the adapters make of the base: the same, or a reward model with this head [1, h]. Raises `UserError`."""
    if config["task_type"] != OF_REWARDS:
        if head is not None:
            raise UserError(f"{folder / CONFIG}: there is a {CLASSIFIER_WEIGHT}, but task_type is not {OF_REWARDS}")
        return base, None
    if head is not None and head.shape != (1, base.hidden_size):
        raise UserError(
            f"{folder / WEIGHTS}: {CLASSIFIER_WEIGHT} is {list(head.shape)}; a reward model of --base has "
            f"[1, {base.hidden_size}]"
        )
    if base.output_head == "reward":
        return base, head
    if head is None:
        raise UserError(
            f"{folder / WEIGHTS}: a reward model ({OF_REWARDS}) without its head {CLASSIFIER_WEIGHT}, and --base is a "
            f"language model. Train it with modules_to_save: [{SCORE}], or name its reward model as --base"
        )
    return replace(base, output_head="reward"), head


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration, complete, and the tensors without the prefix of their names."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"--adapter: {folder} is no folder of PEFT: it needs {CONFIG} and {WEIGHTS}")
    given = read_json(folder / CONFIG, "It is damaged.")
    if given.get("peft_type") != "LORA":
        raise UserError(f"{folder / CONFIG}: peft_type {given.get('peft_type')!r} is not supported; LORA is")
    if given.get("task_type") == OF_REWARDS and set(given.get("modules_to_save") or ()) <= {SCORE, "classifier"}:
        given["modules_to_save"] = None  # PEFT names both, whichever the model has
    for key, neutral in _NEUTRAL.items():
        if given.get(key, neutral) not in (neutral, None):
            raise UserError(f"{folder / CONFIG}: {key}: {given[key]!r} is not supported; merge the adapter with PEFT")
    config = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}
    config |= {key: given[key] for key in config if given.get(key) is not None}
    config["task_type"] = given.get("task_type")
    tensors = {name.removeprefix(PREFIX): tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    return config, tensors


@dataclass(frozen=True)
class _Adapter:
    """Of one of our layers: A [r, in], B [out, r], and the magnitude [out] or None."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None


def _fused(
    tensors: dict[str, Tensor], places: Sequence[Place], reader: CheckpointReader
) -> Iterator[tuple[str, _Adapter]]:
    """The adapters by our layer; their tensors are taken out of `tensors`."""
    for place in places:
        pairs = [
            (tensors.pop(f"{module}.lora_A.weight", None), tensors.pop(f"{module}.lora_B.weight", None))
            for module in place.theirs
        ]
        magnitudes = [tensors.pop(f"{module}.lora_magnitude_vector", None) for module in place.theirs]
        present = [a for a, b in pairs if a is not None and b is not None]
        if not present:
            continue
        weight = reader.weight(f"{place.ours}.weight").float()
        parts = place.rows.export(weight)
        shared = len(present) == len(pairs) and all(torch.equal(a, present[0]) for a in present)
        total = len(present[0]) if shared else sum(map(len, present))
        rows, start = [], 0
        for (a, b), part in zip(pairs, parts, strict=True):
            row = torch.zeros(len(part), total)
            if a is not None and b is not None:
                if b.shape != (len(part), len(a)) or a.shape[1] != weight.shape[1]:
                    raise UserError(
                        f"the adapter of {place.theirs} has shapes {list(a.shape)}, {list(b.shape)}; {place.ours} is "
                        f"{list(weight.shape)} in {reader.folder}"
                    )
                row[:, start : start + len(a)] = b
                start += 0 if shared else len(a)
            rows.append(row)
        magnitude = None
        if any(one is not None for one in magnitudes):
            lengths = [torch.linalg.vector_norm(part, dim=1) for part in parts]
            magnitude = place.rows.load(
                [own if own is not None else length for own, length in zip(magnitudes, lengths, strict=True)]
            )
        yield place.ours, _Adapter(present[0] if shared else torch.cat(present), place.rows.load(rows), magnitude)


def _ours(
    fused: Mapping[str, _Adapter], specs: Mapping[str, ParamSpec], head: Tensor | None
) -> Iterator[tuple[ParamSpec, Tensor]]:
    """Our tensors, all of one rank: behind an adapter's own rows of A come new ones, of which B makes nothing."""
    for name, spec in specs.items():
        if head is not None and name.endswith(REWARD):
            yield spec, head
        layer, _, part = name.rpartition(".lora.")
        if layer not in fused:
            continue
        one = fused[layer]
        if part == "A":
            full = initial_value(spec, name, 0)
            full[: len(one.a)] = one.a
        elif part == "B":
            full = torch.zeros(spec.shape)
            full[:, : len(one.a)] = one.b
        else:
            assert one.magnitude is not None
            full = one.magnitude
        yield spec, full
