"""Adapters of a checkpoint → a folder of PEFT (adapter_config.json, adapter_model.safetensors); back: peft_import.py.

An adapter of a fused matrix is one of each of its parts in PEFT: A goes with all of them, B's rows are divided as those
of the weight. The other way round parts with an A each become one adapter of their ranks' sum, in which each part uses
rows of its own; layers with fewer rows get rows whose B is zero. The function stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.base import adapters_of
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.drafts import check_free, draft_of, publish
from megatron.convert.families import choose_family
from megatron.convert.hf.safetensors_writer import Planned, write_safetensors
from megatron.convert.parts.family import CLASSIFIER_WEIGHT, Constant, Rule
from megatron.convert.parts.transforms import Copy, PerGroup, PerHead, Split, SwapHalves, Transform, Transpose
from megatron.convert.precision import dtype_of
from megatron.convert.settings import read_settings
from megatron.errors import UserError
from megatron.model.head import REWARD

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
OF_REWARDS, SCORE = "SEQ_CLS", "score"  # PEFT's task of a reward model, and the module that its head is
# Those that move rows alone, so that they do the same to B and to a magnitude.
_OF_ROWS = (Copy, Split, PerHead, PerGroup, SwapHalves)


@dataclass(frozen=True)
class Place:
    """A linear layer of ours, the modules that it is in theirs, and how rows of one become rows of the others."""

    ours: str
    theirs: tuple[str, ...]
    rows: Transform
    transposed: bool


def places_of(table: Iterable[Rule | Constant]) -> Iterator[Place]:
    """Those of a model, by a family's table of its tensors."""
    for rule in table:
        if isinstance(rule, Constant) or not rule.ours.endswith(".weight"):
            continue
        transposed = isinstance(rule.transform, Transpose)  # their adapters are [out, in] all the same
        if transposed or isinstance(rule.transform, _OF_ROWS):
            modules = tuple(name.removesuffix(".weight") for name in rule.theirs)
            yield Place(
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
    places = {place.ours: place for place in places_of(choose_family(model, architecture).table(model))}
    layers = [name.removesuffix(".lora.A") for name in reader.names() if name.endswith(".lora.A")]
    if lost := [layer for layer in layers if layer not in places]:
        raise UserError(
            f"{reader.folder}: PEFT has no place for the adapter of {lost[0]} in this architecture; merge it instead, "
            "with convert_neox_to_hf.py"
        )
    chosen = [places[layer] for layer in layers]
    tensors = [item for place in chosen for item in _theirs(reader, place, adapters.dora)]
    rewards = model.output_head == "reward"
    if rewards:
        tensors.append((f"{PREFIX}{CLASSIFIER_WEIGHT}", _own_head(reader)))
    dtype = dtype_of(precision, reader.dtype(f"{layers[0]}.lora.A"))
    config = {
        "peft_type": "LORA",
        "task_type": OF_REWARDS if rewards else "CAUSAL_LM",
        "modules_to_save": [SCORE] if rewards else None,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": reader.manifest.config["lora_alpha"],
        "lora_dropout": adapters.dropout,
        "use_rslora": reader.manifest.config["use_rslora"],
        "use_dora": adapters.dora,
        "target_modules": shortest(
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


def _own_head(reader: CheckpointReader) -> Tensor:
    names = [name for name in reader.names() if name.endswith(REWARD)]
    if not names:
        raise UserError(
            f"{reader.folder}: the head of rewards ({REWARD}) is not in it but in its base; merge the adapters "
            "instead, with convert_neox_to_hf.py"
        )
    return reader.weight(names[0])


def _theirs(reader: CheckpointReader, place: Place, dora: bool) -> Iterator[tuple[str, Tensor]]:
    a = reader.weight(f"{place.ours}.lora.A")
    parts = {"lora_B.weight": place.rows.export(reader.weight(f"{place.ours}.lora.B"))}
    if dora:
        parts["lora_magnitude_vector"] = place.rows.export(reader.weight(f"{place.ours}.lora.magnitude"))
    for number, module in enumerate(place.theirs):
        yield f"{PREFIX}{module}.lora_A.weight", a
        for name, found in parts.items():
            yield f"{PREFIX}{module}.{name}", found[number]


def shortest(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """The last parts of these names, if they are of no other; else the whole names."""
    last = {name.rpartition(".")[2] for name in chosen}
    exact = all(name in chosen for name in every if name.rpartition(".")[2] in last)
    return sorted(last) if exact else sorted(chosen)
