"""A Hugging Face model as we read it: config.json, tokenizer files, and tensors one at a time from any shard."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.hugging_face import fetch_model
from megatron.convert.parts.family import CLASSIFIER
from megatron.convert.parts.tensors import Stored
from megatron.convert.published.safetensors_reader import read_header, read_tensor
from megatron.errors import UserError
from megatron.files import read_json, refuse_lfs_pointer
from megatron.tokenizer.model_tokens import GENERATION, ids_in

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WEIGHTS, _ENDS = ("model.safetensors", "pytorch_model.bin"), ("", ".index.json")
_ADAPTER = "adapter_config.json"
# Tables that older versions of transformers saved with the weights, and that every model computes.
_BUFFERS = (".attention.bias", ".attention.masked_bias", ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class HuggingFaceFolder:
    """A model folder. `tensors` has every tensor by name; nothing is read until `tensor` asks for one.

    Raises `UserError` when the folder holds no model, or a shard of it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if (path / _ADAPTER).is_file() and not any(
            (path / f"{name}{end}").is_file() for name in _WEIGHTS for end in _ENDS
        ):
            base = read_json(path / _ADAPTER).get("base_model_name_or_path")
            raise UserError(
                f"{path} holds an adapter (PEFT) of {base}, not a whole model; merge it into that model first: "
                "peft.AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(FOLDER)"
            )
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is not a Hugging Face folder: it has no config.json")
        self.config: dict[str, Any] = read_json(path / "config.json")
        self.tensors: dict[str, Stored] = {}
        for file in self._files():
            self.tensors.update(_contents(path, file))

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored type. It is a part of the mapped file; only its own pages are in memory."""
        stored = self.tensors[name]
        path = self.path / stored.file
        return read_tensor(path, stored) if stored.file.endswith(".safetensors") else _load(path)[name]

    @property
    def is_reward_model(self) -> bool:
        """Whether its class is one for sequences: numbers for a text in the place of logits for each token."""
        return any(name.endswith(CLASSIFIER) for name in self.config.get("architectures") or ())

    def model_tokens(self) -> dict[str, Any]:
        """The ids in config.json and generation_config.json, as they are there: the key `model_tokens`."""
        generation = self.path / GENERATION
        found = {"config": ids_in(self.config, str(self.path / "config.json"))}
        if generation.is_file():
            found["generation"] = ids_in(read_json(generation), str(generation))
        return found

    def copy_tokenizer(self, target: Path) -> None:
        """Copy the tokenizer's files, chat template included, into a new folder; none when there are none."""
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                refuse_lfs_pointer(self.path / name)
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, target / name)
        if (self.path / GENERATION).is_file() and target.is_dir():
            shutil.copyfile(self.path / GENERATION, target / GENERATION)
        if (self.path / "chat_templates").is_dir() and target.is_dir():
            shutil.copytree(self.path / "chat_templates", target / "chat_templates")

    def _files(self) -> list[str]:
        for name in _WEIGHTS:
            if (self.path / f"{name}.index.json").is_file():
                return _read_index(self.path / f"{name}.index.json")
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
    return HuggingFaceFolder(fetch_model(model, revision, key="--hf-model", cache_dir=cache_dir))


def _read_index(path: Path) -> list[str]:
    """The files of a model in several. Raises `UserError` for an index that is none, or leads out of its folder."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{path}: weight_map is missing, or does not map tensors to files")
    for tensor, name in files.items():
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UserError(
                f"{path}: weight_map: {tensor} is in {name!r}, outside of the folder; only files in it are read"
            )
    return sorted(set(files.values()))


def _contents(folder: Path, file: str) -> dict[str, Stored]:
    path = folder / file
    if not path.is_file():
        raise UserError(f"{path} is missing")
    refuse_lfs_pointer(path)
    if file.endswith(".safetensors"):
        return read_header(path, without=_BUFFERS)
    found = {name: tensor for name, tensor in _load(path).items() if not name.endswith(_BUFFERS)}
    return {name: Stored(file, tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}


def _load(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError) as error:
        raise UserError(f"{path} cannot be read safely: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise UserError(f"{path} does not hold tensors by name, as a model's file does")
    return found
