"""What an export needs of a run's configuration, from the checkpoint itself and an optional YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import layout
from megatron.checkpoint.compare import ARCHITECTURE
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.neox_folder import is_neox_folder
from megatron.checkpoint.neox_reader import NeoXReader
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.tokenizer_files import open_tokenizer
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.load import load
from megatron.neox_arguments.schema_model import ModelConfig

TOKENIZER_KEYS = ("tokenizer_type", "vocab_file", "merge_file")
# Resolved to another form than they are written in, so they cannot be compared before they are derived.
_NOT_COMPARED = ("attention_config", "head_dim", "ffn_width", "num_kv_heads", "mup_width_mult")


@dataclass(frozen=True)
class Settings:
    """The resolved architecture and the tokenizer's keys."""

    model: ModelConfig
    tokenizer_type: str
    vocab_file: str | None
    merge_file: str | None


def open_source(
    checkpoint: str | Path, config_files: Sequence[str], *, vocab_is_hf: bool = False
) -> tuple[CheckpointReader, Settings]:
    """The reader and the settings of a checkpoint, ours or GPT-NeoX's: a `global_step<N>` folder or the latest in it.

    Raises `UserError` when there is none, or when the config does not fit it.
    """
    folder = find_checkpoint(checkpoint, key="--input_dir")
    if is_neox_folder(folder):
        return _open_neox(folder, config_files, vocab_is_hf)
    reader = CheckpointReader(folder)
    return reader, read_settings(reader, config_files)


def open_weights(
    checkpoint: str | Path, config_files: Sequence[str], *, key: str, checksums: bool = False
) -> CheckpointReader:
    """The reader alone: only a folder of GPT-NeoX needs a config. Errors name `key` as what gave the folder."""
    folder = find_checkpoint(checkpoint, key=key)
    return _open_neox(folder, config_files, False)[0] if is_neox_folder(folder) else CheckpointReader(folder, checksums)


def _open_neox(folder: Path, config_files: Sequence[str], vocab_is_hf: bool) -> tuple[CheckpointReader, Settings]:
    """GPT-NeoX keeps no resolved configuration, only a copy of its YAML files, and does not say the vocabulary."""
    kept = sorted(str(path) for path in (folder / layout.CONFIGS).glob("*.y*ml"))
    files = list(config_files) or kept
    if not files:
        raise UserError(f"{folder} was written by GPT-NeoX and keeps no config; give --config_file with the run's YAML")
    args = load(files)
    keys = {name: args.get(name) for name in TOKENIZER_KEYS}
    vocab_size = args.get("vocab_size") or open_tokenizer(**keys, vocab_is_hf=vocab_is_hf).vocab_size
    model = derive(args, Facts(vocab_size=vocab_size)).model
    return NeoXReader(folder, model, vocab_size), Settings(model, **keys)


def read_settings(reader: CheckpointReader, config_files: Sequence[str]) -> Settings:
    """The checkpoint's own config; tokenizer keys set in `config_files` win (files move).

    Raises `UserError` when a file sets an architecture key that the checkpoint contradicts.
    """
    saved = NeoXArgs.from_dict(reader.manifest.config, source=str(reader.folder / "manifest.json"))
    tokenizer = {key: saved.get(key) for key in TOKENIZER_KEYS}
    if config_files:
        given = load(list(config_files))
        wrong = [
            f"{key}: {given.get(key)!r} there, {saved.get(key)!r} in the checkpoint"
            for key in ARCHITECTURE
            if key not in _NOT_COMPARED and given.is_set(key) and given.get(key) != saved.get(key)
        ]
        if wrong:
            raise UserError(f"--config_file: {', '.join(config_files)} describes another model: {'; '.join(wrong)}")
        tokenizer |= {key: given.get(key) for key in TOKENIZER_KEYS if given.is_set(key)}
    return Settings(saved.model, **tokenizer)
