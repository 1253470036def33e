"""Write configs into a temporary folder and load them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "train_micro_batch_size_per_gpu": 4,
    "train_iters": 100,
}


def load_text(folder: Path, *texts: str, overrides: Sequence[str] = ()) -> NeoXArgs:
    """Load the given YAML texts as a.yml, b.yml, ... of `folder`."""
    paths = []
    for name, text in zip("abcdefgh", texts, strict=False):
        path = folder / f"{name}.yml"
        path.write_text(text, encoding="utf-8")
        paths.append(str(path))
    return NeoXArgs.from_files(paths, overrides)


def loaded(folder: Path, **changes: Any) -> NeoXArgs:
    """SMALL with some keys changed (None removes one), through a YAML file, not derived."""
    values = {name: value for name, value in (SMALL | changes).items() if value is not None}
    return load_text(folder, yaml.safe_dump(values, sort_keys=False))


def derived(folder: Path, *, facts: Facts | None = None, **changes: Any) -> NeoXArgs:
    """SMALL with some keys changed, loaded and derived."""
    return derive(loaded(folder, **changes), facts)
