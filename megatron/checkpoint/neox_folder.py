"""Checkpoint folders written by GPT-NeoX: how they are recognised, and which files they must have. Imports no torch.

| written with | weights | keys in them |
|---|---|---|
| pipe_parallel_size >= 1 | `layer_II-model_TT-model_states.pt` | `attention.dense.weight` |
| pipe_parallel_size 0 | `mp_rank_TT_model_states.pt`, entry `module` | `sequential.2.attention.dense.weight` |
| converters from Hugging Face | the same, entry `module` twice | `2.attention.dense.weight` |

Optimizer state, where it is stored: neox_optimizer.py.

They have no manifest. A checkpoint of Deepy that lost its manifest is recognised by files that only Deepy writes.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpoint import layout
from megatron.errors import UserError

_LAYER = re.compile(r"^layer_(\d+)-model_(\d+)-model_states\.pt$")
_WHOLE = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_ZERO3 = re.compile(r"^zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt$")
_OPTIMIZER = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_OURS = ("optim_layer_*.pt", "rng_rank_*.pt", f"{layout.CONFIGS}/{layout.RESOLVED}")

FRESH_MOMENTS = (
    "To go on without it, set no_load_optim: true (new moments, the steps count on) or finetune: true (a new run on "
    "these weights, from step 0)"
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
    """The files of a folder.

    Attributes:
        folder: where they are.
        layers: (layer, tensor-parallel rank) of each layer file; empty when whole models are in `mp_rank` files.
        tp_size: for how many tensor-parallel ranks the weights are cut.
        model_ranks: number of `mp_rank` files, one per pipeline stage and tensor-parallel rank.
        optimizer: name of each file of a partitioned optimizer, by (data-parallel rank, model rank).
    """

    folder: Path
    layers: frozenset[tuple[int, int]]
    tp_size: int
    model_ranks: int = 1
    optimizer: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> NeoXFiles:
        """Look into a folder. Raises `UserError` when its weights are in a form that is not read."""
        names = sorted(entry.name for entry in folder.iterdir())
        if any(map(_ZERO3.match, names)):
            raise UserError(
                f"{folder} was written by ZeRO stage 3, which scatters the weights over its optimizer files; gather "
                "them first with the zero_to_fp32.py next to it"
            )
        layers = frozenset((int(m[1]), int(m[2])) for m in map(_LAYER.match, names) if m)
        whole = {int(m[1]) for m in map(_WHOLE.match, names) if m}
        ranks = {rank for _, rank in layers} or whole
        optimizer = {(int(m[1]), int(m[2])): m[0] for m in map(_OPTIMIZER.match, names) if m}
        return cls(folder, layers, max(ranks) + 1, max(whole, default=0) + 1, optimizer)

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

    def check_optimizer(self, dp_size: int | None) -> int:
        """Every file of a partitioned optimizer exists, and no other. Returns for how many data-parallel ranks it is
        partitioned; 0: it is not. Raises `UserError`.

        `dp_size`: of the run that wrote the folder; None: not known.
        """
        if not self.optimizer:
            return 0
        found = max(rank for rank, _ in self.optimizer) + 1
        prefix = "bf16_" if any(name.startswith("bf16_") for name in self.optimizer.values()) else ""
        wanted = {
            (d, m): f"{prefix}zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt"
            for d in range(dp_size or found)
            for m in range(self.model_ranks)
        }
        missing = sorted(set(wanted.values()) - set(self.optimizer.values()))
        more = sorted(set(self.optimizer.values()) - set(wanted.values()))
        if missing or more:
            problem = f"missing {_some(missing)}" if missing else f"{_some(more)} cannot belong to it"
            raise UserError(
                f"{self.folder}: the optimizer state is not complete: {problem} (it was written by {dp_size or found} "
                f"data-parallel ranks with {self.model_ranks} model ranks each). Copy the folder again. {FRESH_MOMENTS}"
            )
        return dp_size or found


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
