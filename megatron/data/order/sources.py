"""The token files that a config names: for each role (train, valid, test), and as validation sets with names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.order.mixture import normalize_weights, weights_by_documents
from megatron.data.order.phases import Weights
from megatron.data.order.splits import NAMES, parse_split, split_bounds
from megatron.data.tokens.cache import IndexCaches
from megatron.data.tokens.indexed import FileIdentity, IndexedDataset
from megatron.data.tokens.labels import check_labels, check_references, check_rewards, unused_labels
from megatron.data.tokens.pairs import Pairs
from megatron.data.tokens.token_files import TokenFiles
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments.forget_steps import FORGET
from megatron.neox_arguments.mixtures import COMPANIONS, sets_in_training, weight_phases
from megatron.neox_arguments.rules_pairs import written
from megatron.neox_arguments.schema_data import DataConfig

LOGGER = get_logger(__name__)

TEXTS = ("path", "rejected")
"""What of a source holds tokens (`mixtures.SOURCE_KEYS`); the rest is about them."""

Range = tuple[int, int]
"""Half-open range of documents."""


@dataclass(frozen=True)
class Source:
    """One token file in one role.

    Attributes:
        name: for people.
        data: the tokens.
        documents: half-open range of the used ones.
        labels: which tokens are trained.
        rewards: one number for each document, or pair.
        references: log-probabilities of the tokens of each document from the second on.
        max_epochs: how often a run may read it; None: any number of times.
    """

    name: str
    data: IndexedDataset
    documents: Range
    labels: IndexedDataset | None = None
    max_epochs: float | None = None
    rewards: IndexedDataset | None = None
    references: IndexedDataset | None = None

    @property
    def num_documents(self) -> int:
        return self.documents[1] - self.documents[0]

    @property
    def identity(self) -> tuple[FileIdentity, ...]:
        """What tells its files from others: those of the tokens, of the labels, of the rewards, of the references."""
        return tuple(one for data in self.opened for one in data.identity)

    @property
    def opened(self) -> list[IndexedDataset]:
        """All that is read for it: tokens, labels, rewards, references."""
        found = (self.data, self.labels, self.rewards, self.references)
        return [data for data in found if data is not None]

    @property
    def tokens(self) -> int:
        first, end = self.documents
        return int(self.data.sizes[first:end].sum(dtype=np.int64))


@dataclass(frozen=True)
class RoleSources:
    """The sources of a role and their weights: (first step, weights adding up to 1) of each phase."""

    sources: tuple[Source, ...] = ()
    weights: tuple[tuple[int, Weights], ...] = ()


@dataclass(frozen=True)
class ValidSet:
    """A validation set with a name and tags."""

    source: Source
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundData:
    """All sources of a run. A role without data has none."""

    roles: dict[str, RoleSources]
    valid_sets: list[ValidSet] = field(default_factory=list)


def find_sources(
    data: DataConfig, names: Sequence[str], seq_length: int, caches: IndexCaches | None = None
) -> FoundData:
    """The sources of each role in `names`, and of the validation sets if "valid" is among them.

    A role without data gets no sources and a warning, as in GPT-NeoX; training itself must have data (`UserError`).

    Args:
        seq_length: of the held-out samples.
        caches: store what is found by reading whole token files.
    """
    if data.ga_dataset is not None:
        data = replace(data, precompute_model_name=None)  # only what is forgotten is compared with another model
    files, asked = TokenFiles.of(data, caches), names
    if "valid" in names and "train" not in names and sets_in_training(data.train_data_weights, data.train_data_holdout):
        names = ("train", *names)
    if data.data_path is not None:
        given = [f"{name}_data_paths" for name in NAMES if getattr(data, f"{name}_data_paths")]
        if given:
            raise UserError(f"data_path and {given[0]} are both set: use one file with `split`, or separate lists.")
        roles = _split_sources(data, names, files)
    else:
        lists = [name for name in names if getattr(data, f"{name}_data_paths")]
        roles = {name: _listed_sources(data, name, files) if name in lists else RoleSources() for name in names}
        if "train" in roles and not roles["train"].sources:
            raise UserError("no training data: set data_path, train_data_paths or mixture.")
    held: list[ValidSet] = []
    if "train" in roles:
        roles["train"], held = _limit(data, roles["train"], seq_length)
    sets = [*_named_sets(data, files), *held] if "valid" in names else []
    _check_names(sets)
    for name, role in roles.items():
        if not role.sources and data.data_path is None and not (name in ("valid", "test") and sets):
            key = written(partial(getattr, data), f"{name}_data_paths")
            LOGGER.warning(f"{key} is not set, so there is no {name} loss (eval_iters: 0 means the same)")
    used = [source for role in roles.values() for source in role.sources] + [one.source for one in sets]
    sides = ((side, source.labels is not None) for source in used for side in source.data.sides)
    trained = [(str(side.prefix), labelled) for side, labelled in sides]
    for sentence in unused_labels(trained, pairs=data.dataset_impl == "pairwise"):
        LOGGER.warning(sentence)
    return FoundData({name: role for name, role in roles.items() if name in asked}, sets)


def one_source(data: DataConfig, name: str, paths: Mapping[str, Any], caches: IndexCaches) -> RoleSources:
    """A role of a run that unlearns: one source, of its name; `paths` by the names in `mixtures.SOURCE_KEYS`."""
    if name != FORGET:
        data = replace(data, precompute_model_name=None)
    return RoleSources((_open(data, TokenFiles.of(data, caches), name, paths),), ((0, (1.0,)),))


def resolve_path(data: DataConfig, path: str) -> str:
    """A data path of the config, relative ones under `data_root`."""
    return str(Path(data.data_root).expanduser() / path) if data.data_root is not None else path


def named_paths(data: DataConfig, names: Sequence[str]) -> list[str]:
    """The data paths that the config names for these roles, validation sets among them."""
    return [path for _, what, path in named_files(data, names) if what in TEXTS]


def named_files(data: DataConfig, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """The same with labels and rewards: (the flat key, what it is as in `mixtures.SOURCE_KEYS`, the path) of each."""
    found: list[tuple[str, str, str | None]] = [("data_path", "path", data.data_path)]
    for name in names:
        for what, pattern in {"path": "{}_data_paths", **COMPANIONS}.items():
            key = pattern.format(name)
            found += [(key, what, path) for path in getattr(data, key) or ()]
    if "train" in names and data.ga_dataset is not None:
        for key in ("ga_dataset", "gd_retain_dataset"):
            labels = key.replace("_dataset", "_label_dataset")
            found += [(key, "path", getattr(data, key)), (labels, "labels", getattr(data, labels))]
    if "valid" in names:
        sets = (data.valid_sets or {}).values()
        found += [("valid_sets", what, one.get(what)) for one in sets for what in ("path", *COMPANIONS)]
    return [(key, what, resolve_path(data, path)) for key, what, path in found if path is not None]


def _split_sources(data: DataConfig, names: Sequence[str], files: TokenFiles) -> dict[str, RoleSources]:
    assert data.data_path is not None
    dataset = files.open(resolve_path(data, data.data_path))
    bounds, shares = split_bounds(data.split, len(dataset)), parse_split(data.split)
    called = data.train_data_names[0] if data.train_data_names else Path(dataset.prefix).name
    found: dict[str, RoleSources] = {}
    for name in names:
        i = NAMES.index(name)
        first, end = bounds[i], bounds[i + 1]
        if end > first:
            found[name] = RoleSources((Source(called, dataset, (first, end)),), ((0, (1.0,)),))
            continue
        fact = f"split {data.split!r} gives {name} none of the {len(dataset)} documents of {dataset.prefix}"
        if name == "train":
            raise UserError(f"{fact}: nothing to train on. Raise its share, or use more data.")
        if shares[i] > 0:
            LOGGER.warning(f"{fact}, so there is no {name} loss")
        found[name] = RoleSources()
    return found


def _listed_sources(data: DataConfig, name: str, files: TokenFiles) -> RoleSources:
    paths: Sequence[str] = getattr(data, f"{name}_data_paths")
    given = data.train_data_names if name == "train" else None
    called = list(given) if given is not None else names_of(paths)
    found: list[dict[str, str]] = [{"path": path} for path in paths]
    for what, key in COMPANIONS.items():
        others = getattr(data, key.format(name)) or [None] * len(paths)
        if len(others) != len(paths):
            raise UserError(f"{key.format(name)} has {len(others)} entries for {len(paths)} data paths.")
        for one, other in zip(found, others, strict=True):
            one |= {what: other} if other is not None else {}
    sources = tuple(_open(data, files, source, one) for source, one in zip(called, found, strict=True))
    return RoleSources(sources, _weights(data, name, sources))


def _open(data: DataConfig, files: TokenFiles, name: str, paths: Mapping[str, Any]) -> Source:
    """The source of these paths, by the names in `mixtures.SOURCE_KEYS`."""

    def find(what: str) -> str | None:
        return resolve_path(data, paths[what]) if what in paths else None

    tokens, labels = _open_labelled(files, resolve_path(data, paths["path"]), find("labels"))
    if (other := find("rejected")) is not None:
        rejected, rejected_labels = _open_labelled(files, other, find("rejected_labels"))
        if (labels is None) != (rejected_labels is None):
            with_labels, without = (tokens, rejected) if rejected_labels is None else (rejected, tokens)
            raise UserError(
                f"{with_labels.prefix} has labels and {without.prefix}, the other side of its pairs, has none: set "
                "pos_train_label_data_paths and neg_train_label_data_paths (valid_, test_), or neither."
            )
        tokens = Pairs(tokens, rejected)
        if labels is not None and rejected_labels is not None:
            labels = Pairs(labels, rejected_labels)
    rewards = files.open(path) if (path := find("rewards")) is not None else None
    if rewards is not None:
        check_rewards(tokens, rewards)
    references = _open_references(files, tokens, data.precompute_model_name)
    return Source(name, tokens, (0, len(tokens)), labels, rewards=rewards, references=references)


def _open_references(files: TokenFiles, data: IndexedDataset, name: str | None) -> IndexedDataset | None:
    """The log-probabilities `name` (`precompute_model_name`) of a dataset, of both sides of pairs."""
    if name is None:
        return None
    found = [files.open(f"{side.prefix}_{name}") for side in data.sides]
    for one, side in zip(found, data.sides, strict=True):
        check_references(side, one)
    return found[0] if len(found) == 1 else Pairs(*found)


def _open_labelled(
    files: TokenFiles, path: str, label_path: str | None
) -> tuple[IndexedDataset, IndexedDataset | None]:
    dataset = files.open(path)
    labels = files.open_labels(label_path, dataset) if label_path is not None else None
    if labels is not None:
        check_labels(dataset, labels)
    return dataset, labels


def names_of(paths: Sequence[str]) -> list[str]:
    """Names for data paths: the last part of each, numbered where several have the same."""
    names: list[str] = []
    for path in paths:
        name, number = Path(path).name, 2
        while name in names:
            name, number = f"{Path(path).name}-{number}", number + 1
        names.append(name)
    return names


def _weights(data: DataConfig, name: str, sources: Sequence[Source]) -> tuple[tuple[int, Weights], ...]:
    if data.weight_by_num_documents:
        counts = [source.num_documents for source in sources]
        return ((0, tuple(weights_by_documents(counts, data.weighted_sampler_alpha))),)
    key = f"{name}_data_weights"
    phases = weight_phases(getattr(data, key)) or [(0, None)]
    return tuple((step, tuple(normalize_weights(weights, len(sources), key))) for step, weights in phases)


def _limit(data: DataConfig, role: RoleSources, seq_length: int) -> tuple[RoleSources, list[ValidSet]]:
    """The training sources without held-out documents and within the caps; held-out parts and sources that no phase
    draws from are validation sets."""
    sources, sets = [], []
    for d, source in enumerate(role.sources):
        held = per_source(data.train_data_holdout, d)
        if held:
            source, kept_out = _hold_out(source, held, seq_length)
            sets.append(ValidSet(kept_out))
        elif not any(weights[d] > 0 for _, weights in role.weights):
            sets.append(ValidSet(source))
        sizes, tokens = source.data.sizes, per_source(data.train_data_max_tokens, d)
        if data.target_budget and data.experiment_budget:
            tokens = source.tokens * (data.experiment_budget / data.target_budget)
        if tokens is not None:
            source = replace(source, documents=head(sizes, source.documents, tokens))
        sources.append(replace(source, max_epochs=per_source(data.train_data_max_epochs, d)))
    return replace(role, sources=tuple(sources)), sets


def per_source(value: Any, d: int) -> Any:
    """The value for source `d` of a key with one value for all or a list."""
    return value[d] if isinstance(value, tuple) else value


def _hold_out(source: Source, samples: int, seq_length: int) -> tuple[Source, Source]:
    first, end = source.documents
    border, _ = tail(source.data.sizes, source.documents, samples * (seq_length + 1))
    if border <= first:
        raise UserError(
            f"train_data_holdout: {source.name} ({source.data.prefix}) has {source.tokens} tokens in "
            f"{source.num_documents} documents; holding out {samples} samples of {seq_length} leaves none."
        )
    return replace(source, documents=(first, border)), replace(source, documents=(border, end))


def head(sizes: np.ndarray, documents: Range, tokens: float) -> Range:
    """The first documents of a range with at most `tokens` tokens together, but at least one document."""
    first, end = documents
    whole = int(np.searchsorted(np.cumsum(sizes[first:end], dtype=np.int64), tokens, side="right"))
    return first, min(end, first + max(1, whole))


def tail(sizes: np.ndarray, documents: Range, tokens: int) -> Range:
    """The fewest last documents of a range with at least `tokens` tokens together; all of them when that is too few."""
    first, end = documents
    backwards = np.cumsum(sizes[first:end][::-1], dtype=np.int64)
    return max(first, end - int(np.searchsorted(backwards, tokens, side="left")) - 1), end


def _named_sets(data: DataConfig, files: TokenFiles) -> list[ValidSet]:
    return [
        ValidSet(_open(data, files, name, one), tuple(one.get("tags", ())))
        for name, one in (data.valid_sets or {}).items()
    ]


def _check_names(sets: Sequence[ValidSet]) -> None:
    names = [one.source.name for one in sets]
    tags = {tag for one in sets for tag in one.tags}
    for name in names:
        if names.count(name) > 1 or name in tags:
            raise UserError(
                f"two validation sets are named {name!r}: a set of valid_sets (or its tag), and a source of training "
                "that is held out or has weight 0. Rename one (train_data_names, valid_sets)."
            )
