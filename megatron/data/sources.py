"""The token files that a config names for each role (train, valid, test), with their ranges, weights and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.data.cache import IndexCaches
from megatron.data.indexed import IndexedDataset
from megatron.data.mixture import normalize_weights, weights_by_documents
from megatron.data.packed import check_labels
from megatron.data.splits import NAMES, parse_split, split_bounds
from megatron.data.token_files import TokenFiles
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments.schema_data import DataConfig

LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """One token file in one role: a half-open range of its documents, and its share of the role (adding up to 1)."""

    data: IndexedDataset
    documents: tuple[int, int]
    weight: float
    labels: IndexedDataset | None = None

    @property
    def num_documents(self) -> int:
        return self.documents[1] - self.documents[0]

    @property
    def tokens(self) -> int:
        first, end = self.documents
        return int(self.data.sizes[first:end].sum(dtype="int64"))


def find_sources(data: DataConfig, names: Sequence[str], caches: IndexCaches | None = None) -> dict[str, list[Source]]:
    """The sources of each role in `names`. `caches` keep what has to be found by reading whole token files.

    A role for which there is no data gets an empty list and a warning, as GPT-NeoX trains on without it; training
    itself must have data (`UserError`).
    """
    lists = {name: getattr(data, f"{name}_data_paths") for name in NAMES}
    files = TokenFiles.of(data, caches)
    if data.data_path is not None:
        given = [f"{name}_data_paths" for name in NAMES if lists[name]]
        if given:
            raise UserError(f"data_path and {given[0]} are both set: use one file with `split`, or separate lists.")
        return _split_sources(data, names, files)
    found = {name: _listed_sources(data, name, files) if lists[name] else [] for name in names}
    if "train" in found and not found["train"]:
        raise UserError("no training data: set data_path or train_data_paths.")
    for name, sources in found.items():
        if not sources:
            LOGGER.warning(f"{name}_data_paths is not set, so there is no {name} loss (eval_iters: 0 says the same)")
    return found


def _split_sources(data: DataConfig, names: Sequence[str], files: TokenFiles) -> dict[str, list[Source]]:
    assert data.data_path is not None
    dataset = files.open(data.data_path)
    bounds, shares = split_bounds(data.split, len(dataset)), parse_split(data.split)
    found: dict[str, list[Source]] = {}
    for name in names:
        i = NAMES.index(name)
        first, end = bounds[i], bounds[i + 1]
        if end > first:
            found[name] = [Source(dataset, (first, end), 1.0)]
            continue
        said = f"split {data.split!r} gives {name} none of the {len(dataset)} documents of {dataset.prefix}"
        if name == "train":
            raise UserError(f"{said}: there is nothing to train on.")
        if shares[i] > 0:
            LOGGER.warning(f"{said}, so there is no {name} loss")
        found[name] = []
    return found


def _listed_sources(data: DataConfig, name: str, files: TokenFiles) -> list[Source]:
    paths = getattr(data, f"{name}_data_paths")
    datasets = [files.open(path) for path in paths]
    key = f"{name}_data_weights"
    if data.weight_by_num_documents:
        weights = weights_by_documents([len(dataset) for dataset in datasets], data.weighted_sampler_alpha)
    else:
        weights = normalize_weights(getattr(data, key), len(datasets), key)
    label_paths = getattr(data, f"{name}_label_data_paths") or [None] * len(paths)
    if len(label_paths) != len(paths):
        raise UserError(f"{name}_label_data_paths has {len(label_paths)} entries for {len(paths)} data paths.")
    sources = []
    for dataset, weight, label_path in zip(datasets, weights, label_paths, strict=True):
        labels = files.open_labels(label_path, dataset) if label_path is not None else None
        if labels is not None:
            check_labels(dataset, labels)
        sources.append(Source(dataset, (0, len(dataset)), weight, labels))
    return sources
