"""A Hugging Face model as we read it: config.json, tokenizer files, and tensors one at a time from any shard."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.convert.hf.safetensors_reader import read_header, read_tensor
from megatron.convert.parts.tensors import Stored
from megatron.errors import UserError
from megatron.tokenizer.hub import require_hub
from megatron.tokenizer.model_tokens import GENERATION, ids_in, read_object

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Tables that older versions of transformers saved with the weights, and that every model computes.
_BUFFERS = (".attention.bias", ".attention.masked_bias", ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class HuggingFaceFolder:
    """A model folder. `tensors` has every tensor by name; nothing is read until `tensor` asks for one.

    Raises `UserError` when the folder holds no model, or a shard of it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is not a Hugging Face folder: it has no config.json")
        self.config: dict[str, Any] = _read_json(path / "config.json")
        self.tensors: dict[str, Stored] = {}
        for file in self._files():
            self.tensors.update(_contents(path, file))

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored type. It is a part of the mapped file; only its own pages are in memory."""
        stored = self.tensors[name]
        path = self.path / stored.file
        return read_tensor(path, stored) if stored.file.endswith(".safetensors") else _load(path)[name]

    def model_tokens(self) -> dict[str, Any]:
        """The ids in config.json and generation_config.json, as they are there: the key `model_tokens`."""
        generation = self.path / GENERATION
        found = {"config": ids_in(self.config, str(self.path / "config.json"))}
        if generation.is_file():
            found["generation"] = ids_in(read_object(generation), str(generation))
        return found

    def copy_tokenizer(self, target: Path) -> None:
        """Copy the tokenizer's files, chat template included, into a new folder; none when there are none."""
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, target / name)
        if (self.path / GENERATION).is_file() and target.is_dir():
            shutil.copyfile(self.path / GENERATION, target / GENERATION)
        if (self.path / "chat_templates").is_dir() and target.is_dir():
            shutil.copytree(self.path / "chat_templates", target / "chat_templates")

    def _files(self) -> list[str]:
        for name in _WEIGHTS:
            if (self.path / f"{name}.index.json").is_file():
                return sorted(set(_read_json(self.path / f"{name}.index.json")["weight_map"].values()))
            if (self.path / name).is_file():
                return [name]
        raise UserError(f"{self.path} holds no weights ({' or '.join(_WEIGHTS)}, or their index)")


def open_model(model: str, revision: str | None, cache_dir: str | None = None) -> HuggingFaceFolder:
    """A folder, or a model of the Hub by its id (downloaded when it is not cached). Raises `UserError`."""
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise UserError(f"--revision: {path} is a folder, which has no revisions")
        return HuggingFaceFolder(path)
    if path.exists():
        raise UserError(f"--hf-model: {model} is a file; give the folder it is in")
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise UserError(f"--hf-model: folder {model} does not exist")
    return HuggingFaceFolder(_download(model, revision, cache_dir))


def _download(model: str, revision: str | None, cache_dir: str | None) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    what = f"--hf-model: cannot fetch {model}" + (f" at revision {revision}" if revision else "")
    plain = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
    try:
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
        require_hub()
        files = HfApi().list_repo_files(model, revision=revision)
        weights = "*.safetensors" if any(name.endswith(".safetensors") for name in files) else "pytorch_model*.bin"
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, allow_patterns=[*plain, weights]))
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise UserError(f"{what} from the Hub, and no folder has that name ({lines[0] if lines else error})") from error


def _contents(folder: Path, file: str) -> dict[str, Stored]:
    path = folder / file
    if not path.is_file():
        raise UserError(f"{path} is missing")
    if file.endswith(".safetensors"):
        return read_header(path, without=_BUFFERS)
    found = {name: tensor for name, tensor in _load(path).items() if not name.endswith(_BUFFERS)}
    return {name: Stored(file, tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError) as error:
        raise UserError(f"{path} cannot be read safely: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
