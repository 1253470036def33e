"""Smaller micro-batches on a cluster: the global batch is the same number, or nothing runs."""

from __future__ import annotations

import itertools

import pytest

from megatron.cluster.profile import ClusterProfile
from megatron.errors import UserError
from megatron.jobs.overrides import adapt
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts

BASE = "num_layers: 2\nhidden_size: 8\nnum_attention_heads: 2\nseq_length: 8\nmax_position_embeddings: 8\n"
KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
RANKS = 4


def batches(path, overrides=()):
    args = NeoXArgs.from_ymls([str(path)], overrides, facts=Facts(num_devices=RANKS))
    return tuple(args.get(key) for key in KEYS)


def profile(tmp_path, multiplier):
    return ClusterProfile("small", tmp_path / "small.yml", grad_accumulation_multiplier=multiplier)


def config(tmp_path, values):
    path = tmp_path / "config.yml"
    path.write_text(BASE + "".join(f"{key}: {value}\n" for key, value in zip(KEYS, values) if value is not None))
    return path


@pytest.mark.parametrize("multiplier", [1, 2, 4])
@pytest.mark.parametrize(
    "values", [row for row in itertools.product((None, 96), (None, 8), (None, 3)) if row[0] or row[1]]
)
def test_every_way_to_write_a_batch_keeps_it(tmp_path, values, multiplier):
    path = config(tmp_path, values)
    total, micro, steps = batches(path)
    adapted = adapt([str(path)], [], profile(tmp_path, multiplier), {}, others=[])
    assert batches(path, adapted.overrides) == (total, micro // multiplier, steps * multiplier)
    assert bool(adapted.changes) == (multiplier > 1)


@pytest.mark.parametrize(("micro", "multiplier", "near"), [(5, 2, "4 or 6"), (6, 4, "4 or 8"), (1, 2, "2")])
def test_a_micro_batch_that_cannot_be_divided_is_refused(tmp_path, micro, multiplier, near):
    path = config(tmp_path, (None, micro, 1))
    with pytest.raises(UserError) as error:
        adapt([str(path)], [], profile(tmp_path, multiplier), {}, others=[])
    for word in (f"{path}:6", f"{micro} is not a multiple of {multiplier}", f"nearest {near}", "small"):
        assert word in str(error.value)


def test_a_derived_micro_batch_that_cannot_be_divided_is_refused_by_the_configuration(tmp_path):
    path = config(tmp_path, (12, None, None))  # 3 samples a rank
    adapted = adapt([str(path)], [], profile(tmp_path, 2), {}, others=[])
    with pytest.raises(UserError, match=r"12 is not a multiple of .*= 8; nearest 8 or 16"):
        batches(path, adapted.overrides)


def test_a_number_of_the_command_line_counts_as_the_configs(tmp_path):
    path = config(tmp_path, (None, 5, 1))
    user = ["train_micro_batch_size_per_gpu=6", "gas=2"]
    overrides = adapt([str(path)], user, profile(tmp_path, 2), {}, others=[]).overrides
    assert batches(path, [*user, *overrides]) == (48, 3, 4)


def test_a_schedule_of_batch_sizes_counts_as_the_batch(tmp_path):
    path = config(tmp_path, (None, 8, None))
    path.write_text(path.read_text() + "batch_size_schedule: [[0, 32], [9, 96]]\n")
    adapted = adapt([str(path)], [], profile(tmp_path, 2), {}, others=[])
    assert batches(path) == (96, 8, 3) and batches(path, adapted.overrides) == (96, 4, 6)
