"""The state file `mp_rank_RR_model_states.pt`: counters, scalars of the optimizer, state of loop and callbacks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.tensor_file import object_bytes

# What GPT-NeoX compares with its own configuration.
_NEOX_ARGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
    "tokenizer_type",
    "model_parallel_size",
)


def write_state_file(folder: CheckpointFolder, model_rank: int, **content: Any) -> None:
    """Write the file of `model_rank` (pp_rank * tp_size + tp_rank); `content`: see `state_bytes`."""
    folder.write_bytes(layout.state_file(model_rank), state_bytes(folder.step, **content))


def state_bytes(
    step: int,
    *,
    config: dict[str, Any],
    tp_size: int,
    dp_size: int = 1,
    consumed: int = 0,
    scalars: dict[str, Any] | None = None,
    client: dict[str, Any] | None = None,
) -> bytes:
    """The bytes of a state file; without `client` it is that of no run.

    Args:
        config: the resolved configuration.
        consumed: samples.
        scalars: of the optimizer (`Engine.scalars`).
        client: state of the loop and its callbacks.
    """
    scalars = scalars or {}
    ours = {"iteration": step, "scalars": scalars, "client": client or {}}
    # The rest is what DeepSpeed and GPT-NeoX ask for.
    theirs = {
        "module": None,
        "global_steps": step,
        "global_samples": consumed,
        "skipped_steps": scalars.get("skipped_steps", 0),
        "dp_world_size": dp_size,
        "mp_world_size": tp_size,
        "optimizer": None,
        "lr_scheduler": None,
        "sparse_tensor_module_names": [],
        "args": {key: config[key] for key in _NEOX_ARGS if key in config},
    }
    return object_bytes({**ours, **theirs})


def check_readable(value: Any, where: str = "") -> None:
    """Raise `TypeError` for anything that `torch.load(weights_only=True)` would refuse."""
    if value is None or isinstance(value, (str, bool, int, float, Tensor)):
        if type(value) not in (type(None), str, bool, int, float) and not isinstance(value, Tensor):
            raise TypeError(f"checkpoint state {where} is a {type(value).__name__}; use a plain value")
        return
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_readable(item, f"{where}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            check_readable(item, f"{where}.{key}" if where else str(key))
    else:
        raise TypeError(f"checkpoint state {where} is a {type(value).__name__}; use plain values and tensors")
