"""From the data keys of a config to the datasets of a run.

`plan_datasets` opens the files, divides them and counts: cheap, without torch, enough for a dry run and for the table
at start. `DataPlan.build` then builds the index arrays, or finds them in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.data.order.by_step import SourceCounts
from megatron.data.order.data_plan import SET, DataPlan, Datasets, SetSteps
from megatron.data.order.phases import Progress
from megatron.data.order.role_order import OrderBuilder, RoleOrder, packing_of
from megatron.data.order.saved_order import SavedOrder
from megatron.data.order.sources import RoleSources, find_sources, one_source
from megatron.data.order.splits import NAMES
from megatron.data.tokens.cache import IndexCaches
from megatron.neox_arguments.forget_steps import TRAIN
from megatron.neox_arguments.schema_data import DataConfig


def plan_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    train_samples: int,
    valid_samples: int = 0,
    test_samples: int = 0,
    set_samples: int = 0,
    progress: Progress | None = None,
    saved: SavedOrder | None = None,
    counts: SourceCounts | None = None,
    unlearning: Mapping[str, Mapping[str, Any]] | None = None,
) -> DataPlan:
    """Open, divide and count the data of a run.

    Args:
        data: the data keys.
        seq_length: tokens per sample.
        seed: of the shuffles; `saved` segments keep the seed they had.
        train_samples, valid_samples, test_samples: over the whole run, from its first step on.
        set_samples: of each validation set with a name, in every evaluation; 0 leaves them out.
        progress: samples per step and how far the run is; by default at the beginning, one sample per step.
        saved: the order in the checkpoint that is resumed.
        counts: what the steps of training take from which role; None: all from train.
        unlearning: the roles besides train that they take from: `path` and `labels` of each.

    Raises `UserError`: files missing or damaged, too few tokens, weights that do not fit, caps that are too low,
    changes of the data or weights of past steps.
    """
    caches, progress = IndexCaches(data.data_cache_path, data.use_shared_fs), progress or Progress()
    wanted = dict(zip(NAMES, (train_samples, valid_samples, test_samples), strict=True))
    names = [name for name in NAMES if wanted[name] > 0 or (name == "valid" and set_samples > 0)]
    found = find_sources(data, names, seq_length, caches)
    builder = OrderBuilder(data, seq_length, seed, progress, saved or SavedOrder(), caches)

    def order_training(name: str, sources: RoleSources, samples: int) -> RoleOrder:
        own = builder if counts is None else replace(builder, progress=counts.progress(name, progress))
        return own.order_training(name, sources, samples)

    roles: dict[str, RoleOrder] = {}
    for name, sources in found.roles.items():
        if sources.sources and wanted[name] > 0:
            order = order_training if name == TRAIN else builder.order_other
            roles[name] = order(name, sources, wanted[name])
    sets = []
    for one in found.valid_sets if set_samples > 0 else ():
        role = builder.order_once(f"{SET}{one.source.name}", one.source, set_samples)
        roles[f"{SET}{one.source.name}"] = role
        sets.append(SetSteps(one.source.name, one.tags, role.samples, -(-role.samples // progress.batch)))
    for name, paths in (unlearning or {}).items():
        assert counts is not None
        if (samples := counts.before(counts.end, name)) > 0:
            roles[name] = order_training(name, one_source(data, name, paths, caches), samples)
    return DataPlan(seq_length, progress.batch, roles, tuple(sets), progress.start, caches, counts)


def build_datasets(data: DataConfig, **counts: Any) -> Datasets:
    """`plan_datasets` with the same arguments, then `DataPlan.build` with what the data keys say about it."""
    plan = plan_datasets(data, **counts)
    return plan.build(mmap_warmup=data.mmap_warmup)


def epoch_samples(data: DataConfig, seq_length: int, epochs: int = 1) -> int:
    """Training samples in `epochs` passes over all data that is trained on: what `train_epochs` is counted in."""
    caches = IndexCaches(data.data_cache_path, data.use_shared_fs)
    train = find_sources(data, ["train"], seq_length, caches).roles["train"]
    drawn = [d for d in range(len(train.sources)) if any(weights[d] > 0 for _, weights in train.weights)]
    return sum(packing_of(data, train.sources[d], seq_length, caches).samples_per_epoch(epochs) for d in drawn)
