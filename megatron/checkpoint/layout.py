"""Names on disk.

    <save>/latest                                     text "global_step<N>"
    <save>/lock.json                                  who may write here (lock.py)
    <save>/abandoned.json                             checkpoints of a line that the run went back from (find.py)
    <save>/global_step<N>/manifest.json               written last: a folder without it is not a checkpoint
    <save>/global_step<N>/configs/                    the run's YAML files as they were, and resolved.yml
    <save>/global_step<N>/layer_II-model_TT-model_states.pt    weights of layer II, tensor-parallel rank TT
    <save>/global_step<N>/optim_layer_II-model_TT.pt  fp32 master weights and moments of the same parameters
    <save>/global_step<N>/mp_rank_RR_model_states.pt  counters and client state, RR over pipe x model
    <save>/global_step<N>/rng_rank_RRRRR.pt           random state of one global rank

Layer files, `mp_rank` files and the layer numbers (0 embedding, 2..L+1 blocks, L+3 final norm, L+4 head) are
GPT-NeoX's; the layer files are written for every layout, also without a pipeline. Folders whose name starts with
a dot are in the making or on their way out, and nobody reads them.
"""

from __future__ import annotations

import re
from pathlib import Path

FORMAT_VERSION = 1
LATEST = "latest"
MANIFEST = "manifest.json"
LOCK = "lock.json"
ABANDONED = "abandoned.json"
CONFIGS = "configs"
RESOLVED = "resolved.yml"  # in CONFIGS, next to copies of the user's files

_STEP = re.compile(r"^global_step(\d{1,18})$", re.ASCII)


def step_folder(step: int) -> str:
    return f"global_step{step}"


def step_of(folder: str) -> int | None:
    """The step in a folder's name; None when it is not a checkpoint's name."""
    match = _STEP.match(folder)
    return int(match.group(1)) if match else None


def run_name(root: Path) -> str:
    """What a run is called by its `save` folder: of one called `checkpoints` the name of the folder it is in."""
    path = root.absolute()
    return (path.parent.name if path.name == "checkpoints" else "") or path.name


def find_vocab_file(vocab_file: str | None, folder: Path) -> str | None:
    """`vocab_file`; when it is missing, the same in `tokenizer/` next to the checkpoint: the folder was moved."""
    if vocab_file is None or Path(vocab_file).exists():
        return vocab_file
    for there in (folder.parent / "tokenizer", folder.parent / "tokenizer" / Path(vocab_file).name):
        if there.name == Path(vocab_file).name and there.exists():
            return str(there)
    return vocab_file


def temporary_folder(step: int) -> str:
    """Where a checkpoint is written until it is complete."""
    return f".tmp-{step_folder(step)}"


def replaced_folder(step: int) -> str:
    """Where an older checkpoint of the same step waits while the new one takes its name."""
    return f".replaced-{step_folder(step)}"


def trash_folder(step: int) -> str:
    """A checkpoint that is being deleted."""
    return f".trash-{step_folder(step)}"


def weights_file(layer: int, tp_rank: int) -> str:
    return f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt"


def optimizer_file(layer: int, tp_rank: int) -> str:
    return f"optim_layer_{layer:02d}-model_{tp_rank:02d}.pt"


def state_file(model_rank: int) -> str:
    """`model_rank` counts over pipe x model: pp_rank * tp_size + tp_rank."""
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def rng_file(rank: int) -> str:
    return f"rng_rank_{rank:05d}.pt"


def split_name(name: str) -> tuple[int, str]:
    """Canonical name to (layer index, name inside the layer): `2.mlp.linear1.weight` -> (2, `mlp.linear1.weight`)."""
    layer, _, local = name.partition(".")
    return int(layer), local


def parameter_order(name: str) -> tuple[int, str]:
    """Sort key of canonical names: by layer, then by name. Every rank walks parameters in this order."""
    return split_name(name)
