"""The configuration that a checkpoint carries, with the plugins that it names."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.checkpoint import layout
from megatron.checkpoint.reader import CheckpointReader
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.plugins import is_file, source_changes, sources, stem

logger = get_logger(__name__)


def saved_config(reader: CheckpointReader, given: NeoXArgs | None = None) -> NeoXArgs:
    """The configuration in the manifest of a checkpoint. `given`: of the user's files, where plugins have moved.

    Raises `UserError` when a plugin is not found, or lies inside the checkpoint's folder and no file of the user names
    it: a checkpoint is data, and reading one may not run what came with it.
    """
    where = str(reader.folder / layout.MANIFEST)
    config = dict(reader.manifest.config)
    own = list(given.launcher.plugins) if given is not None else []
    known = {stem(name) for name in own}
    theirs = [name for name in config.get("plugins") or () if stem(name) not in known]
    root = Path(os.path.realpath(reader.folder.parent))
    for name in theirs:
        if is_file(name) and root in Path(os.path.realpath(name)).parents:
            raise UserError(
                f"{where}: the plugin {name} lies inside the checkpoint's folder and is not run because the checkpoint "
                f"says so; if you trust it, give --config_file with a config of yours that has plugins: [{name}]"
            )
    if own or theirs:
        config["plugins"] = [*own, *theirs]
    args = NeoXArgs.from_saved(config, source=where)
    before, now = config.get("plugin_sources"), sources(args.launcher.plugins)
    for message in source_changes(before, now) if before else ():
        logger.warning(f"changed since the checkpoint: {message}")
    return args
