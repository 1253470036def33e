"""Tokens, samples and epochs per data source, for training, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.data.indexed import IndexedDataset
from megatron.data.manifest import check_tokenizer
from megatron.data.mixture import normalize_weights, weights_by_documents
from megatron.data.splits import NAMES, sample_counts, split_bounds
from megatron.errors import UserError
from megatron.log import Once, get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer.base import Tokenizer

logger = get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """One token file in one role. `samples` is what the run takes of it, `epochs` how often that is all of it."""

    role: str
    prefix: str
    documents: int
    tokens: int
    weight: float
    samples: int
    epochs: float


def epoch_samples(args: NeoXArgs) -> int:
    """Samples in one pass over the training data: what `train_epochs` is counted in."""
    tokens = sum(count for _, _, _, count, _ in _opened(args, "train"))
    return max(0, (tokens - 1) // args.model.seq_length)


def sources(args: NeoXArgs, tokenizer: Tokenizer) -> list[Source]:
    """Every source of a derived config. Raises `UserError` for data that is missing, foreign or too short."""
    training = args.training
    wanted = dict(
        zip(
            NAMES,
            sample_counts(
                train_iters=training.train_iters or 0,
                eval_interval=training.eval_interval,
                eval_iters=training.eval_iters,
                train_batch_size=training.train_batch_size,
            ),
            strict=True,
        )
    )
    active = {"train": training.do_train, "valid": training.do_valid, "test": training.do_test}
    found: list[Source] = []
    once = Once(logger)
    for role in NAMES:
        if not active[role] or not wanted[role]:
            continue
        for data, prefix, documents, tokens, weight in _opened(args, role):
            check_tokenizer(data, tokenizer, once)
            if tokens <= args.model.seq_length:
                raise UserError(
                    f"{prefix}: the {role} part has {tokens} tokens in {documents} documents, but one sample takes "
                    f"seq_length + 1 = {args.model.seq_length + 1}. Give it more data (split: {args.data.split!r})"
                    + (", or set eval_iters=0." if role != "train" else ".")
                )
            samples = round(wanted[role] * weight)
            epochs = samples * args.model.seq_length / tokens
            found.append(Source(role, prefix, documents, tokens, weight, samples, epochs))
    return found


def _opened(args: NeoXArgs, role: str) -> list[tuple[IndexedDataset, str, int, int, float]]:
    """(dataset, prefix, documents, tokens, weight) of each source of a role."""
    data = args.data
    if data.data_path is not None:
        dataset = IndexedDataset(data.data_path)
        bounds = split_bounds(data.split, len(dataset))
        first, stop = bounds[NAMES.index(role)], bounds[NAMES.index(role) + 1]
        return [(dataset, str(dataset.prefix), stop - first, int(dataset.sizes[first:stop].sum()), 1.0)]
    paths: Sequence[str] = getattr(data, f"{role}_data_paths") or ()
    datasets = [IndexedDataset(path) for path in paths]
    key = f"{role}_data_weights"
    if data.weight_by_num_documents:
        weights = weights_by_documents([len(dataset) for dataset in datasets], data.weighted_sampler_alpha)
    else:
        weights = normalize_weights(getattr(data, key), len(datasets), key)
    return [
        (dataset, str(dataset.prefix), len(dataset), dataset.num_tokens, weight)
        for dataset, weight in zip(datasets, weights, strict=True)
    ]
