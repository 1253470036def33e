"""A Hugging Face model → a checkpoint for any TP; what every import does is in importing.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.checkpoint.neox_names import NEOX
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.hf.check import compare
from megatron.convert.importing import Imported, Incoming, check_output, import_from
from megatron.convert.outputs import Difference
from megatron.convert.published.folder import open_model
from megatron.convert.published.reader import keys_of, rules_of
from megatron.convert.settings import check_same_network
from megatron.errors import UserError
from megatron.neox_arguments import plugin_key
from megatron.neox_arguments.schema_model import ModelConfig


def import_model(
    model: str,
    output: str | Path,
    *,
    revision: str | None = None,
    tp: int = 1,
    pp: int = 1,
    iteration: int = 0,
    precision: str = "auto",
    check: bool = True,
    overwrite: bool = False,
    names: str = NEOX,
    families: tuple[str, ...] = (),
    config_files: Sequence[str] = (),
    cache_dir: str | None = None,
    plugins: Sequence[str] = (),
) -> Imported:
    """Convert a Hugging Face folder, or a model of the Hub, to a checkpoint.

    Args:
        model: folder or Hub id; `revision`: branch, tag or commit of the latter.
        output: the folder to make. One that holds other steps of the same model gets one more.
        overwrite: replace an existing step.
        families: the only ones that will do; () takes every family.
        config_files: YAML of the run that is to train it; their architecture must be the model's.
        cache_dir: the Hub's cache.
        plugins: modules and files that know the model's family; the config file names them.

    The other arguments are `import_from`'s. Raises `UserError` naming what cannot be expressed, divided or does not
    agree; then nothing is left behind.
    """
    output = Path(output).absolute()
    check_output(output, iteration, overwrite)
    source = open_model(model, revision, cache_dir)
    named = plugin_key.import_named(plugins, "--plugins")
    family, keys = keys_of(source)
    if named:
        keys = {plugin_key.KEY: named, **keys}
    if families and family not in families:
        raise UserError(
            f"--hf-model: {model} is of the family {family}, this command takes {', '.join(families)}; use "
            "huggingface/convert_hf_to_neox.py"
        )
    if config_files:
        check_same_network(keys, config_files)

    def same(reader: CheckpointReader, ours: ModelConfig, dtype: torch.dtype) -> Difference:
        return compare(reader, ours, source.path, dtype, rounded=True)

    incoming = Incoming(
        source=source,
        title=model + (f" at revision {revision}" if revision else ""),
        tool="convert_hf_to_neox.py",
        keys=keys,
        rules=lambda ours: rules_of(source, family, ours),
        check=same,
        model_tokens=source.model_tokens(),
    )
    return import_from(
        incoming, output, tp=tp, pp=pp, iteration=iteration, precision=precision, check=check, names=names
    )
