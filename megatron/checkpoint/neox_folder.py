"""Checkpoint folders written by GPT-NeoX: how they are recognised, and which files they must have. Imports no torch.

| written with | weights | keys in them |
|---|---|---|
| pipe_parallel_size >= 1 | `layer_II-model_TT-model_states.pt` | `attention.dense.weight` |
| pipe_parallel_size 0 | `mp_rank_TT_model_states.pt`, entry `module` | `sequential.2.attention.dense.weight` |
| converters from Hugging Face | the same, entry `module` twice | `2.attention.dense.weight` |

They have no manifest. A checkpoint of Deepy that lost its manifest is recognised by files that only Deepy writes.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import layout
from megatron.errors import UserError

_LAYER = re.compile(r"^layer_(\d+)-model_(\d+)-model_states\.pt$")
_WHOLE = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_ZERO3 = re.compile(r"^zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt$")
_OURS = ("optim_layer_*.pt", "rng_rank_*.pt", f"{layout.CONFIGS}/{layout.RESOLVED}")

WEIGHTS_ONLY = (
    "Only GPT-NeoX's weights are read, not its optimizer state, random states and order of samples, so its run cannot "
    "be resumed; set finetune: true to start at step 0 with these weights"
)


def is_neox_folder(folder: Path) -> bool:
    """Whether GPT-NeoX (or a converter to its format) wrote this folder. Opens one file at most."""
    state = folder / layout.state_file(0)
    if not state.is_file() or (folder / layout.MANIFEST).exists() or any(any(folder.glob(mark)) for mark in _OURS):
        return False
    return not _has_our_counters(state)


def _has_our_counters(state: Path) -> bool:
    """Whether a state file has the entries that only Deepy writes."""
    try:
        with zipfile.ZipFile(state) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as file:
                head = file.read(1 << 20)
    except Exception:  # nonsense makes zipfile raise nearly anything
        return False  # the format of torch before 1.6, or damaged: reading it will fail
    return b"scalars" in head and b"client" in head


@dataclass(frozen=True)
class NeoXFiles:
    """The weight files of a folder.

    Attributes:
        folder: where they are.
        layers: (layer, tensor-parallel rank) of each layer file; empty when whole models are in `mp_rank` files.
        tp_size: for how many tensor-parallel ranks the weights are cut.
    """

    folder: Path
    layers: frozenset[tuple[int, int]]
    tp_size: int

    @classmethod
    def of(cls, folder: Path) -> NeoXFiles:
        """Look into a folder. Raises `UserError` when its weights are in a form that is not read."""
        names = [entry.name for entry in folder.iterdir()]
        if any(map(_ZERO3.match, names)):
            raise UserError(
                f"{folder} was written by ZeRO stage 3, which scatters the weights over its optimizer files; gather "
                "them first with the zero_to_fp32.py next to it"
            )
        layers = frozenset((int(m[1]), int(m[2])) for m in map(_LAYER.match, names) if m)
        ranks = {rank for _, rank in layers} or {int(m[1]) for m in map(_WHOLE.match, names) if m}
        return cls(folder, layers, max(ranks) + 1)

    def name(self, layer: int, tp_rank: int) -> str:
        """The file that holds this rank's part of a layer."""
        return layout.weights_file(layer, tp_rank) if self.layers else layout.state_file(tp_rank)

    def check(self, layers: set[int], tp_size: int) -> None:
        """Every file of these layers exists, for all ranks. Raises `UserError`."""
        wanted = {self.name(layer, rank) for layer in layers for rank in range(max(tp_size, self.tp_size))}
        if missing := sorted(name for name in wanted if not (self.folder / name).is_file()):
            raise UserError(
                f"{self.folder} is not complete: missing {_some(missing)} (num_layers needs layers up to "
                f"{max(layers)}, and the folder was written for {max(tp_size, self.tp_size)} tensor-parallel ranks)"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
