"""What an export needs of a run's configuration: from the checkpoint itself, YAML files, or a model it should equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.base import Opening, adapters_of, open_reader
from megatron.checkpoint.compare import ARCHITECTURE
from megatron.checkpoint.feed_forward_width import stored_width
from megatron.checkpoint.find import Checkpoint, find_checkpoint
from megatron.checkpoint.merged import merged
from megatron.checkpoint.neox_reader import NeoXReader
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.published.reader import open_published
from megatron.convert.tokenizer_files import open_tokenizer
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.open_width import fit_width, is_open
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.plugins import source_changes, sources
from megatron.tokenizer.model_tokens import inherit

logger = get_logger(__name__)

TOKENIZER_KEYS = ("tokenizer_type", "vocab_file", "merge_file")
MODEL_TOKENS = "model_tokens"
# Resolved to another form than they are written in, so they cannot be compared before they are derived.
_DERIVED = (
    "head_dim",
    "ffn_width",
    "num_kv_heads",
    "mup_width_mult",
    "mamba_d_state",
    "mamba_dt_rank",
    "dim_att",
    "head_size",
    "ffn_dim",
)
_NOT_COMPARED = ("attention_config", *_DERIVED)
# Longer, tuned further or with another head than the model whose tokenizer it uses: still the same network.
_MAY_DIFFER = ("output_head", "attention_config", "rope_scaling", "rotary_emb_base", "rotary_emb_base_local")


@dataclass(frozen=True)
class Settings:
    """The resolved architecture, the tokenizer's keys, and the ids that start and end texts (model_tokens.py)."""

    model: ModelConfig
    tokenizer_type: str
    vocab_file: str | None
    merge_file: str | None
    model_tokens: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reference:
    """A model that a checkpoint should be: its configuration where the checkpoint keeps none, and its tokenizer.

    `tokenizer`: keys of TOKENIZER_KEYS, {} when it has none; `where`: what to call it in messages; `model_tokens`: None
    when it has no config.json.
    """

    model: ModelConfig
    vocab_size: int
    tokenizer: Mapping[str, str]
    where: str
    model_tokens: Mapping[str, Any] | None = None


def open_source(
    checkpoint: str | Path,
    config_files: Sequence[str],
    *,
    vocab_is_hf: bool = False,
    iteration: int | None = None,
    reference: Reference | None = None,
    key: str = "--input_dir",
) -> tuple[CheckpointReader, Settings]:
    """The reader and the settings of a checkpoint, ours or GPT-NeoX's: a `global_step<N>` folder or one in it.

    `iteration`: which one in a save folder, None for the latest. Raises `UserError`, naming `key` as what gave the
    folder, when there is none, or when the config or the reference does not fit it.
    """
    found = find_checkpoint(checkpoint, iteration, key=key)
    if found.by_neox:
        return _open_neox(found, config_files, vocab_is_hf, reference)
    reader = _open(found, config_files)
    settings = read_settings(reader, config_files)
    return reader, settings if reference is None else _take_tokenizer(settings, reference, reader)


def open_weights(
    checkpoint: str | Path,
    config_files: Sequence[str],
    *,
    key: str,
    checksums: bool = False,
    iteration: int | None = None,
    reference: Reference | None = None,
) -> CheckpointReader:
    """The reader alone: only a folder of GPT-NeoX needs a config. Errors name `key` as what gave the folder."""
    found = find_checkpoint(checkpoint, iteration, key=key)
    if found.by_neox:
        return _open_neox(found, config_files, False, reference)[0]
    if checksums:
        found.check_files(checksums=True)
    return _open(found, config_files)


def _open(checkpoint: Checkpoint, config_files: Sequence[str]) -> CheckpointReader:
    """Of a checkpoint of Deepy, with adapters merged; `lora_base` of the files says where their base is now."""
    reader = CheckpointReader(checkpoint)
    if adapters_of(reader) is None:
        return reader
    moved = NeoXArgs.from_files(list(config_files)).get("lora_base") if config_files else None
    how = Opening(saved_config(reader).model, lora_base=moved, published=open_published)
    return merged(open_reader(checkpoint, how))


def _take_tokenizer(settings: Settings, reference: Reference, reader: CheckpointReader) -> Settings:
    """The settings with the reference's tokenizer. Raises `UserError` when it is another model."""
    wrong = [
        f"{key}: {getattr(reference.model, key)!r} there, {getattr(settings.model, key)!r} in the checkpoint"
        for key in ARCHITECTURE
        if key not in _MAY_DIFFER and getattr(reference.model, key) != getattr(settings.model, key)
    ]
    if wrong:
        raise UserError(f"{reference.where} is another model than {reader.folder}: {'; '.join(wrong)}")
    tokens = inherit(reference.model_tokens, settings.model_tokens)
    return replace(settings, **reference.tokenizer, model_tokens=tokens)


def _open_neox(
    checkpoint: Checkpoint, config_files: Sequence[str], vocab_is_hf: bool, reference: Reference | None
) -> tuple[CheckpointReader, Settings]:
    """GPT-NeoX stores no resolved configuration, only a copy of its YAML files, and no vocabulary size."""
    folder = checkpoint.path
    args = read_neox_config(checkpoint, config_files)
    if args is None and reference is not None:
        tokenizer = {key: reference.tokenizer.get(key) for key in TOKENIZER_KEYS}
        tokenizer["tokenizer_type"] = tokenizer["tokenizer_type"] or ""
        settings = Settings(reference.model, **tokenizer, model_tokens=reference.model_tokens)
        return NeoXReader(checkpoint, reference.model, reference.vocab_size), settings
    if args is None:
        raise UserError(f"{folder} was written by GPT-NeoX and keeps no config; give --config_file with the run's YAML")
    keys = {name: args.get(name) for name in TOKENIZER_KEYS}
    vocab_size = args.get("vocab_size") or open_tokenizer(**keys, vocab_is_hf=vocab_is_hf).vocab_size
    model = derive(args, Facts(vocab_size=vocab_size)).model
    tokenizer = {**keys, **(reference.tokenizer if reference else {})}
    tokens = inherit(reference.model_tokens if reference else None, args.get(MODEL_TOKENS))
    return NeoXReader(checkpoint, model, vocab_size), Settings(model, **tokenizer, model_tokens=tokens)


def read_neox_config(
    checkpoint: Checkpoint, config_files: Sequence[str], overrides: Sequence[str] = (), default: Sequence[str] = ()
) -> NeoXArgs | None:
    """The configuration of a GPT-NeoX checkpoint: of the user's files, else of those it keeps, else of `default`.

    None when there are none of them. Raises `UserError` when the kept ones name code or other files.
    """
    kept = sorted(str(path) for path in (checkpoint.path / layout.CONFIGS).glob("*.y*ml"))
    if kept and not config_files:
        args = NeoXArgs.from_files(kept, overrides, stored=True)
    elif files := list(config_files) or default:
        args = NeoXArgs.from_files(files, overrides)
    else:
        return None
    return fit_width(args, stored_width(checkpoint), str(checkpoint.path)) if is_open(args) else args


def saved_config(reader: CheckpointReader) -> NeoXArgs:
    """The configuration in the manifest of a checkpoint. Raises `UserError` for a plugin that only it names."""
    config = reader.manifest.config
    args = NeoXArgs.from_saved(config, source=str(reader.folder / layout.MANIFEST))
    before, now = config.get("plugin_sources"), sources(args.launcher.plugins)
    for message in source_changes(before, now) if before else ():
        logger.warning(f"changed since the checkpoint: {message}")
    return args


def read_settings(reader: CheckpointReader, config_files: Sequence[str]) -> Settings:
    """The checkpoint's own config; tokenizer keys set in `config_files` win (files move).

    Raises `UserError` when a file sets an architecture key that the checkpoint contradicts, or when the checkpoint
    names a plugin that the user has not.
    """
    given = NeoXArgs.from_files(list(config_files)) if config_files else None
    saved = saved_config(reader)
    tokenizer, tokens = {key: saved.get(key) for key in TOKENIZER_KEYS}, saved.get(MODEL_TOKENS)
    if given is not None:
        wrong = [
            f"{key}: {given.get(key)!r} there, {saved.get(key)!r} in the checkpoint"
            for key in ARCHITECTURE
            if key not in _NOT_COMPARED and given.is_set(key) and given.get(key) != saved.get(key)
        ]
        if wrong:
            raise UserError(f"--config_file: {', '.join(config_files)} describes another model: {'; '.join(wrong)}")
        tokenizer |= {key: given.get(key) for key in TOKENIZER_KEYS if given.is_set(key)}
        tokens = inherit(given.get(MODEL_TOKENS), tokens)
    tokenizer["vocab_file"] = layout.find_vocab_file(tokenizer["vocab_file"], reader.folder)
    return Settings(saved.model, **tokenizer, model_tokens=tokens)


def check_same_network(
    keys: Mapping[str, Any], config_files: Sequence[str], problem: str = "", *, stored: bool = False
) -> None:
    """Raise `UserError` when YAML files describe another network than flat `keys` with `vocab_size` do.

    `problem`: how the message begins; by default it names the files. `stored`: a checkpoint's folder holds them, and
    the user has not named them.
    """
    facts = Facts(vocab_size=keys["vocab_size"])
    begin = problem or f"--config: {', '.join(config_files)} describes another model"
    run = {"seq_length": keys["max_position_embeddings"], "train_micro_batch_size_per_gpu": 1}
    there = derive(NeoXArgs.from_saved({**run, **keys}), facts).model
    given = NeoXArgs.from_files(list(config_files), stored=stored)
    vocab_size = given.get("vocab_size")
    if vocab_size not in (None, keys["vocab_size"]):
        raise UserError(f"{begin}: vocab_size: {vocab_size} there, {keys['vocab_size']} in the model")
    here = derive(fit_width(given, there.ffn_width, "the model"), facts).model
    wrong = [
        f"{key}: {getattr(here, key)!r} there, {getattr(there, key)!r} in the model"
        for key in ARCHITECTURE
        if key != "attention_config" and getattr(here, key) != getattr(there, key)
    ]
    if wrong:
        raise UserError(f"{begin}: {'; '.join(wrong)}")
