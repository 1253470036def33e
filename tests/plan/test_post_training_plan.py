"""What is said of post-training before it starts: its files by key and line, its reference, its completions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.formulas import parameter_count
from megatron.plan.memory import bytes_beside
from megatron.tables import size
from tests.convert.helpers import LLAMA, VOCAB, hugging_face, resolved
from tests.data.corpus import write
from tests.plan.test_planner import dry_run, section

pytestmark = pytest.mark.cpu

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "train_batch_size": 4,
    "train_iters": 10,
    "eval_iters": 0,
    "tokenizer_type": "CharLevelTokenizer",
    "pack_impl": "unpacked",
}
TEXTS = [[1, 2, 3, 4, 5]] * 30
LABELS = [[-100, -100, 3, 4, 5]] * 30


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """`config(**keys)` -> a run on `texts`, `other`, `labels` and `rewards` of its folder, with these keys behind
    those of the model."""
    for name, items, dtype in (
        ("texts", TEXTS, np.uint16),
        ("other", TEXTS, np.uint16),
        ("labels", LABELS, np.int32),
        ("rewards", [[1]] * 30, np.float32),
    ):
        write(tmp_path / name, items, dtype)

    def make(**keys: Any) -> Path:
        path = tmp_path / "run.yml"
        path.write_text(yaml.safe_dump({**MODEL, "data_root": str(tmp_path), **keys}, sort_keys=False))
        return path

    return make


def line_of(path: Path, key: str) -> str:
    lines = path.read_text().splitlines()
    return f"{path}:{next(n for n, line in enumerate(lines, 1) if line.startswith(f'{key}:'))}: {key}: "


PAIRS = {
    "train_impl": "dpo",
    "dataset_impl": "pairwise",
    "pos_train_data_paths": ["texts"],
    "neg_train_data_paths": ["other"],
}
KTO = {
    "train_impl": "kto",
    "train_data_paths": ["texts"],
    "train_label_data_paths": ["labels"],
    "train_reward_data_paths": ["rewards"],
}
CHAT_TOOL = "preprocess_data_with_chat_template.py"


@pytest.mark.parametrize(
    ("keys", "wrong", "remedy"),
    [
        ({**PAIRS, "pos_train_data_paths": ["none"]}, "pos_train_data_paths", CHAT_TOOL),
        ({**PAIRS, "neg_train_data_paths": ["none"]}, "neg_train_data_paths", CHAT_TOOL),
        ({**KTO, "train_data_paths": ["none"]}, "train_data_paths", "preprocess_data.py"),
        ({**KTO, "train_label_data_paths": ["none"]}, "train_label_data_paths", CHAT_TOOL),
        ({**KTO, "train_reward_data_paths": ["none"]}, "train_reward_data_paths", CHAT_TOOL),
        (
            {**KTO, "kto_loss_type": "apo_zero_unpaired", "precompute_model_name": "none"},
            "precompute_model_name",
            "Without precompute_model_name the run computes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_missing_file_is_named_by_the_key_and_line_that_the_user_wrote(
    config: Callable[..., Path], keys: dict[str, Any], wrong: str, remedy: str
) -> None:
    path = config(**keys)
    with pytest.raises(UserError) as caught:
        dry_run(path)
    assert str(caught.value).startswith(f"{line_of(path, wrong)}no dataset ") and "none" in str(caught.value)
    assert remedy in str(caught.value) and "things are wrong" not in str(caught.value)


def test_pairs_speak_of_the_keys_of_their_sides(
    config: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "side_chosen_document", TEXTS, np.uint16)
    write(tmp_path / "side_chosen_label_document", LABELS, np.int32)
    dry_run(config(**{**PAIRS, "pos_train_data_paths": ["side_chosen_document"]}))
    assert "add them to pos_train_label_data_paths and neg_train_label_data_paths" in caplog.text
    with pytest.raises(UserError, match="2 weights for 1 pos_train_data_paths"):
        dry_run(config(**PAIRS, train_data_weights=[1, 2]))
    valid = {name.replace("train", "valid"): paths for name, paths in PAIRS.items() if name.endswith("paths")}
    rest = {name: value for name, value in PAIRS.items() if not name.endswith("paths")}
    with pytest.raises(UserError, match="pos_valid_data_paths: is set without pos_train_data_paths"):
        dry_run(config(**rest, **valid))


GRPO: dict[str, Any] = {
    "train_impl": "grpo",
    "pack_impl": "packed",
    "rollout_prompts": ["prompts.jsonl"],
    "rollouts_per_prompt": 2,
    "rollout_tokens": 4,
    "reward": "exact",
}


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("prompts.jsonl")
    path.write_text('{"prompt": "ab", "answer": "c"}\n' * 5)
    return path


def test_prompts_without_what_the_reward_reads(config: Callable[..., Path], prompts: Path) -> None:
    with prompts.open("a") as lines:
        lines.write('\n{"prompt": "de"}\n')
    path = config(**GRPO)
    where = line_of(path, "rollout_prompts")
    with pytest.raises(UserError, match=f"^{re.escape(where)}{prompts}:7 has no field `answer`"):
        dry_run(path)
    dry_run(config(**{**GRPO, "reward": None, "reward_url": "http://localhost:1/"}))


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://x:port/", "nope", "ftp://x/"])
def test_an_address_that_is_none(config: Callable[..., Path], prompts: Path, url: str) -> None:
    path = config(**{**GRPO, "reward": None, "reward_url": url})
    with pytest.raises(UserError, match=f"^{re.escape(line_of(path, 'reward_url'))}{re.escape(repr(url))}"):
        dry_run(path)


def test_ports_that_do_not_go_with_hosts(config: Callable[..., Path]) -> None:
    servers = {"online_dataserver_ips": ["a", "b", "c"], "online_dataserver_ports": [1, 2]}
    with pytest.raises(UserError, match="online_dataserver_ports: has 2 for 3 online_dataserver_ips"):
        dry_run(config(train_impl="reinforce", dataset_impl="online", reinforce_leave_one_out=True, **servers))


def test_a_reward_model_that_is_none(config: Callable[..., Path], prompts: Path, tmp_path: Path) -> None:
    path = config(**{**GRPO, "reward": None, "reward_model": str(tmp_path / "nope")})
    with pytest.raises(UserError) as caught:
        dry_run(path)
    assert str(caught.value) == f"{line_of(path, 'reward_model')}folder {tmp_path / 'nope'} does not exist; give a " + (
        "global_step<N> folder or a save folder"
    )


def test_models_of_hugging_face_beside_the_run(config: Callable[..., Path], prompts: Path, tmp_path: Path) -> None:
    for name, keys in (("rewards", {"train_impl": "rm"}), ("words", {})):
        hugging_face(resolved(**LLAMA, **keys), "llama")[0].save_pretrained(tmp_path / name)
    path = config(**{**GRPO, "reward": None, "reward_model": str(tmp_path / "rewards")})
    assert any(line.startswith("rewards: reward_model ") for line in section(dry_run(path), "completions"))
    with pytest.raises(UserError, match=f"{tmp_path / 'words'} is of no reward model"):
        dry_run(config(**{**GRPO, "reward": None, "reward_model": str(tmp_path / "words")}))
    beside = NeoXArgs.from_saved({"train_impl": "distill", "distill_teacher": str(tmp_path / "words")})
    count = parameter_count(resolved(**LLAMA).model, VOCAB).total
    assert bytes_beside(beside.replace("test", precision="fp32", pipe_parallel_size=1)) == 4 * count


def test_what_is_trained_is_checked_by_name(config: Callable[..., Path]) -> None:
    path = config(**PAIRS, lora_r=4, lora_target_modules=["q_proj"])
    with pytest.raises(UserError, match=f"^{re.escape(line_of(path, 'lora_target_modules'))}'q_proj' is no linear"):
        dry_run(path)
    path = config(**PAIRS, parameter_groups=[{"match": "*.nope", "lr_mult": 2.0}])
    with pytest.raises(UserError, match=f"^{re.escape(line_of(path, 'parameter_groups'))}'\\*.nope' matches no"):
        dry_run(path)
    stages = {"pipe_parallel_size": 2, "num_gpus": 2}
    path = config(**PAIRS, lora_r=4, lora_target_modules=["3.*"], **stages)
    with pytest.raises(UserError, match="nothing is trained on pipeline stage 0"):
        dry_run(path)
    texts = {"data_path": "texts", "ga_dataset": "other", "gd_retain_dataset": "texts", "split": "1"}
    rmu = {"ga_mode": "interleaved", "gd_mode": True, "ga_loss": "rmu", "ga_rmu_layer": 0}
    dry_run(config(**texts, **rmu))
    with pytest.raises(UserError, match="nothing is trained on pipeline stage 1"):
        dry_run(config(**texts, **rmu, **stages))


def test_what_adapters_train(config: Callable[..., Path]) -> None:
    """A of [r, in] and B of [out, r] for q, k and v together, the output, and both of the feed-forward; 2 layers."""
    text = dry_run(config(**PAIRS, lora_r=4))
    trained = 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))
    (line,) = [line for line in section(text, "model") if line.endswith("are trained")]
    whole = int(line.split()[1].replace(",", ""))
    assert f" {trained:,} (" in line and f"{trained / whole:.2%}" in line
    (before,) = [line for line in section(text, "model") if line.startswith("parameters ")]
    assert whole == int(before.split()[1].replace(",", "")) + trained


@pytest.mark.parametrize(
    ("keys", "samples", "rows"),
    [
        (PAIRS, "train 40", 2 * 30),  # ten steps of four pairs read the thirty there are again
        ({**PAIRS, "dpo_reference_free": True}, None, 0),
        ({**KTO, "train_iters": 2}, "train 8, each with the answer to another as well", 2 * 8),
        ({**KTO, "kto_loss_type": "apo_zero_unpaired", "train_iters": 2}, "train 8", 8),
    ],
)
def test_the_pass_of_the_reference(
    config: Callable[..., Path], tmp_path: Path, keys: dict[str, Any], samples: str | None, rows: int
) -> None:
    text = dry_run(config(**keys, save=str(tmp_path / "save")))
    if samples is None:
        assert "== reference model" not in text
        return
    reads, writes = section(text, "reference model")
    assert reads.endswith(f" of {samples}")
    assert writes.startswith(f"at most {size(rows * (4 * 16 + 8))} in {tmp_path / 'save'}/reference-KEY ")


def test_completions_and_who_rewards_them(config: Callable[..., Path], prompts: Path) -> None:
    lines = section(dry_run(config(**GRPO, rollout_steps=2)), "completions")
    assert lines[0] == "4 for every 2 steps: 2 of each of 2 prompts, at most 4 tokens"
    assert lines[1] == f"5 prompts in {prompts}, asked 2 times each"  # 5 draws of 2 prompts
    assert lines[2] == "rewards: reward exact" and "kl_div_beta 0.1" in lines[3]
    assert "== completions" not in dry_run(config(**PAIRS))
