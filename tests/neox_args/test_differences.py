"""What differs from GPT-NeoX is said of a run only where it is true of its objective and data."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.differences import find_differences

pytestmark = pytest.mark.cpu

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "train_batch_size": 4,
    "train_iters": 10,
    "pack_impl": "unpacked",
}
PAIRS = {"dataset_impl": "pairwise", "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]}
LABELS = {"pos_train_label_data_paths": ["c"], "neg_train_label_data_paths": ["d"]}
DPO = {"train_impl": "dpo", **PAIRS}
KTO = {"train_impl": "kto", "train_data_paths": ["a"], "train_reward_data_paths": ["r"]}
ROLLOUTS = {"rollout_prompts": ["p"], "reward": "exact", "rollouts_per_prompt": 2, "rollout_tokens": 4}
TOKENS, SOFTMAX, SPLIT = "loss normalisation", "vocabulary padding", "split with pack_impl"
REFERENCE, EXCHANGED = "reference model of dpo and kto", "KTO's estimate of how far the model is from its reference"
ANSWERS, PREFIX, PADDING = "loss of train_impl: rm and kto", "pairs without labels", "padding in samples"
WATCHED = {TOKENS, SOFTMAX, SPLIT, REFERENCE, EXCHANGED, ANSWERS, PREFIX, PADDING}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"data_path": "a"}, {TOKENS, SOFTMAX, SPLIT, PADDING}),
        ({"train_data_paths": ["a"]}, {TOKENS, SOFTMAX, PADDING}),
        (DPO, {SOFTMAX, REFERENCE, PREFIX, PADDING}),
        ({**DPO, **LABELS, "dpo_loss_type": "simpo"}, {SOFTMAX, PADDING}),
        ({**PAIRS, "train_impl": "rm"}, {ANSWERS, PADDING}),
        (KTO, {SOFTMAX, REFERENCE, EXCHANGED, ANSWERS, PADDING}),
        ({**KTO, "kto_loss_type": "apo_zero_unpaired"}, {SOFTMAX, REFERENCE, ANSWERS, PADDING}),
        *(({"train_impl": name, **ROLLOUTS}, {SOFTMAX}) for name in ("reinforce", "rloo", "grpo")),
    ],
)
def test_a_line_speaks_of_what_the_run_does(keys: dict[str, Any], said: set[str]) -> None:
    args = derive(NeoXArgs.from_dict({**BASE, **keys}), Facts(vocab_size=500, num_devices=1))
    found = find_differences(args)
    assert {one.topic for one in found} & WATCHED == said
    if TOKENS not in said and "rollout_prompts" not in keys:  # reinforce alone has a line of its own
        assert not [one.line for one in found if "trained tokens" in one.line]
