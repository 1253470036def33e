"""What an export needs of a run's configuration, from the checkpoint itself and an optional YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.checkpoint.compare import ARCHITECTURE
from megatron.checkpoint.reader import CheckpointReader
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
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
