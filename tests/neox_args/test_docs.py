"""The generated documents are fresh, and the table of differences speaks only where it matters."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import UserError, exit_code_of
from megatron.neox_arguments.derive import Facts
from megatron.neox_arguments.differences import DIFFERENCES, differences_for
from megatron.neox_arguments.docs import documents, main
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.retired import RETIRED
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

DOCUMENTATION = Path(__file__).parents[2] / "documentation"


@pytest.mark.parametrize("name", ["CONFIG_ARGUMENTS.md", "DIFFERENCES.md"])
def test_documents_are_fresh(name: str) -> None:
    fresh = documents()[name]
    assert (DOCUMENTATION / name).read_text(encoding="utf-8") == fresh, "run: python -m megatron.neox_arguments.docs"


def test_every_key_is_documented() -> None:
    text = documents()["CONFIG_ARGUMENTS.md"]
    for name in (*all_keys(), *RETIRED):
        assert f"| `{name}` |" in text, name


def test_the_command_writes_them(tmp_path: Path) -> None:
    main([str(tmp_path / "docs")])
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "docs").iterdir()} == documents()


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--no-such", 2)])
def test_a_flag_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, code: int) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, UserError)) as end:
        main([flag])
    assert getattr(end.value, "code", exit_code_of(end.value)) == code and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "said", "silent"),
    [
        ({}, "gradient_clipping 1.0", "cosine"),
        ({"gradient_clipping": 0.5}, "", "gradient_clipping"),
        ({"activation": "swiglu", "intermediate_size": 96}, "gated_width_rule: final", "cosine"),
        ({"activation": "swiglu", "intermediate_size": 96, "gated_width_rule": "two_thirds"}, "", "gated activations"),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 50}, "stays at min_lr", "exponential"),
        ({"lr_decay_style": "cosine"}, "", "stays at min_lr"),
        ({"precision": "bfloat16"}, "stage 1 is used", "accumulation type"),
        ({"precision": "fp16"}, "stage 1 is used", "accumulation type"),
        ({"precision": "bfloat16", "gradient_accumulation_steps": 2}, "accumulates in bf16", "cosine"),
        ({"model_parallel_size": 2, "gpt_j_residual": True}, "added once", "cosine"),
        ({"pipe_parallel_size": 1}, "the same as 0", "ignored by 'global'"),
        ({"sliding_window_width": 4}, "ignored by 'global'", "the same as 0"),
        ({"load": "x"}, "an error, unless load equals save", "no_save_optim"),
        ({"no_save_optim": True}, "no_save_optim", "iteration:"),
        ({"iteration": 5}, "iteration: training honours it", "no_save_optim"),
        ({"top_k": 5}, "temperature 0: greedy", "cosine"),
        ({"train_batch_size": 8}, "derived from train_batch_size", "cosine"),
        ({"use_bias_in_mlp": False}, "use_bias_in_mlp: false", "cosine"),
    ],
)
def test_only_what_matters_is_reported(changes: dict, said: str, silent: str, tmp_path: Path) -> None:
    text = "\n".join(differences_for(derived(tmp_path, facts=Facts(vocab_size=100), **changes)))
    assert said in text
    assert silent not in text


def test_each_difference_is_one_line_and_named_once() -> None:
    topics = [difference.topic for difference in DIFFERENCES]
    assert len(topics) == len(set(topics))
    assert all("\n" not in difference.line for difference in DIFFERENCES)
