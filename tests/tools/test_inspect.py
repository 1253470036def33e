"""tools/datasets/inspect.py as a command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.plan.inspect_cli import main
from tests.data.chat.chats import say
from tests.data.chat.templates import write_folder
from tests.data.corpus import write
from tests.tools.command import ROOT, run

pytestmark = pytest.mark.cpu

TOOL = "tools/datasets/inspect.py"
ANSWERS = ["Blue 🤖.", "4.", "Two:\n  café, naïve"]
END = "<|im_end|>"
CONFIG = """\
num_layers: 1
hidden_size: 16
num_attention_heads: 2
seq_length: 96
pos_emb: rotary
train_batch_size: 2
train_micro_batch_size_per_gpu: 1
train_iters: 3
eval_iters: 0
tokenizer_type: HFTokenizer
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with labels, a run that trains on them, and its tokenizer."""
    folder = tmp_path_factory.mktemp("inspect")
    tokenizer = write_folder(folder / "t", "chatml")
    with (folder / "chats.jsonl").open("w") as file:
        for answer in ANSWERS:
            file.write(json.dumps({"messages": say(("user", "What? 日本"), ("assistant", answer))}) + "\n")
    run(
        *("tools/datasets/preprocess_data_with_chat_template.py", "--input", folder / "chats.jsonl"),
        *("--output-prefix", folder / "c", "--tokenizer-path", tokenizer),
    )
    (folder / "run.yml").write_text(
        f"{CONFIG}vocab_file: {tokenizer}/tokenizer.json\n"
        f"train_data_paths: [{folder}/c_messages_document]\n"
        f"train_label_data_paths: [{folder}/c_messages_label_document]\n"
        "pack_impl: unpacked\nintra_document_masking: true\n"
    )
    return folder


def documents(folder: Path, *arguments: object, **how: int) -> str:
    given = (f"{folder}/c_messages_document", "--vocab-file", folder / "t" / "tokenizer.json")
    return run(TOOL, "documents", *given, *arguments, **how).stdout


def test_what_is_trained_are_the_answers(folder: Path) -> None:
    out = documents(folder)
    assert re.findall(r"\[\[(.*?)\]\]", out, re.DOTALL) == [answer + END for answer in ANSWERS]
    assert out.count("<|im_start|>user\nWhat? 日本<|im_end|>") == 3
    assert "\x1b" not in out
    colored = documents(folder, "--documents", "2", "--color", "always")
    green = re.findall(r"\x1b\[32m(.*?)\x1b\[0m", colored, re.DOTALL)
    assert green == ["Two:", "  café, naïve" + END]
    everything = documents(folder, "--labels", "none", "--documents=-1:")
    assert "[[" not in everything and "document 2" in everything and "document 1 " not in everything


def test_documents_as_json(folder: Path) -> None:
    data, labels = (IndexedDataset(folder / f"c_messages_{kind}document") for kind in ("", "label_"))
    records = [json.loads(line) for line in documents(folder, "--json").splitlines()]
    assert [one["document"] for one in records] == [0, 1, 2]
    for k, one in enumerate(records):
        assert one["tokens"] == data.get(k).tolist()
        assert one["trained"] == (labels.get(k) >= 0).astype(int).tolist()
        assert ANSWERS[k] + END in one["text"]


def test_samples_of_a_run(folder: Path) -> None:
    out = run(TOOL, "sample", folder / "run.yml", "--sample", "0..2").stdout
    assert sorted(re.findall(r"\[\[(.*?)\]\]", out, re.DOTALL)) == sorted(answer + END for answer in ANSWERS)
    titles = re.findall(r"== sample (\d+) .*\b(train)\b.* step (\d+) \(iteration (\d+)\b.*, row", out)
    assert titles == [("0", "train", "0", "1"), ("1", "train", "0", "1"), ("2", "train", "1", "2")]
    assert out.count("-- padding: ") == 3
    same = run(TOOL, "sample", folder / "run", "--step", "1", "train_iters=2", "--json").stdout.splitlines()
    records = [json.loads(line) for line in same]
    assert [one["sample"] for one in records] == [2, 3]
    for one in records:
        assert len(one["tokens"]) == len(one["targets"]) == len(one["mask"]) == 96
        trained = [target for target, yes in zip(one["targets"], one["mask"]) if yes]
        (piece,) = one["origin"]["pieces"]
        label = IndexedDataset(folder / "c_messages_label_document").get(piece["document"])
        assert trained == label[label >= 0].tolist()
        assert piece["length"] == one["length"] == len(label)


def test_steps_of_a_run_and_back(folder: Path) -> None:
    lines = run(TOOL, "steps", folder / "run.yml", "--steps", "0..2", "--json").stdout.splitlines()
    records = [json.loads(line) for line in lines]
    assert [(one["step"], one["iteration"], one["row"], one["sample"]) for one in records] == [
        *((0, 1, 0, 0), (0, 1, 1, 1), (1, 2, 0, 2), (1, 2, 1, 3), (2, 3, 0, 4), (2, 3, 1, 5))
    ]
    assert "rank" not in records[0]
    again = run(TOOL, "steps", folder / "run.yml", "--iterations", "1..3", "--json").stdout.splitlines()
    assert again == lines
    ranked = run(TOOL, "steps", folder / "run.yml", "--steps", "0", "--json", "--rank", "global_num_gpus=2").stdout
    assert [(json.loads(line)["rank"], json.loads(line)["micro_batch"]) for line in ranked.splitlines()] == [
        *((0, 0), (1, 0))
    ]
    wanted = [one["sample"] for one in records if one["origin"]["pieces"][0]["document"] == 1]
    found = run(TOOL, "steps", folder / "run.yml", "--find", f"{folder}/c_messages_document:1", "--json").stdout
    assert [json.loads(line)["sample"] for line in found.splitlines()] == wanted != []
    text = run(TOOL, "steps", folder / "run.yml", "--find", "c_messages_document:1").stdout
    assert [int(n) for n in re.findall(r"^  (\d+) \(row", text, re.MULTILINE)] == wanted
    assert re.search(r"sample \d+ of its order\): 1\[0:\d+\]", text)


def test_a_page_of_samples(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(TOOL, "sample", folder / "run.yml", "--samples", "4", "--html", page)
    assert done.stdout == f"{page}: 4 samples\n"
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'<h2><a href="#row-\d">sample (\d+) of train', text) == ["0", "1", "3", "5"]
    done = documents(folder, "--html", page)
    assert "3 documents" in done and "🤖</b>" in page.read_text(encoding="utf-8")


def test_preference_pairs_stand_together(folder: Path, tmp_path: Path) -> None:
    tokenizer, question = folder / "t", ("user", "Good?")
    records = [{side: say(question, ("assistant", f"{side} {k}")) for side in ("chosen", "rejected")} for k in range(2)]
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in records))
    run(
        *("tools/datasets/preprocess_data_with_chat_template.py", "--input", source, "--output-prefix", tmp_path / "p"),
        *("--tokenizer-path", tokenizer, "--chosen-key", "chosen", "--rejected-key", "rejected"),
    )
    shown = run(TOOL, "documents", tmp_path / "p_rejected_document", "--vocab-file", tokenizer).stdout
    expected = [f"{side} {k}{END}" for k in range(2) for side in ("chosen", "rejected")]
    assert re.findall(r"\[\[(.*?)\]\]", shown, re.DOTALL) == expected


def train(config: Path, *options: str) -> None:
    """Run `deepy.py train.py`."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DLTS_HOSTFILE")
    env = {name: value for name, value in os.environ.items() if name not in drop and not name.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, ROOT / "deepy.py", ROOT / "train.py", config, *options],
        env=env | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_real_run_trained_as_many_tokens_in_each_step(folder: Path, tmp_path: Path) -> None:
    """Of two ranks, by their own count; the answers have different lengths."""
    options = (f"save={tmp_path}", "log_interval=1", "global_num_gpus=2", "train_iters=4")
    train(folder / "run.yml", *options)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    counted = {one["step"]: one["train/trained_tokens"] for one in metrics if "train/trained_tokens" in one}
    lines = run(TOOL, "sample", folder / "run.yml", "--steps", "0..3", "--json", *options).stdout.splitlines()
    shown: dict[int, int] = {}
    for one in map(json.loads, lines):
        shown[one["iteration"]] = shown.get(one["iteration"], 0) + sum(one["mask"])
    assert shown == counted and len(set(shown.values())) > 1


def test_a_resumed_run_is_shown_in_its_own_order(tmp_path: Path) -> None:
    """Trained for 2 steps, then made longer: the past is shown as it was, which a fresh run's order is not."""
    rng = np.random.RandomState(0)
    data = write(tmp_path / "d", [rng.randint(1, 200, 23).tolist() for _ in range(12)])
    config = tmp_path / "run.yml"
    base = CONFIG.replace("HFTokenizer", "bytes").replace("seq_length: 96", "seq_length: 16")
    config.write_text(f"{base}data_path: {data}\nsplit: 1,0,0\nmax_position_embeddings: 16\n")
    saved = (f"save={tmp_path / 'save'}", "log_interval=1")

    def shown(*options: str) -> list[list[int]]:
        out = run(TOOL, "sample", config, "--sample", "0..3", "--json", *options).stdout.splitlines()
        return [json.loads(line)["tokens"] for line in out]

    short, fresh = shown("train_iters=2"), shown("train_iters=40")
    assert short != fresh
    train(config, *saved, "train_iters=2")
    longer = (*saved, "train_iters=40", "train_batch_size=4", "gradient_accumulation_steps=4")
    assert shown(*longer) == short
    # the file that every run leaves in its folder is a config too
    out = run(TOOL, "sample", tmp_path / "save" / "resolved.yml", "--sample", "0..3", "--json").stdout
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == short
    out = run(TOOL, "steps", config, "--steps", "0..3", "--json", *longer).stdout.splitlines()
    found = [(json.loads(line)["step"], json.loads(line)["sample"]) for line in out]
    assert [sample for _, sample in found] == list(range(12))
    assert [step for step, _ in found] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]  # batches of 2, then of 4
    # a run of its own that goes on behind the samples of this one
    after = (f"save={tmp_path / 'other'}", f"init_from.path={tmp_path / 'save'}", "train_iters=40")
    out = run(TOOL, "sample", config, "--samples", "2", "--json", *after).stdout.splitlines()
    assert [json.loads(line)["sample"] for line in out] == [4, 79]
    assert "started at step 2" in run(TOOL, "steps", config, "--step", "1", *after, check=2).stderr


# ---- wrong input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show",), "'show' is no command; there are documents, sample, steps"),
        (("sample", "{}/run.yml", "--sample", "5..3"), "--sample 5..3: give a number, or a range A..B"),
        (("sample", "{}/run.yml", "--sample", "6"), "sample 6: the run reads samples 0..5 of train (steps 0..2)"),
        (("sample", "{}/run.yml", "--sample", "1", "--step", "1"), "--sample and --steps: give one of them"),
        (("sample", "{}/run.yml", "--role", "valid"), "no data called 'valid', but train"),
        (("sample", "{}/nothing.yml"), "nothing.yml"),
        (("sample", "{}/run.yml", "train_itres=3"), "train_itres"),
        (("steps", "{}/run.yml"), "--steps A..B"),
        (("steps", "{}/run.yml", "--steps", "0..3"), "step 3: the run has steps 0..2 of train"),
        (("steps", "{}/run.yml", "--iterations", "0"), "the log counts from 1"),
        (("steps", "{}/run.yml", "--find", "c_messages_document"), "give FILE:DOC"),
        (("steps", "{}/run.yml", "--find", "c_mesages_document:1"), "Did you mean 'c_messages_document'?"),
        (("documents", "{}/nothing"), "nothing"),
        (("documents", "{}/c_messages_document", "--documents", "3"), "nothing to show, there are 3"),
        (("documents", "{}/c_messages_document", "--documents", "a:b"), "give a number, or a range such as 0:5"),
        (("documents", "{}/c_messages_document", "--html", "x.html"), "--vocab-file"),
        (("documents", "{}/c_messages_document", "--wrong"), "unrecognized arguments: --wrong"),
        (("documents", "{}/c_messages_document", "--tokenizer-type", "bytes"), "tokenizer"),
    ],
)
def test_wrong_input_is_one_message(
    folder: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megatron.log.configure", lambda **how: None)  # for one process, which this is not
    with pytest.raises(UserError) as error:
        main([one.format(folder) for one in arguments], {})
    assert message in str(error.value)
    assert capsys.readouterr().out == ""


def test_the_exit_code_of_wrong_input(folder: Path) -> None:
    done = run(TOOL, "sample", folder / "run.yml", "--sample", 6, check=2)
    assert done.stderr.startswith("error: sample 6: ") and "Traceback" not in done.stderr and done.stdout == ""


def test_help(folder: Path) -> None:
    out = run(TOOL, "--help").stdout
    assert "examples:" in out and all(f"inspect.py {name}" in out for name in ("documents", "sample", "steps"))
    assert "--json" in run(TOOL, "steps", "--help").stdout


def test_starts_without_torch(folder: Path) -> None:
    code = (
        "import sys; from megatron.plan.inspect_cli import main; "
        f"main(['sample', '{folder}/run.yml', '--ids'], {{}}); "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    run("-c", code)


# ---- its name


def test_other_tools_still_find_python_s_own_inspect() -> None:
    """Python looks into a script's folder first, so `import inspect` beside this file finds this file."""
    check = (
        "import sys; sys.path.insert(0, 'tools/datasets'); import inspect, dataclasses; "
        "assert inspect.__file__.endswith('inspect.py') and 'datasets' not in inspect.__file__, inspect; "
        "assert inspect.signature(dataclasses.dataclass) and sys.path[0] == 'tools/datasets'; "
        "import tools.datasets.inspect as ours; assert not hasattr(ours, 'signature')"
    )
    run("-c", check)
    run("tools/datasets/dataset_token_count.py", "--help")
