"""Hugging Face models where a checkpoint is named: how they are recognised, where their files are. Imports no torch.

`load: ./folder` and `load: owner/name` (`owner/name@REVISION`: a branch, a tag or a commit) name one. What is in its
files is read by megatron/convert/hf, which is above this package.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import layout
from megatron.checksums import sample_crc32
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer.hub import require_hub

logger = get_logger(__name__)

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_PLAIN = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class PublishedModel:
    """`folder`: where its files are on this machine; `name`: what names it for good, the folder itself or
    `owner/name@COMMIT`."""

    folder: Path
    name: str


def is_hf_folder(path: Path) -> bool:
    """Whether a folder is a Hugging Face model (or an adapter, which is refused later) rather than a checkpoint."""
    return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))


def hub_id(named: str) -> tuple[str, str | None] | None:
    """(`owner/name`, revision) when a text names a model of the Hub and no file or folder; else None.

    What begins with a folder that is here is a path that is misspelt, and no business of the Hub's.
    """
    match = _ID.fullmatch(named)
    if match is None or layout.step_of(named.rpartition("/")[2]) is not None:
        return None
    if Path(named).exists() or Path(Path(named).parts[0]).exists():
        return None
    return match["repo"], match["revision"]


def names_published_model(named: str | Path) -> bool:
    """Whether `load` and its like name a Hugging Face model; asks no server."""
    folder = Path(named).expanduser()
    if not folder.is_dir():
        return hub_id(str(named)) is not None
    if not is_hf_folder(folder) or (folder / layout.MANIFEST).exists():
        return False
    return not any(layout.step_of(entry.name) is not None for entry in folder.glob("global_step*"))


def find_published(named: str | Path, key: str) -> PublishedModel | None:
    """The Hugging Face model that `key` names, downloaded when it is one of the Hub; None when it names none.

    Raises `UserError` when the Hub does not have it, or does not answer and there is no copy in its cache.
    """
    if not names_published_model(named):
        return None
    if (of_hub := hub_id(str(named))) is None:
        return PublishedModel(Path(named).expanduser(), str(Path(named).expanduser().absolute()))
    repo, revision = of_hub
    folder = fetch_model(repo, revision, key=key)
    return PublishedModel(folder, f"{repo}@{folder.name if folder.parent.name == 'snapshots' else revision or 'main'}")


def fetch_model(repo: str, revision: str | None, *, key: str, cache_dir: str | None = None) -> Path:
    """The folder with the files of a model of the Hub, downloaded as far as it is not cached. Raises `UserError`."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    where = {"repo_id": repo, "revision": revision, "cache_dir": cache_dir}
    try:
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(**where, local_files_only=True))
        require_hub()
        files = HfApi().list_repo_files(repo, revision=revision)
        weights = WEIGHTS[not any(name.endswith(".safetensors") for name in files)]
        return Path(snapshot_download(**where, allow_patterns=[*_PLAIN, weights]))
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        what = f"{key}: cannot fetch {repo}" + (f" at revision {revision}" if revision else "")
        raise UserError(f"{what} from the Hub, and no folder has that name ({lines[0] if lines else error})") from error


def published_identity(folder: Path) -> int | None:
    """CRC-32 over samples of config.json and of the weights: another model in the place of this one has another. None
    when `folder` is no model. Raises `OSError`."""
    if not is_hf_folder(folder):
        return None
    files = [folder / "config.json", *sorted(file for kind in WEIGHTS for file in folder.glob(kind))]
    found = [(file.name, file.stat().st_size, sample_crc32(file)) for file in files if file.is_file()]
    return zlib.crc32(repr(found).encode())
