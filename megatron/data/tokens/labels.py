"""Labels, rewards and references: do they fit their data, and do labels next to it stay unused by mistake?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import read_manifest
from megatron.data.tokens.prefixes import exists
from megatron.errors import UserError

ENDING = "_document"


def unused_labels(trained: Iterable[tuple[str, bool]], *, pairs: bool = False) -> list[str]:
    """A warning for every dataset that is trained without the labels next to it.

    `trained`: prefix of each dataset (as `IndexedDataset.prefix`), and whether the run reads labels for it. Data that
    was made to be trained whole (`--no-mask`) is skipped. `pairs`: each dataset is a side of pairs.
    """
    without = "all tokens are trained, prompts too"
    keys = "train_label_data_paths (valid_, test_), at the position of their data in train_data_paths"
    if pairs:
        without = "all tokens behind what both texts of a pair begin with are trained"
        keys = (
            "pos_train_label_data_paths and neg_train_label_data_paths (valid_, test_), at the position of their data"
        )
    found = []
    for prefix, labelled in dict.fromkeys(trained):
        labels = None if labelled else find_labels(prefix)
        if labels is not None and not _trains_everything(labels):
            found.append(f"{prefix}: {without}, but {labels} selects some. To use these labels, add them to {keys}")
    return found


def find_labels(prefix: str) -> str | None:
    """The prefix of the label dataset next to the dataset `prefix`, None without one or for labels themselves."""
    base = prefix.removesuffix(ENDING)
    if base.endswith("_label"):
        return None
    # preprocess_data_with_mask.py leaves the key "text" out of the name, as GPT-NeoX does.
    names = (f"{base}_label{ENDING}", f"{base.removesuffix('_text')}_label{ENDING}", f"{prefix}_label")
    return next(filter(exists, names), None)


def _trains_everything(labels: str) -> bool:
    manifest = read_manifest(Path(labels))
    return manifest is not None and bool(manifest.extra.get("no_mask"))


def check_labels(data: IndexedDataset, labels: IndexedDataset) -> None:
    """Raise `UserError` when a label dataset does not go with its data."""
    if labels.dtype.kind != "i":
        raise UserError(f"{labels.prefix}: labels hold -100, so they need a signed type, not {labels.dtype}.")
    if not np.array_equal(data.sizes, labels.sizes):
        raise UserError(
            f"{labels.prefix} does not go with {data.prefix}: item sizes differ "
            f"({len(labels)} items of {labels.num_tokens} tokens against {len(data)} of {data.num_tokens})."
        )


def check_rewards(data: IndexedDataset, rewards: IndexedDataset) -> None:
    """Raise `UserError` unless `rewards` has one number for each document of `data` (for each pair: its margin)."""
    if len(rewards) != len(data):
        raise UserError(f"{rewards.prefix} has {len(rewards)} rewards for the {len(data)} documents of {data.prefix}.")
    wrong = np.flatnonzero(rewards.sizes != 1)
    if len(wrong):
        at = int(wrong[0])
        raise UserError(f"{rewards.prefix}: item {at} has {int(rewards.sizes[at])} values; a reward is one number.")


def check_references(data: IndexedDataset, references: IndexedDataset) -> None:
    """Raise `UserError` unless `references` has log-probabilities for each document of `data`. How many a document
    needs depends on how much of it is read: GPT-NeoX writes as many as a sample has."""
    if references.dtype.kind != "f" or len(references) != len(data):
        raise UserError(
            f"{references.prefix} has {len(references)} items of {references.dtype}, but the log-probabilities of the "
            f"{len(data)} documents of {data.prefix} are as many, of float32."
        )
