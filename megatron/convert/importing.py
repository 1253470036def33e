"""A model from elsewhere → a checkpoint for any TP, with a config file and the tokenizer: streamed, checked, all or
nothing.

    <output>/global_step<N>/    the checkpoint, and `latest`
    <output>/tokenizer/         the tokenizer's files, chat template included
    <output>/config.yml         loads and dry-runs; trains further once it has data

What every import does; import_hf.py and import_raw.py give their sources. Everything is written next to `output` and
checked there; only then is it renamed. One parameter is in memory at a time while writing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.folder import write_latest
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.neox_names import NEOX, TRANSFORMER_ENGINE
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tokenizer_identity import client_state
from megatron.checkpoint.weights import save_weights
from megatron.convert.drafts import draft_of
from megatron.convert.outputs import Difference
from megatron.convert.parts.family import Rule
from megatron.convert.parts.tensors import OneByOne, Source
from megatron.convert.precision import cast, dtype_of
from megatron.convert.ready_config import ready_config, tokenizer_keys
from megatron.convert.settings import check_same_network
from megatron.errors import UserError
from megatron.log import get_logger, progress
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.sharding import ParamSpec, named_parameters, spec_of
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.neox_arguments.yaml_files import CONFIG_DIR
from megatron.tokenizer.build import create_tokenizer

logger = get_logger(__name__)

CONFIG, TOKENIZER = "config.yml", "tokenizer"
_FLAGS = {"model_parallel_size": "--tp", "pipe_parallel_size": "--pp"}  # keys of the config file that flags give
_KEYS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Incoming:
    """A model to import.

    Attributes:
        source: its tensors.
        title: its name at its origin; `tool`: what reads it. Both for the head of the config file.
        keys: our flat keys of its architecture, `vocab_size` included.
        rules: the table of its tensors by our names, for the model that `keys` describe.
        check: whether the checkpoint computes what the source does, its weights rounded to a type.
        model_tokens: the ids that start and end its texts, as its own files have them (model_tokens.py).
    """

    source: Source
    title: str
    tool: str
    keys: dict[str, Any]
    rules: Callable[[ModelConfig], dict[str, Rule]]
    check: Callable[[CheckpointReader, ModelConfig, torch.dtype], Difference]
    model_tokens: dict[str, Any] | None = None


@dataclass(frozen=True)
class Imported:
    """What an import made.

    Attributes:
        folder: the checkpoint, `<output>/global_step<N>`.
        config: the YAML file.
        largest_difference: of any logit in fp32; None when the check was switched off.
    """

    folder: Path
    config: Path
    largest_difference: float | None


def check_output(output: Path, iteration: int, overwrite: bool, key: str = "--output-dir") -> None:
    """Refuse a folder that cannot take this step. `key`: the flag that names it."""
    if iteration < 0:
        raise UserError(f"--iteration: {iteration} is negative")
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"{key}: {output} is not a folder")
    if (output / layout.step_folder(iteration)).exists():
        if not overwrite:
            raise UserError(f"{key}: {output} holds iteration {iteration} already; give --overwrite to replace it")
    elif any(output.iterdir()) and not (output / CONFIG).is_file():
        raise UserError(f"{key}: {output} is not empty and not an earlier conversion; choose another folder")


def import_from(
    incoming: Incoming,
    output: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    iteration: int = 0,
    precision: str = "auto",
    check: bool = True,
    names: str = NEOX,
    key: str = "--output-dir",
) -> Imported:
    """Write the checkpoint, its config and its tokenizer; `output` has passed `check_output`.

    Args:
        tp: the tensor files are split for so many ranks (any number can load them). pp: for the config file.
        iteration: the step in the checkpoint's name.
        precision: `auto` (as stored), `fp16`, `bf16` or `fp32`.
        check: compare logits with the source and refuse to publish when they differ.
        names: of the parameters in the files, `neox` or `transformer_engine`; both load.
        key: the flag that names `output`.

    Raises `UserError` naming what cannot be expressed, divided or does not agree; then nothing is left behind.
    """
    source = incoming.source
    dtype = dtype_of(precision, _stored_type(source))
    _check_same_model(incoming.keys, output, iteration, key)
    with draft_of(output, key) as draft:
        source.copy_tokenizer(draft / TOKENIZER)
        text = ready_config(
            incoming.keys,
            source=incoming.title,
            tool=incoming.tool,
            tokenizer=tokenizer_keys(draft / TOKENIZER, f"{CONFIG_DIR}/{TOKENIZER}"),
            model_tokens=incoming.model_tokens,
            tp=tp,
            pp=pp,
            precision=_KEYS[dtype],
        )
        (draft / CONFIG).write_text(text, encoding="utf-8")
        vocab_size = incoming.keys["vocab_size"]
        args = _resolve(draft / CONFIG, vocab_size, source.path)
        if names == TRANSFORMER_ENGINE and args.model.gpt_j_residual and tp > 1:
            logger.warning(
                "GPT-NeoX with Transformer Engine sums twice over tensor-parallel ranks under gpt_j_residual; to train "
                "there, use --tp 1 or --no-transformer-engine. Deepy loads these files correctly"
            )
        rules = incoming.rules(args.model)
        specs = specs_of(args, vocab_size, tp)
        _check_shapes(source, rules, specs)
        folder = save_weights(
            draft,
            iteration,
            ((spec, _read(source, rules[name], dtype)) for name, spec in _walk(specs)),
            tp_size=tp,
            pp_size=max(pp, 1),
            heads=Heads.of(args.model),
            config=_config(args, draft, output),
            dtype=dtype,
            names=names,
            row_biases_once=args.model.gpt_j_residual,
            client=_identity(args),
        )
        difference = None
        if check:
            reader = CheckpointReader(open_checkpoint(folder))
            difference = incoming.check(reader, args.model, dtype).accept("the converted model")
        _publish(draft, output, iteration)
    return Imported(output / layout.step_folder(iteration), output / CONFIG, difference)


def _resolve(config: Path, vocab_size: int, source: Path) -> NeoXArgs:
    """The resolved keys of the draft's `config`, made from the model at `source`.

    Raises `UserError` naming the flag or `source`: the user cannot see the file, which is not published.
    """
    try:
        return NeoXArgs.from_ymls([str(config)], facts=Facts(vocab_size=vocab_size))
    except UserError as error:
        place = re.match(rf"\S*{re.escape(CONFIG)}:\d+: (\w+): ", str(error))
        if place is None:
            raise
        where = _FLAGS.get(place[1], f"{source}: what its config describes cannot be built: {place[1]}")
        raise UserError(f"{where}: {str(error)[place.end() :]}") from error


def _check_same_model(keys: Mapping[str, Any], output: Path, iteration: int, key: str) -> None:
    """Raise `UserError` where `output` holds other steps, of another model than flat `keys` describe. `key`: its flag.

    The config file and the tokenizer there would no longer fit them.
    """
    others = [path for path in output.glob("*") if layout.step_of(path.name) not in (None, iteration)]
    if others and (output / CONFIG).is_file():
        problem = f"{key}: {output} holds steps of another model"
        check_same_network(keys, [str(output / CONFIG)], problem, stored=True)


def _config(args: NeoXArgs, draft: Path, output: Path) -> dict[str, Any]:
    """The resolved configuration, with the paths of the finished folder in the place of the draft's."""
    here, there = os.path.abspath(draft), os.path.abspath(output)  # as CONFIG_DIR is read, without `..`
    return {
        key: there + value.removeprefix(here) if isinstance(value, str) and value.startswith(here) else value
        for key, value in args.to_dict().items()
    }


def _identity(args: NeoXArgs) -> dict[str, Any]:
    """The record of the tokenizer that came with the model, for the checkpoint; empty where none did."""
    keys = args.tokenizer
    if not keys.vocab_file:
        return {}
    try:
        return client_state(create_tokenizer(keys.tokenizer_type, keys.vocab_file, keys.merge_file))
    except UserError as error:
        logger.warning(f"the checkpoint does not record its tokenizer, which cannot be opened: {error}")
        return {}


def _stored_type(source: Source) -> torch.dtype:
    """The type of all tensors; fp32 when they differ."""
    kinds = {stored.dtype for stored in source.tensors.values()}
    return kinds.pop() if len(kinds) == 1 and kinds <= _KEYS.keys() else torch.float32


def specs_of(args: NeoXArgs, vocab_size: int, tp: int) -> dict[str, ParamSpec]:
    """Our declarations by canonical name, layer by layer. Nothing is allocated: the layers are built on `meta`.

    Raises `UserError` when a parameter cannot be divided by `tp`.
    """
    state = ParallelState(Topology({"pipe": 1, "data": 1, "model": tp}), 0, torch.device("meta"))
    padded = args.tokenizer.padded_vocab_size
    assert padded is not None  # the vocabulary was known
    specs: dict[str, ParamSpec] = {}
    for layer in gpt_layers(args.model, vocab_size=vocab_size, padded_vocab_size=padded, state=state):
        if layer.tied is None:
            for name, parameter in named_parameters(build_layer(layer, None, state)):
                specs.setdefault(name, spec_of(parameter))
    return specs


def _check_shapes(source: Source, rules: dict[str, Rule], specs: dict[str, ParamSpec]) -> None:
    if rules.keys() != specs.keys():
        raise ValueError(f"table and model disagree on {sorted(rules.keys() ^ specs.keys())}")
    for name, rule in rules.items():
        parts = rule.transform.export(torch.empty(specs[name].shape, device="meta"))
        for theirs, part in zip(rule.theirs, parts, strict=True):
            shape = source.tensors[theirs].shape
            if shape != tuple(part.shape):
                raise UserError(
                    f"{source.path}: {theirs} has shape {list(shape)}, its config describes {list(part.shape)}"
                )


def _walk(specs: dict[str, ParamSpec]) -> Iterator[tuple[str, ParamSpec]]:
    yield from progress(list(specs.items()), what="importing", unit="parameters")


def _read(source: Source, rule: Rule, dtype: torch.dtype) -> Tensor:
    try:
        full = rule.transform.load(OneByOne(source.tensor, rule.theirs))
    except ValueError as error:
        raise UserError(f"{source.path}: {', '.join(rule.theirs)}: {error}") from error
    return cast(full, dtype, ", ".join(rule.theirs))


def _publish(draft: Path, output: Path, iteration: int) -> None:
    """Give the draft its name; into a folder with other steps, its parts one by one, the checkpoint before `latest`."""
    if not output.exists() or not any(output.iterdir()):
        os.replace(draft, output)
        return
    for name in (TOKENIZER, CONFIG, layout.step_folder(iteration)):
        if not (draft / name).exists():
            continue
        older = output / f".older-{name}"
        shutil.rmtree(older, ignore_errors=True)
        if (output / name).is_dir():
            os.rename(output / name, older)
        os.replace(draft / name, output / name)
        shutil.rmtree(older, ignore_errors=True)
    write_latest(output, iteration, durable=False)
