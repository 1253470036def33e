"""The config file of an import: what of it is wrong is said by the flag or the source that it came from, and a folder
has one for all its steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.convert.settings import check_same_network
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.load import load

CONFIG = "config.yml"
_FLAGS = {"model_parallel_size": "--tp", "pipe_parallel_size": "--pp"}


def resolve(config: Path, vocab_size: int, source: Path) -> NeoXArgs:
    """The resolved keys of the draft's `config`, made from the model at `source`.

    Raises `UserError` naming the flag or `source`: the user has never seen the file, which will not be published.
    """
    try:
        return derive(load([str(config)]), Facts(vocab_size=vocab_size))
    except UserError as error:
        place = re.match(rf"\S*{re.escape(CONFIG)}:\d+: (\w+): ", str(error))
        if place is None:
            raise
        said_by = _FLAGS.get(place[1], f"{source}: what its config describes cannot be built: {place[1]}")
        raise UserError(f"{said_by}: {str(error)[place.end() :]}") from error


def check_same_model(keys: Mapping[str, Any], output: Path, iteration: int, key: str) -> None:
    """Raise `UserError` where `output` holds other steps, of another model than flat `keys` describe. `key`: its flag.

    They would be left with a config file and a tokenizer that are not theirs.
    """
    others = [path for path in output.glob("*") if layout.step_of(path.name) not in (None, iteration)]
    if others and (output / CONFIG).is_file():
        check_same_network(keys, [str(output / CONFIG)], f"{key}: {output} holds steps of another model")
