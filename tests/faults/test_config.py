"""Known faults of configurations: names, types, arithmetic, keys that do nothing (31, 65)."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from megatron.layers.activations import ACTIVATIONS
from megatron.layers.attention_backends import ATTENTION_BACKENDS
from megatron.layers.init import INITS
from megatron.layers.norms import NORMS
from megatron.layers.positions import POSITIONS
from megatron.neox_arguments.arguments import all_keys
from megatron.neox_arguments.derive import Facts
from megatron.objectives import OBJECTIVES
from megatron.registry import Registry
from tests.neox_args.helpers import derived, load_text

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("key", "registry", "beside"),
    [
        ("norm", NORMS, set()),
        ("activation", ACTIVATIONS, set()),
        ("pos_emb", POSITIONS, set()),
        ("init_method", INITS, set()),
        ("attention_backend", ATTENTION_BACKENDS, {"auto"}),
        ("train_impl", OBJECTIVES, set()),
    ],
)
def test_a_name_that_a_config_may_give_exists(key: str, registry: Registry, beside: set[str]) -> None:
    """65: what loads can be built, so that a dry run (which imports none of it) refuses what the run would."""
    info = all_keys()[key]
    refused = set(info.unavailable) if isinstance(info.unavailable, dict) else set()
    spelt_otherwise = set(info.spellings)
    assert set(get_args(info.type)) - refused - spelt_otherwise == set(registry) | beside


@pytest.mark.parametrize(
    ("vocabulary", "padded"),
    [(259, {1: 384, 2: 512, 4: 512}), (50257, {1: 50304, 2: 50432, 4: 50688, 8: 51200})],
)
def test_rows_of_the_vocabulary_per_number_of_ranks(vocabulary: int, padded: dict[int, int], tmp_path: Path) -> None:
    """31: the numbers of the report, divisor 128."""
    for tensor, rows in padded.items():
        facts = Facts(vocab_size=vocabulary)
        args = derived(tmp_path, model_parallel_size=tensor, make_vocab_size_divisible_by=128, facts=facts)
        assert args.tokenizer.padded_vocab_size == rows


def test_a_number_in_quotes_is_a_number(tmp_path: Path) -> None:
    """65: YAML reads 1e-4 as a text, quoted or not; both are the number, and the same number twice is no conflict."""
    for text in ('lr: "1e-4"\n', "lr: 1e-4\n", "lr: 0.0001\n"):
        assert load_text(tmp_path, text).optimizer.lr == 1e-4
    assert load_text(tmp_path, 'lr: "1e-4"\n', "lr: 1e-4\n").optimizer.lr == 1e-4
