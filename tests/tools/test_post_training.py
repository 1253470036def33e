"""The scripts and configs of `post-training`, as their guide uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import binomtest

from megatron.data.tokens.indexed import IndexedDataset
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from tests.data.chat.templates import write_folder
from tests.data.hub_server import Hub, Repo
from tests.tokenizer.vocabularies import write_json
from tests.tools.command import ROOT
from tests.training.runs import run

pytestmark = pytest.mark.cpu

CONFIGS = ROOT / "post-training" / "configs"
CHAT_TOOL = "tools/datasets/preprocess_data_with_chat_template.py"


def script(folder: Path, name: str, *flags: object, check: int = 0, **env: str) -> str:
    """Run a script in `folder`; its output, or its messages when it fails."""
    done = subprocess.run(
        [sys.executable, str(ROOT / name), *map(str, flags)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == check and "Traceback" not in done.stderr, done.stderr
    return done.stderr if check else done.stdout


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def record(i: int) -> dict[str, Any]:
    bad = "good" if i == 3 else "bad"  # one pair has equal answers
    return {"chosen": chat(f"q{i}", "good"), "rejected": chat(f"q{i}", bad), "score_chosen": 5.0, "score_rejected": 2.0}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record(i)) + "\n" for i in range(12)))
    return tmp_path


def test_the_files_of_every_recipe(pairs: Path) -> None:
    """Nothing is in train and val; both chats of a pair are KTO's, with +1 and -1."""
    script(pairs, "post-training/llama_data.py", "--dataset", "pairs.jsonl", "--name", "mine", "--val", 2)
    train = [i for i in range(10) if i != 3]
    for split, numbers in (("train", train), ("val", [10, 11])):
        found = lines(pairs / f"data/pairwise/mine_dpo_{split}_filtered.jsonl")
        wanted = [{"chosen": chat(f"q{i}", "good"), "rejected": chat(f"q{i}", "bad"), "margin": 3.0} for i in numbers]
        assert found == wanted
        assert lines(pairs / f"data/sft/mine_sft_{split}_filtered.jsonl") == [{"messages": p["chosen"]} for p in found]
        both = [
            {"messages": pair[side], "reward": reward}
            for pair in found
            for side, reward in (("chosen", 1), ("rejected", -1))
        ]
        assert lines(pairs / f"data/kto/mine_kto_{split}_filtered.jsonl") == both
    assert not list(pairs.rglob("*test*.jsonl")) and not list(pairs.rglob("*.tmp"))


def test_splits_of_the_hub(tmp_path: Path) -> None:
    rows = "".join(json.dumps(record(i)) + "\n" for i in range(6)).encode()
    test = "".join(json.dumps(record(i)) + "\n" for i in range(20, 22)).encode()
    with Hub() as hub:
        hub.datasets["me/prefs"] = Repo({"data/train-0.jsonl": rows, "data/test-0.jsonl": test})
        flags = ("--dataset", "me/prefs", "--train-split", "train", "--test-split", "test", "--val", 1)
        script(tmp_path, "post-training/llama_data.py", *flags, **hub.environment(tmp_path / "home"))
    found = [
        len(lines(tmp_path / f"data/pairwise/llama3_dpo_{split}_filtered.jsonl")) for split in ("train", "val", "test")
    ]
    assert found == [4, 1, 2]


@pytest.mark.parametrize(
    ("change", "flags", "parts"),
    [
        ({"chosen": "good", "rejected": "bad"}, (), ("pairs.jsonl:13", "--prompt-key")),
        ({"chosen": chat("q", "a")}, (), ("pairs.jsonl:13", "rejected")),
        ({}, ("--val", 20), ("11 usable", "none is left")),
    ],
)
def test_records_that_are_no_pairs(pairs: Path, change: dict, flags: tuple, parts: tuple[str, ...]) -> None:
    """One message, and nothing half-written."""
    if change:
        with (pairs / "pairs.jsonl").open("a") as file:
            file.write(json.dumps(change) + "\n")
    said = script(pairs, "post-training/llama_data.py", "--dataset", "pairs.jsonl", *flags, check=2)
    assert all(part in said for part in parts), said
    assert not list(pairs.rglob("data/*/*"))


def test_one_run_writes_what_two_of_gpt_neox_write(pairs: Path) -> None:
    """Its commands work, too: the same names with the same content."""
    script(pairs, "post-training/llama_data.py", "--dataset", "pairs.jsonl", "--val", 0)
    write_folder(pairs / "tok", "chatml")
    common = ("--input", "data/pairwise/llama3_dpo_train_filtered.jsonl", "--tokenizer-path", "tok")
    flags = ("--chosen-key", "chosen", "--rejected-key", "rejected", "--only-last", "--reward-key", "margin")
    script(pairs, CHAT_TOOL, *common, "--output-prefix", "one", *flags)
    for key in ("rejected", "chosen"):
        script(pairs, CHAT_TOOL, *common, "--output-prefix", "two", "--jsonl-keys", key, "--only-last")
    for name in ("chosen_document", "chosen_label_document", "rejected_document", "rejected_label_document"):
        one, two = (IndexedDataset(pairs / f"{prefix}_{name}") for prefix in ("one", "two"))
        assert one.sizes.tolist() == two.sizes.tolist() and one.tokens.tolist() == two.tokens.tolist()
    assert IndexedDataset(pairs / "one_chosen_reward_document").tokens.tolist() == [3.0] * 11


VALUES = {
    "sft": {"train_impl": "normal", "lr": 1e-5, "min_lr": 1e-6},
    "dpo": {"train_impl": "dpo", "lr": 5e-7, "min_lr": 0.0, "dpo_beta": 0.01, "dataset_impl": "pairwise"},
    "kto": {"train_impl": "kto", "lr": 1e-5, "min_lr": 1e-6, "kto_beta": 0.1},
    "reinforce": {"train_impl": "reinforce", "lr": 1e-5, "min_lr": 1e-6, "kl_impl": "abs", "dataset_impl": "online"},
    "rm": {"train_impl": "rm", "lr": 5e-7, "min_lr": 0.0, "dataset_impl": "pairwise"},
}
COMMON = {"model_parallel_size": 4, "zero_stage": 1, "precision": "bfloat16", "seq_length": 1024, "warmup": 0.1}
COMMON |= {"train_micro_batch_size_per_gpu": 32, "gradient_accumulation_steps": 2, "train_iters": 477}
COMMON |= {"finetune": True, "load": "checkpoints/neox_converted/llama3-8b-instruct", "pack_impl": "unpacked"}
COMMON |= {"num_layers": 32, "hidden_size": 4096, "num_kv_heads": 8, "ffn_width": 14336, "rotary_emb_base": 500000}


@pytest.mark.parametrize("name", sorted(path.stem.removeprefix("llama3-8b-") for path in CONFIGS.glob("llama3-8b-*")))
def test_configs_have_the_values_of_gpt_neox(name: str) -> None:
    args = derive(NeoXArgs.from_files([str(CONFIGS / f"llama3-8b-{name}.yml")]), Facts(vocab_size=128256))
    online = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4} if name == "reinforce" else {}
    for key, value in (COMMON | VALUES[name] | online).items():
        assert args.get(key) == value, key
    assert args.notes == () and args.data.allow_chopped == (name in ("sft", "reinforce"))
    if not online:
        assert args.training.do_train and args.training.do_valid and args.training.do_test


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps, and tokenised chats with and without labels, of one tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    write_folder(folder / "tok", "chatml")
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat(f"q{i}", "yes")}) + "\n" for i in range(9))
    )
    for name in ("olmo3_dolci_sft_instruct", "sfm-mcqa-sft-mix"):
        prefix = folder / f"data/{name}/{name}"
        prefix.parent.mkdir(parents=True)
        script(folder, CHAT_TOOL, "--input", "chats.jsonl", "--tokenizer-path", "tok", "--output-prefix", prefix)
    keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(folder / "tok/tokenizer.json"), "train_iters": 2}
    data = str(folder / "data/sfm-mcqa-sft-mix/sfm-mcqa-sft-mix_messages_document")
    report = run({**keys, "train_data_paths": [data], "save": str(folder / "mid"), "num_kv_heads": 1})[0]
    assert not report.error
    return folder


RECIPE = ("--filtering", "unfiltered", "--variant", "synthetic_alignment_mid", "--data-root", "data")


def test_the_recipe_by_name(base: Path) -> None:
    flags = ("--from", "mid", *RECIPE, "-o", "configs")
    (written,) = script(base, "post-training/make_sft_config.py", *flags).splitlines()
    assert written == "configs/sft_dolci_mcqa_instruct_unfiltered_synthetic_alignment_mid.yml"
    keys = yaml.safe_load((base / written).read_text())
    wanted = {"train_iters": 4627, "lr_decay_iters": 4627, "warmup": 0.05, "checkpoint_factor": 200, "finetune": True}
    wanted |= {"iteration": 2, "load": "mid", "train_data_weights": [0.89, 0.11], "pack_impl": "packed"}
    wanted |= {"num_kv_heads": 1, "hidden_size": 32, "activation": "swiglu", "num_layers": 2}
    assert {name: keys[name] for name in wanted} == wanted
    assert keys["optimizer"] == {"type": "Adam", "params": {"lr": 8e-5, "betas": [0.9, 0.95], "eps": 1e-8}}
    assert "train_label_data_paths" not in keys
    assert script(base, "post-training/make_sft_config.py", *flags) == f"{written}\n"  # the same file
    said = script(base, "post-training/make_sft_config.py", *flags, "--lr", "1e-4", check=2)
    assert written in said and "another config" in said


def test_a_run_of_ones_own_chats(base: Path) -> None:
    """The config runs, and trains the answers alone."""
    chats = "data/sfm-mcqa-sft-mix/sfm-mcqa-sft-mix_messages_document"
    flags = ("--from", "mid/global_step2", "--name", "own", "--data", chats, "--train-iters", 2)
    (written,) = script(base, "post-training/make_sft_config.py", *flags).splitlines()
    keys = yaml.safe_load((base / written).read_text())
    assert keys["train_label_data_paths"] == [chats.replace("messages_", "messages_label_")]
    paths = {name: [str(base / path) for path in keys[name]] for name in ("train_data_paths", "train_label_data_paths")}
    report = run({**keys, **paths, "load": str(base / "mid"), "save": str(base / "own")})[0]
    assert not report.error and report.steps == [1, 2]
    trained = sum(metrics["train/trained_tokens"] for _, metrics in report.logged)
    assert 0 < trained < 0.5 * sum(metrics["train/tokens"] for _, metrics in report.logged)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--from", "nowhere", *RECIPE), ("--from", "nowhere")),
        (("--from", "mid", *RECIPE, "--iteration", "7"), ("--from", "iteration 7")),
        (("--from", "mid", "--filtering", "half", "--variant", "v"), ("half", "unfiltered, filtered")),
        (("--from", "mid", "--name", "x", "--data", "missing"), ("missing",)),
        (("--from", "mid", "--name", "x"), ("--data",)),
        (("--from", "mid", *RECIPE, "--tokenizer", "other/tokenizer.json"), ("mid/global_step2", "tokenizer")),
    ],
)
def test_what_does_not_fit(base: Path, flags: tuple[str, ...], parts: tuple[str, ...]) -> None:
    if "other/tokenizer.json" in flags and not (base / "other").exists():
        write_json(base / "other/tokenizer.json")
    said = script(base, "post-training/make_sft_config.py", *flags, check=2)
    assert all(part in said for part in parts), said


JUDGE = """
from megatron.inference.rewards import REWARDS

@REWARDS.register("longer")
def longer(rollout):
    return len(rollout.completion) - len(rollout.fields["other"]) if rollout.prompt != "?" else None

@REWARDS.register("broken")
def broken(rollout):
    return rollout.fields["absent"]
"""


def test_the_rate_at_which_answers_win(tmp_path: Path) -> None:
    """A judge sees both answers, what it fails on is left out, and the range is scipy's."""
    (tmp_path / "judge.py").write_text(JUDGE)
    texts = {"prompts": "abcde?", "ours": ["xx", "xx", "xx", "x", "x", "x"], "theirs": ["x", "x", "x", "x", "xx", "x"]}
    for name, found in texts.items():
        key = "prompt" if name == "prompts" else "text"
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({key: text}) + "\n" for text in found))
    flags = ("--prompts", "prompts.jsonl", "--plugin", "judge.py", "--judge")
    found = json.loads(script(tmp_path, "post-training/win_rate.py", "ours.jsonl", "theirs.jsonl", *flags, "longer"))
    assert {name: found[name] for name in ("wins", "ties", "losses", "failed")} == {
        "wins": 3,
        "ties": 1,
        "losses": 1,
        "failed": 1,
    }
    assert found["win_rate"] == 3.5 / 5
    turned = json.loads(script(tmp_path, "post-training/win_rate.py", "theirs.jsonl", "ours.jsonl", *flags, "longer"))
    assert turned["win_rate"] == pytest.approx(1 - found["win_rate"]) and turned["low"] == pytest.approx(
        1 - found["high"]
    )
    (tmp_path / "ours.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("xx", "xx", "xx", "x", "", "x"))
    )
    (tmp_path / "theirs.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("x", "x", "x", "xx", "x", "x"))
    )
    found = json.loads(script(tmp_path, "post-training/win_rate.py", "ours.jsonl", "theirs.jsonl", *flags, "longer"))
    interval = binomtest(3, 5).proportion_ci(method="wilson")
    assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))


def test_answers_that_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "bare.jsonl").write_text('\n{"prompt": "a"}\n')
    for name, text in (
        ("p", '{"prompt": "a", "answer": "b"}\n'),
        ("one", '{"text": "x"}\n'),
        ("two", '{"text": "x"}\n' * 2),
        ("bad", '{"words": "x"}\n'),
    ):
        (tmp_path / f"{name}.jsonl").write_text(text)
    flags = ("--prompts", "p.jsonl", "--judge")
    for answers, judge, part in (
        ("two", "exact", "two.jsonl: 2 answers to the 1 prompts of p.jsonl"),
        ("bad", "exact", "bad.jsonl:1: no answer"),
        ("none", "exact", "none.jsonl: cannot be read"),
        ("two", "exac", "Did you mean 'exact'?"),
    ):
        file = f"{answers}.jsonl"
        assert part in script(tmp_path, "post-training/win_rate.py", file, file, *flags, judge, check=2)
    common = ("post-training/win_rate.py", "one.jsonl", "one.jsonl", "--plugin", "judge.py", "--prompts")
    said = script(tmp_path, *common, "bare.jsonl", "--judge", "exact", check=2)
    assert "--prompts: bare.jsonl:2 has no field `answer`" in said
    said = script(tmp_path, *common, "p.jsonl", "--judge", "broken", check=2)
    assert "one.jsonl:1: the judgement broken failed: KeyError: 'absent'" in said
