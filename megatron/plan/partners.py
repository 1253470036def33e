"""Config files that are whole only with others: an architecture without a batch, paths without an architecture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.retired import ALIASES, RETIRED
from megatron.neox_arguments.yaml_files import read_config

ARCHITECTURE, BATCH, LENGTH, DATA = "architecture", "batch", "length", "data"
_GIVEN_BY = {
    "num_layers": ARCHITECTURE,
    "train_batch_size": BATCH,
    "batch_size_schedule": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "train_iters": LENGTH,
    "train_epochs": LENGTH,
    "train_tokens": LENGTH,
    "train_flops": LENGTH,
    "data_path": DATA,
    "train_data_paths": DATA,
    "pos_train_data_paths": DATA,
    "mixture": DATA,
}
_USUAL = ("train_config", "local_setup")  # GPT-NeoX's names; others with the same keys come after them


class ConfigFiles:
    """The config files of a folder, with the keys that each sets.

    Attributes:
        paths: the YAML files at any depth that set a key of a config, and those that cannot be read.
        others: YAML files of something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []
        self.others: list[Path] = []
        self._values: dict[Path, Mapping[str, Any]] = {}
        known = {*all_keys(), *ALIASES, *RETIRED}
        for path in sorted(path for kind in ("*.yml", "*.yaml") for path in folder.rglob(kind)):
            try:
                self._values[path] = {name: entry.value for name, entry in read_config(str(path)).items()}
            except UserError:  # whoever loads it reports it
                self._values[path] = {}
            values = self._values[path]
            (self.paths if not values or known & values.keys() else self.others).append(path)

    def whole(self, path: Path, most: int = 4) -> list[tuple[Path, ...]]:
        """`path` with the files that it needs, in the order of the command line; what is likeliest comes first, at
        most `most` ways. Only `path` itself when nothing fits, or nothing is missing."""
        missing = self._missing([path])
        if not missing or not self._values[path]:
            return [(path,)]
        found = [self._fill([path, first]) for first in self._partners([path], missing)[:most]]
        return found or [(path,)]

    def _fill(self, chosen: list[Path]) -> tuple[Path, ...]:
        while partners := self._partners(chosen, self._missing(chosen)):
            chosen = [*chosen, partners[0]]
        return tuple(sorted(chosen, key=lambda path: "num_layers" not in self._values[path]))

    def _missing(self, chosen: Sequence[Path]) -> set[str]:
        return set(_GIVEN_BY.values()) - {kind for path in chosen for kind in self._gives(path)}

    def _gives(self, path: Path) -> set[str]:
        return {_GIVEN_BY[name] for name in self._values[path] if name in _GIVEN_BY}

    def _partners(self, chosen: Sequence[Path], missing: set[str]) -> list[Path]:
        """Files that give something of `missing`, no second architecture, and contradict none of `chosen`: those that
        give most, then the nearest, then the usual names."""
        fitting = [
            path
            for path in self.paths
            if path not in chosen
            and (gives := self._gives(path)) & missing
            and (ARCHITECTURE in missing or ARCHITECTURE not in gives)
            and all(self._agree(path, other) for other in chosen)
        ]

        def rank(path: Path) -> tuple[int, int, bool, int, str]:
            steps = len(Path(os.path.relpath(path.parent, chosen[0].parent)).parts)
            usual = path.stem not in _USUAL
            return (-len(self._gives(path) & missing), steps, usual, len(self._values[path]), path.name)

        return sorted(fitting, key=rank)

    def _agree(self, one: Path, other: Path) -> bool:
        first, second = self._values[one], self._values[other]
        return all(first[name] == second[name] for name in first.keys() & second.keys())
