"""Adapters of a checkpoint ↔ a folder of PEFT (adapter_config.json, adapter_model.safetensors).

An adapter of a fused matrix is one of each of its parts in PEFT: A goes with all of them, B's rows are divided as those
of the weight. The other way round parts with an A each become one adapter of their ranks' sum, in which each part uses
rows of its own; layers with fewer rows get rows whose B is zero. The function stays the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.base import adapters_of, base_entry
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tokenizer_identity import kept_identity
from megatron.checkpoint.weights import save_weights
from megatron.convert.drafts import check_free, draft_of, publish
from megatron.convert.families import choose_family
from megatron.convert.hf.safetensors_writer import Planned, write_safetensors
from megatron.convert.parts.family import WORD_EMBEDDINGS, Constant, Rule
from megatron.convert.parts.transforms import Copy, PerGroup, PerHead, Split, SwapHalves, Transform, Transpose
from megatron.convert.precision import dtype_of
from megatron.convert.settings import open_source, read_settings
from megatron.errors import UserError
from megatron.files import read_json
from megatron.layers.lora import Adapters
from megatron.model.specs import model_specs
from megatron.mpu.initial_weights import initial_value
from megatron.mpu.sharding import ParamSpec
from megatron.neox_arguments.schema_post import ALL_LINEAR

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Those that move rows alone, so that they do the same to B and to a magnitude.
_OF_ROWS = (Copy, Split, PerHead, PerGroup, SwapHalves)
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


@dataclass(frozen=True)
class _Place:
    """A linear layer of ours, the modules that it is in theirs, and how rows of one become rows of the others."""

    ours: str
    theirs: tuple[str, ...]
    rows: Transform
    transposed: bool


def _places(table: Iterable[Rule | Constant]) -> Iterator[_Place]:
    for rule in table:
        if isinstance(rule, Constant) or not rule.ours.endswith(".weight"):
            continue
        transposed = isinstance(rule.transform, Transpose)  # their adapters are [out, in] all the same
        if transposed or isinstance(rule.transform, _OF_ROWS):
            modules = tuple(name.removesuffix(".weight") for name in rule.theirs)
            yield _Place(
                rule.ours.removesuffix(".weight"), modules, Copy() if transposed else rule.transform, transposed
            )


def export_adapters(
    checkpoint: str | Path,
    output: str | Path,
    *,
    base_model: str = "",
    config_files: Sequence[str] = (),
    iteration: int | None = None,
    averaged: bool = False,
    precision: str = "auto",
    architecture: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a checkpoint as a folder that `PeftModel.from_pretrained` opens. Its base is not needed.

    Args:
        base_model: folder or Hub id of the base's Hugging Face form, for the folder's configuration.

    The other arguments are those of `export`. Raises `UserError`; then nothing is left behind.
    """
    output = Path(output)
    check_free(output, CONFIG, overwrite)
    reader = CheckpointReader(find_checkpoint(checkpoint, iteration, key="--input_dir"))
    adapters = adapters_of(reader)
    if adapters is None:
        raise UserError(f"--input_dir: {reader.folder} has no adapters (lora_r); export it with convert_neox_to_hf.py")
    if averaged:
        reader.use_averages()
    model = read_settings(reader, config_files).model
    places = {place.ours: place for place in _places(choose_family(model, architecture).table(model))}
    layers = [name.removesuffix(".lora.A") for name in reader.names() if name.endswith(".lora.A")]
    if lost := [layer for layer in layers if layer not in places]:
        raise UserError(
            f"{reader.folder}: PEFT has no place for the adapter of {lost[0]} in this architecture; merge it instead, "
            "with convert_neox_to_hf.py"
        )
    chosen = [places[layer] for layer in layers]
    tensors = [item for place in chosen for item in _theirs(reader, place, adapters.dora)]
    dtype = dtype_of(precision, reader.dtype(f"{layers[0]}.lora.A"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": reader.manifest.config["lora_alpha"],
        "lora_dropout": adapters.dropout,
        "use_rslora": reader.manifest.config["use_rslora"],
        "use_dora": adapters.dora,
        "target_modules": _shortest(
            [name for place in chosen for name in place.theirs],
            [name for place in places.values() for name in place.theirs],
        ),
        "fan_in_fan_out": any(place.transposed for place in chosen),
        "bias": "none",
    }
    with draft_of(output, "--output_dir") as draft:
        plan = [Planned(name, tuple(tensor.shape)) for name, tensor in tensors]
        write_safetensors(draft, plan, (tensor for _, tensor in tensors), dtype, 2**62)
        (draft / "model.safetensors").rename(draft / WEIGHTS)
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        publish(draft, output)
    return output


def _theirs(reader: CheckpointReader, place: _Place, dora: bool) -> Iterator[tuple[str, Tensor]]:
    a = reader.weight(f"{place.ours}.lora.A")
    parts = {"lora_B.weight": place.rows.export(reader.weight(f"{place.ours}.lora.B"))}
    if dora:
        parts["lora_magnitude_vector"] = place.rows.export(reader.weight(f"{place.ours}.lora.magnitude"))
    for number, module in enumerate(place.theirs):
        yield f"{PREFIX}{module}.lora_A.weight", a
        for name, found in parts.items():
            yield f"{PREFIX}{module}.{name}", found[number]


def _shortest(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """The last parts of these names, if they are of no other; else the whole names."""
    last = {name.rpartition(".")[2] for name in chosen}
    exact = all(name in chosen for name in every if name.rpartition(".")[2] in last)
    return sorted(last) if exact else sorted(chosen)


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
    fused = dict(_fused(tensors, list(_places(choose_family(settings.model, None).table(settings.model))), reader))
    if tensors:
        raise UserError(f"{adapter}: no layer of {found.path} has a place for {sorted(tensors)[0]}")
    rank = max(len(one.a) for one in fused.values())
    growth = math.sqrt(rank / config["r"]) if config["use_rslora"] else rank / config["r"]
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    every = model_specs(settings.model, vocab_size, Adapters(rank, 1.0, (ALL_LINEAR,), dora=config["use_dora"]))
    layers = [name.removesuffix(".lora.A") for name in every if name.endswith(".lora.A")]
    keys = {
        "lora_r": rank,
        "lora_alpha": config["lora_alpha"] * growth,
        "lora_dropout": config["lora_dropout"],
        "lora_target_modules": [ALL_LINEAR] if set(fused) == set(layers) else _shortest(list(fused), layers),
        "use_rslora": config["use_rslora"],
        "use_dora": config["use_dora"],
        "lora_base": str(found.path.absolute()),
    }
    return save_weights(
        output,
        iteration,
        _ours(fused, every),
        tp_size=1,
        heads=reader.heads,
        config={**reader.manifest.config, **keys},
        dtype=torch.float32,
        client=kept_identity(found),
        base=base_entry(found.path, vocab_size),
    )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration, complete, and the tensors without the prefix of their names."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"--adapter: {folder} is no folder of PEFT: it needs {CONFIG} and {WEIGHTS}")
    given = read_json(folder / CONFIG, "It is damaged.")
    if given.get("peft_type") != "LORA":
        raise UserError(f"{folder / CONFIG}: peft_type {given.get('peft_type')!r} is not supported; LORA is")
    for key, neutral in _NEUTRAL.items():
        if given.get(key, neutral) not in (neutral, None):
            raise UserError(f"{folder / CONFIG}: {key}: {given[key]!r} is not supported; merge the adapter with PEFT")
    config = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}
    config |= {key: given[key] for key in config if given.get(key) is not None}
    tensors = {name.removeprefix(PREFIX): tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    return config, tensors


@dataclass(frozen=True)
class _Adapter:
    """Of one of our layers: A [r, in], B [out, r], and the magnitude [out] or None."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None


def _fused(
    tensors: dict[str, Tensor], places: Sequence[_Place], reader: CheckpointReader
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


def _ours(fused: Mapping[str, _Adapter], specs: Mapping[str, ParamSpec]) -> Iterator[tuple[ParamSpec, Tensor]]:
    """Our tensors, all of one rank: behind an adapter's own rows of A come new ones, of which B makes nothing."""
    for name, spec in specs.items():
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
