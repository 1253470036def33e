"""Config files and command-line overrides as a `NeoXArgs`."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.merge import Overrides, merge


def load(paths: Sequence[str], overrides: Overrides = (), conf_dir: str | None = None) -> NeoXArgs:
    """Merge config files, left to right, and overrides. The result still has to go through `derive`.

    Raises `UserError` naming file and line for everything that is wrong with files, keys or types of values.
    """
    return NeoXArgs.from_values(*merge(paths, overrides, conf_dir))
