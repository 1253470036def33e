"""Preference pairs and rewards in a config: what the keys become, what packings can hold them, messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.derive import derive
from megatron.neox_arguments.describe import describe
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

PAIRWISE = {"dataset_impl": "pairwise", "pack_impl": "unpacked", "train_impl": "dpo"}
TRAIN = {"pos_train_data_paths": ["c"], "neg_train_data_paths": ["r"]}
LABELS = {"pos_train_label_data_paths": ["cl"], "neg_train_label_data_paths": ["rl"]}
VALID = {"pos_valid_data_paths": ["vc"], "neg_valid_data_paths": ["vr"]}


def test_the_chosen_side_is_the_data(tmp_path: Path) -> None:
    """Everything else (weights, names, roles that are active) then speaks of pairs; deriving twice changes nothing."""
    args = derived(tmp_path, **PAIRWISE, **TRAIN, **LABELS, **VALID, train_data_weights=[2], train_data_names=["x"])
    assert args.data.train_data_paths == ("c",) and args.data.neg_train_data_paths == ("r",)
    assert args.data.train_label_data_paths == ("cl",) and args.data.valid_data_paths == ("vc",)
    assert args.data.valid_label_data_paths is None and args.data.test_data_paths is None
    assert args.training.do_train and args.training.do_valid and not args.training.do_test
    assert derive(args) == args


def test_pairs_of_a_mixture(tmp_path: Path) -> None:
    source = {"path": "c", "rejected": "r", "labels": "cl", "rejected_labels": "rl", "rewards": "m"}
    args = derived(tmp_path, **PAIRWISE, mixture={"sources": {"a": source, "b": {**source, "rejected": "r2"}}})
    assert args.data.neg_train_data_paths == ("r", "r2") and args.data.neg_train_label_data_paths == ("rl", "rl")
    assert args.data.train_reward_data_paths == ("m", "m")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({**TRAIN, "dataset_impl": "gpt2"}, ("pos_train_data_paths", "dataset_impl: pairwise")),
        ({**PAIRWISE, "data_path": "x"}, ("data_path", "pos_train_data_paths")),
        ({**PAIRWISE, "pos_train_data_paths": ["c"]}, ("pos_train_data_paths", "neg_train_data_paths is not set")),
        ({**PAIRWISE, "neg_train_data_paths": ["c"]}, ("neg_train_data_paths", "pos_train_data_paths is not set")),
        ({**PAIRWISE, **TRAIN, "neg_train_data_paths": ["r", "s"]}, ("neg_train_data_paths", "2 paths for 1")),
        ({**PAIRWISE, **TRAIN, "train_data_paths": ["z"]}, ("train_data_paths", "pos_train_data_paths is set too")),
        ({**PAIRWISE, **TRAIN, "neg_train_label_data_paths": ["l"]}, ("pos_train_label_data_paths is not set",)),
        ({**PAIRWISE, **TRAIN, "pack_impl": "packed"}, ("pack_impl", "best_fit, pack_until_overflow, unpacked")),
        ({**PAIRWISE, **TRAIN, "pack_impl": "best_fit"}, ("intra_document_masking: true", "pack_impl: unpacked")),
        ({**PAIRWISE, **TRAIN, "valid_sets": {"v": "x"}}, ("valid_sets.v", "rejected")),
        ({**PAIRWISE, "mixture": {"sources": {"a": {"path": "c", "rejected": "r"}, "b": "d"}}}, ("no `rejected`",)),
        ({"train_data_paths": ["x"], "train_reward_data_paths": ["a", "b"]}, ("train_reward_data_paths", "2 paths")),
        ({"train_data_paths": ["x"], "train_reward_data_paths": ["a"]}, ("pack_impl", "packed", "unpacked")),
    ],
)
def test_what_is_refused(tmp_path: Path, keys: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        derived(tmp_path, **keys)
    for part in parts:
        assert part in str(caught.value)


def test_answers_may_share_a_row_that_keeps_them_apart(tmp_path: Path) -> None:
    derived(tmp_path, **{**PAIRWISE, "pack_impl": "best_fit"}, **TRAIN, intra_document_masking=True)
    rewarded = {"train_data_paths": ["x"], "train_reward_data_paths": ["a"]}
    derived(tmp_path, **rewarded, pack_impl="best_fit", intra_document_masking=True)
    with pytest.raises(UserError, match="intra_document_masking: true"):
        derived(tmp_path, **rewarded, pack_impl="pack_until_overflow")


def test_both_rows_of_a_pair_are_tokens(tmp_path: Path) -> None:
    """What counts tokens (lengths, throughput, FLOPs, memory) asks the plan."""
    keys = {"seq_length": 64, "train_batch_size": 8, "train_iters": None, "train_tokens": 8 * 2 * 64 * 5}
    args = derived(tmp_path, **PAIRWISE, **TRAIN, **keys)
    plan = BatchPlan.of(args)
    assert args.training.train_iters == 5 and plan.tokens_per_sample == 128
    assert "= 1,024 tokens per step" in "\n".join(describe(args))
    joined = {**PAIRWISE, "pack_impl": "best_fit", "intra_document_masking": True}
    assert BatchPlan.of(derived(tmp_path, **TRAIN, **keys, **joined)).tokens_per_sample == 64
