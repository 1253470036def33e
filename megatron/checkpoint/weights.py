"""Write a checkpoint that holds weights alone, from one process, for any tensor-parallel size.

For tools that bring weights from elsewhere; a training run saves through `save.save_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.manifest import BaseEntry, Manifest, ParameterEntry
from megatron.checkpoint.neox_layout import Heads, to_disk
from megatron.checkpoint.neox_names import NEOX, ROW_BIASES, stored_name
from megatron.checkpoint.state_file import write_state_file
from megatron.mpu.sharding import ParamSpec, shard


def save_weights(
    root: str | Path,
    step: int,
    tensors: Iterable[tuple[ParamSpec, Tensor]],
    *,
    tp_size: int,
    heads: Heads,
    config: dict[str, Any],
    dtype: torch.dtype,
    pp_size: int = 1,
    names: str = NEOX,
    row_biases_once: bool = False,
    client: dict[str, Any] | None = None,
    base: BaseEntry | None = None,
) -> Path:
    """Write `<root>/global_step<step>` and point `latest` at it. Returns the folder.

    Args:
        tensors: (declaration for `tp_size` ranks, full tensor in memory row order), layer by layer.
        config: the resolved configuration, `args.to_dict()`.
        dtype: of the weight files.
        pp_size: for how many pipeline stages there are state files, which GPT-NeoX wants.
        names: of the parameters in the files, `neox` or `transformer_engine`.
        row_biases_once: leave the biases of row-parallel projections to rank 0 and give the others zeros. In the
            parallel form (gpt_j_residual) GPT-NeoX adds every rank's copy; Deepy reads rank 0's in any case.

        client: what is known of the run, such as its tokenizer (tokenizer_identity.py).
        base: what has the weights that are not among the tensors (base.py).

    Raises `UserError` when a parameter cannot be divided by `tp_size`; then the folder is removed.
    """
    # Not durable: its source is still there, and the manifest's sizes tell a file that lost its end with the power.
    folder = CheckpointFolder(root, step, durable=False)
    folder.prepare()
    try:
        parameters: dict[str, ParameterEntry] = {}
        for layer, group in groupby(tensors, key=lambda item: layout.split_name(item[0].name)[0]):
            _write_layer(folder, layer, group, parameters, tp_size, heads, dtype, names, row_biases_once)
        for rank in range(pp_size * tp_size):
            write_state_file(folder, rank, config=config, tp_size=tp_size, client=client)
        return folder.publish(
            Manifest(
                step=step,
                consumed=0,
                layout={"tp": tp_size, "pp": 1, "dp": 1},
                heads={"num_attention_heads": heads.num_attention_heads, "num_kv_heads": heads.num_kv_heads},
                optimizer=False,
                parameters=parameters,
                files=folder.files,
                config=config,
                git=manifest.git_revision(),
                versions=manifest.versions(),
                created=manifest.now(),
                names=names,
                base=base,
            )
        )
    except BaseException:
        folder.discard()
        raise


def _write_layer(
    folder: CheckpointFolder,
    layer: int,
    group: Iterable[tuple[ParamSpec, Tensor]],
    parameters: dict[str, ParameterEntry],
    tp_size: int,
    heads: Heads,
    dtype: torch.dtype,
    names: str,
    row_biases_once: bool,
) -> None:
    with ExitStack() as stack:
        files = [stack.enter_context(folder.tensor_file(layout.weights_file(layer, r))) for r in range(tp_size)]
        for spec, full in group:
            for rank, file in enumerate(files):
                local = to_disk(shard(full, spec, rank, tp_size), spec, heads, rank, tp_size)
                if rank and row_biases_once and spec.name.endswith(ROW_BIASES):
                    local = torch.zeros_like(local)
                file.add(stored_name(layout.split_name(spec.name)[1], names), local.to(dtype))
            name = str(dtype).removeprefix("torch.")
            parameters[spec.name] = ParameterEntry(spec.shape, spec.split_dim, spec.blocks, spec.padded, name)
