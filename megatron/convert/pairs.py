"""Opens whatever holds a model (our checkpoints, GPT-NeoX's, Hugging Face folders or ids), alone or two of a kind.

A GPT-NeoX folder keeps no configuration: in a pair it takes that of the other side when none is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron.checkpoint import layout
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.hugging_face import is_hf_folder
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.parts.family import WORD_EMBEDDINGS
from megatron.convert.published.folder import HuggingFaceFolder, open_model
from megatron.convert.published.reader import HuggingFaceReader, keys_of, model_of
from megatron.convert.ready_config import tokenizer_keys
from megatron.convert.settings import Reference, open_weights, saved_config
from megatron.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a model is: a folder, or an id of the Hub.

    `iteration`: which checkpoint of a save folder, None for the latest (one checkpoint's own folder has no choice);
    `revision`: of a model of the Hub (a folder has none); `key`: the flag that named it.
    """

    path: str
    key: str
    iteration: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        folder = Path(self.path).expanduser()
        if layout.step_of(folder.name) is not None:
            object.__setattr__(self, "iteration", None)
        if folder.is_dir():
            object.__setattr__(self, "revision", None)

    @property
    def is_hf(self) -> bool:
        """Whether this is a Hugging Face model: a folder with config.json, or an id that no folder has."""
        path = Path(self.path).expanduser()
        return is_hf_folder(path) if path.exists() else self.path.count("/") == 1 and self.path[0] not in "./~"

    @property
    def needs_config(self) -> bool:
        """Whether GPT-NeoX wrote it, so that its configuration must be given."""
        return not self.is_hf and find_checkpoint(self.path, self.iteration, key=self.key).by_neox

    def folder(self) -> HuggingFaceFolder:
        try:
            return open_model(self.path, self.revision)
        except UserError as error:
            raise UserError(str(error).replace("--hf-model", self.key, 1)) from error


def reference_of(source: HuggingFaceFolder) -> Reference:
    """The network and the tokenizer of a Hugging Face folder, for a checkpoint that should be the same model."""
    _, keys = keys_of(source)
    tokenizer = tokenizer_keys(source.path, str(source.path))
    return Reference(model_of(keys), keys["vocab_size"], tokenizer, str(source.path), source.model_tokens())


def open_parameters(
    place: Place, config_files: Sequence[str] = (), *, checksums: bool = False, reference: Reference | None = None
) -> CheckpointReader:
    """The parameters of any model by our canonical names."""
    if place.is_hf:
        return HuggingFaceReader(place.folder())
    return open_weights(
        place.path,
        config_files,
        key=place.key,
        checksums=checksums,
        iteration=place.iteration,
        reference=reference,
    )


def open_two(
    one: Place, other: Place, config_files: Sequence[str] = (), *, checksums: bool = False
) -> tuple[CheckpointReader, CheckpointReader]:
    """Both by our canonical names; a folder without a configuration takes the other's."""

    def open_side(place: Place, reference: Reference | None) -> CheckpointReader:
        return open_parameters(place, config_files, checksums=checksums, reference=reference)

    return open_pair(one, other, open_side, _reference_to)


def open_pair(
    one: Place, other: Place, open_side: Callable[[Place, Reference | None], T], reference_to: Callable[[T], Reference]
) -> tuple[T, T]:
    """Both as `open_side` opens them. A side without a configuration gets the `reference_to` the other one."""
    if one.needs_config and not other.needs_config:
        second, first = open_pair(other, one, open_side, reference_to)
        return first, second
    first = open_side(one, None)
    missing = other.needs_config and not one.needs_config
    return first, open_side(other, reference_to(first) if missing else None)


def _reference_to(reader: CheckpointReader) -> Reference:
    """The network of an opened side, which the other should have."""
    if isinstance(reader, HuggingFaceReader):
        model = reader.model
    else:
        model = saved_config(reader).model
    return Reference(model, reader.entry(WORD_EMBEDDINGS).shape[0], {}, str(reader.folder))
