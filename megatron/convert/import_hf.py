"""A Hugging Face model → a checkpoint for any TP, with a config file and the tokenizer: streamed, checked, all or none.

    <output>/global_step<N>/    the checkpoint, and `latest`
    <output>/tokenizer/         the tokenizer's files, chat template included
    <output>/config.yml         loads and dry-runs; trains further once it has data

Everything is written beside `output` and checked there; only then does it get its name. One parameter is in memory at a
time while writing; the comparison at the end loads the source once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.folder import write_latest
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.weights import save_weights
from megatron.convert import read_families
from megatron.convert.check import compare
from megatron.convert.export import PRECISIONS
from megatron.convert.family import FAMILIES, WORD_EMBEDDINGS, Constant, Rule
from megatron.convert.hf_folder import HuggingFaceFolder, open_model
from megatron.convert.read_config import read_config
from megatron.convert.ready_config import ready_config, tokenizer_keys
from megatron.errors import UserError
from megatron.log import get_logger, progress
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.sharding import ParamSpec, named_parameters, spec_of
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.load import load

logger = get_logger(__name__)

CONFIG, TOKENIZER = "config.yml", "tokenizer"
_KEYS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bfloat16"}
READER_MODULES = (read_families,)  # importing it is what fills the registry of readers


@dataclass(frozen=True)
class Imported:
    """What `import_model` made.

    Attributes:
        folder: the checkpoint, `<output>/global_step<N>`.
        config: the YAML file.
        largest_difference: of any logit in fp32; None when the check was switched off.
    """

    folder: Path
    config: Path
    largest_difference: float | None


def import_model(
    model: str,
    output: str | Path,
    *,
    revision: str | None = None,
    tp: int = 1,
    pp: int = 1,
    iteration: int = 0,
    precision: str = "auto",
    check: bool = True,
    overwrite: bool = False,
) -> Imported:
    """Convert a Hugging Face folder, or a model of the Hub, to a checkpoint.

    Args:
        model: folder or Hub id; `revision`: branch, tag or commit of the latter.
        output: the folder to make. One that holds other steps of the same model gets one more.
        tp: the tensor files are cut for so many ranks (any other number can load them too). pp: for the config file.
        iteration: the step in the checkpoint's name.
        precision: `auto` (as stored), `fp16`, `bf16` or `fp32`.
        check: compare logits with transformers and refuse to publish when they differ.
        overwrite: replace a step that is there.

    Raises `UserError` naming what cannot be expressed, divided or does not agree; then nothing is left behind.
    """
    output = Path(output).absolute()
    _check_output(output, iteration, overwrite)
    source = open_model(model, revision)
    family, keys = read_config(source.config, str(source.path / "config.json"))
    dtype = _dtype(source, precision)
    _remove_abandoned(output)
    draft = output.with_name(f".{output.name}.importing-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        source.copy_tokenizer(draft / TOKENIZER)
        vocab_size = _vocabulary(source)
        text = ready_config(
            {**keys, "vocab_size": vocab_size},
            source=model + (f" at revision {revision}" if revision else ""),
            folder=output,
            tokenizer=tokenizer_keys(draft / TOKENIZER, output / TOKENIZER),
            tp=tp,
            pp=pp,
            precision=_KEYS[dtype],
        )
        (draft / CONFIG).write_text(text, encoding="utf-8")
        args = derive(load([str(draft / CONFIG)]), Facts(vocab_size=vocab_size))
        rules = _rules(source, family, args)
        specs = _specs(args, vocab_size, tp)
        _check_shapes(source, rules, specs)
        tensors = ((spec, _read(source, rules[name], dtype)) for name, spec in _walk(specs))
        heads, config = Heads.of(args.model), args.to_dict()
        folder = save_weights(draft, iteration, tensors, tp_size=tp, heads=heads, config=config, dtype=dtype)
        difference = _checked(CheckpointReader(folder), args, source, dtype) if check else None
        _publish(draft, output, iteration)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Imported(output / layout.step_folder(iteration), output / CONFIG, difference)


def _check_output(output: Path, iteration: int, overwrite: bool) -> None:
    if iteration < 0:
        raise UserError(f"--iteration: {iteration} is negative")
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output-dir: {output} is not a folder")
    if (output / layout.step_folder(iteration)).exists():
        if not overwrite:
            raise UserError(f"--output-dir: {output} holds iteration {iteration} already; give --overwrite to replace")
    elif any(output.iterdir()) and not (output / CONFIG).is_file():
        raise UserError(f"--output-dir: {output} is not empty and not an earlier conversion; choose another folder")


def _remove_abandoned(output: Path) -> None:
    """Remove drafts of conversions into `output` whose process was killed."""
    for draft in output.parent.glob(f".{output.name}.importing-*"):
        number = draft.name.rpartition("-")[2]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(draft, ignore_errors=True)


def _dtype(source: HuggingFaceFolder, precision: str) -> torch.dtype:
    if precision != "auto":
        if precision not in PRECISIONS:
            raise UserError(f"--precision: {precision!r} is not known. Choices: auto, {', '.join(PRECISIONS)}")
        return PRECISIONS[precision]
    kinds = {stored.dtype for stored in source.tensors.values()}
    return kinds.pop() if len(kinds) == 1 and kinds <= _KEYS.keys() else torch.float32


def _vocabulary(source: HuggingFaceFolder) -> int:
    size = source.config.get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"{source.path / 'config.json'}: vocab_size is {size!r}, not a number")
    return size


def _rules(source: HuggingFaceFolder, family: str, args: NeoXArgs) -> dict[str, Rule]:
    """The family's table by our names, with the names that this source has. Its tensors are exactly those there."""
    entry = FAMILIES[family]
    if reasons := entry.unsupported(args.model):
        raise UserError(f"{source.path}: {entry.architecture} with {'; '.join(reasons)} cannot be converted")
    there = set(source.tensors)
    rules: dict[str, Rule] = {}
    wanted: set[str] = set()
    for rule in entry.table(args.model):
        if isinstance(rule, Constant):
            raise ValueError(f"{family}: a model read from {entry.architecture} leaves {rule.theirs} out")
        names = tuple(n if n in there or n not in entry.aliases else entry.aliases[n] for n in rule.theirs)
        rules[rule.ours] = Rule(rule.ours, names, rule.transform)
        wanted.update(names)
    extra = there - wanted
    if not args.model.no_weight_tying:
        extra = {name for name in extra if not _is_tied_head(source, name, rules[WORD_EMBEDDINGS].theirs[0])}
    missing = sorted(wanted - there)
    if missing or extra:
        parts = [
            f"{what}: {', '.join(list(names)[:8])}"
            for what, names in (("missing", missing), ("not known", sorted(extra)))
            if names
        ]
        raise UserError(f"{source.path} does not hold the tensors of its config.json; {'; '.join(parts)}")
    return rules


def _is_tied_head(source: HuggingFaceFolder, name: str, embedding: str) -> bool:
    """Whether a tensor is the output matrix of a tied model, written out although it is the embedding."""
    return name in ("lm_head.weight", "embed_out.weight") and torch.equal(source.tensor(name), source.tensor(embedding))


def _specs(args: NeoXArgs, vocab_size: int, tp: int) -> dict[str, ParamSpec]:
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


def _check_shapes(source: HuggingFaceFolder, rules: dict[str, Rule], specs: dict[str, ParamSpec]) -> None:
    if rules.keys() != specs.keys():
        raise ValueError(f"table and model disagree on {sorted(rules.keys() ^ specs.keys())}")
    for name, rule in rules.items():
        parts = rule.transform.export(torch.empty(specs[name].shape, device="meta"))
        for theirs, part in zip(rule.theirs, parts, strict=True):
            shape = source.tensors[theirs].shape
            if shape != tuple(part.shape):
                raise UserError(
                    f"{source.path}: {theirs} has shape {list(shape)}, config.json describes {list(part.shape)}"
                )


def _walk(specs: dict[str, ParamSpec]) -> Iterator[tuple[str, ParamSpec]]:
    yield from progress(list(specs.items()), what="importing", unit="parameters")


def _read(source: HuggingFaceFolder, rule: Rule, dtype: torch.dtype) -> Tensor:
    try:
        full = rule.transform.load([source.tensor(name) for name in rule.theirs])
    except ValueError as error:
        raise UserError(f"{source.path}: {', '.join(rule.theirs)}: {error}") from error
    if dtype == torch.float16 and full.dtype != dtype and full.isfinite().all() and not full.to(dtype).isfinite().all():
        raise UserError(f"{', '.join(rule.theirs)}: values beyond fp16's range; use --precision bf16 or fp32")
    return full


def _checked(reader: CheckpointReader, args: NeoXArgs, source: HuggingFaceFolder, dtype: torch.dtype) -> float:
    result = compare(reader, args.model, source.path, dtype, rounded=True)
    if not result.ok:
        raise UserError(
            f"the converted model computes something else: logits differ by {result.logits:.3g} (allowed "
            f"{result.allowed:.3g}), first after {result.first_drift}. Nothing was published."
        )
    return result.logits


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
    write_latest(output, iteration)
