"""A raw checkpoint as others may have it: its files as they are, its configuration without what is private."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.manifest import FileEntry
from megatron.checksums import file_crc32
from megatron.hub.private import share_value, share_yaml
from megatron.hub.push import local_files
from megatron.log import get_logger

logger = get_logger(__name__)

_TEXTS = (".yml", ".yaml", ".json")


def stage_raw(checkpoint: Checkpoint, folder: Path) -> Path:
    """Fill `folder`, named like the checkpoint's: links to its large files, and its texts without what is private.

    It is a complete checkpoint: the manifest has the checksums of the new texts. GPT-NeoX's state files hold a copy of
    the configuration that stays as it is, which is logged.
    """
    entries: dict[str, FileEntry] = dict(checkpoint.manifest.files)
    for name, path in local_files(checkpoint.path).items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name == layout.MANIFEST:
            continue
        if not name.startswith(f"{layout.CONFIGS}/"):
            target.symlink_to(path.resolve())
            continue
        text = share_yaml(path.read_text(encoding="utf-8", errors="replace")) if name.endswith(_TEXTS) else None
        if text is None:
            logger.warning(f"{path} is no config file that could be read: it is not published")
            entries.pop(name, None)
            continue
        target.write_text(text, encoding="utf-8")
        entries[name] = FileEntry(target.stat().st_size, file_crc32(target))
    if checkpoint.by_neox:
        logger.warning(
            f"{checkpoint.path}: GPT-NeoX's state files (mp_rank_*) hold paths of the run; they stay in them"
        )
        return folder
    config = share_value(checkpoint.manifest.config)
    replace(checkpoint.manifest, config=config, files=entries).write(folder)
    return folder
