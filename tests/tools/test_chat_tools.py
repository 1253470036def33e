"""`preprocess_data_with_chat_template.py` and `preprocess_data_with_mask.py` as commands."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError
from megatron.log import get_logger
from tests.data.chat.chats import THREE, say
from tests.data.chat.templates import CHATML, write_folder
from tests.tokenizer.vocabularies import write_gpt2, write_json
from tests.tools.command import ROOT, run
from tools.datasets import preprocess_data_with_chat_template as chat_tool

pytestmark = pytest.mark.cpu

TOOL = "tools/datasets/preprocess_data_with_chat_template.py"
MASK = "tools/datasets/preprocess_data_with_mask.py"
TWO = say(("user", "q"), ("assistant", "a"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer") / "t", "chatml")


def jsonl(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".idx"))


def test_the_command_of_neox_users(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"conversation": THREE, "score": i / 4} for i in range(40)))
    done = run(
        *(TOOL, "--input", source, "--output-prefix", tmp_path / "out" / "c", "--tokenizer-path", tokenizer),
        *("--jsonl-keys", "conversation", "--generation-role", "assistant", "--only-last", "--reward-key", "score"),
        *("--dataset-impl", "mmap", "--workers", 2, "--num-docs", 40, "--log-interval", 10, "--ftfy"),
    )
    kinds = ("", "label_", "reward_")
    assert names(tmp_path / "out") == sorted(f"c_conversation_{k}document.{e}" for k in kinds for e in ("bin", "idx"))
    data, labels, rewards = (IndexedDataset(tmp_path / "out" / f"c_conversation_{kind}document") for kind in kinds)
    assert len(data) == 40
    assert data.sizes.tolist() == labels.sizes.tolist()
    assert (labels.dtype, rewards.dtype) == (np.int32, np.float32)
    assert rewards.tokens.tolist() == [i / 4 for i in range(40)]
    trained = int((labels.tokens >= 0).sum())
    share = 100 * trained / labels.num_tokens
    assert f"label_document: {trained} of {labels.num_tokens} tokens trained ({share:.1f} %)" in done.stdout
    assert "⟦Third.\n\nWith a second paragraph.<|im_end|>⟧" in done.stderr
    assert "⟦Hello, one." not in done.stderr


@pytest.mark.parametrize("flag", ["--no-mask", "--for-rm"])
def test_other_labels(tmp_path: Path, tokenizer: Path, flag: str) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"messages": TWO}, {"messages": THREE})
    run(TOOL, "--input", source, "--output-prefix", tmp_path / "c", "--tokenizer-path", tokenizer, flag)
    data, labels = (IndexedDataset(tmp_path / f"c_messages_{kind}document") for kind in ("", "label_"))
    expected = data.num_tokens if flag == "--no-mask" else 2
    assert int((labels.tokens == data.tokens).sum()) == int((labels.tokens >= 0).sum()) == expected


def test_columns_are_recognised_in_every_format(tmp_path: Path, tokenizer: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"prompt": "q", "chosen": TWO, "rejected": say(("user", "q"), ("assistant", "bad"))}] * 3
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "b.parquet")
    for name in ("a.jsonl.gz", "b.parquet"):
        prefix = tmp_path / name[0] / "p"
        done = run(TOOL, "--input", tmp_path / name, "--output-prefix", prefix, "--tokenizer-path", tokenizer)
        assert re.search("chats: .*'chosen'.*'rejected'.*'prompt'", done.stderr)
    kinds = ("chosen", "chosen_label", "rejected", "rejected_label")
    assert names(tmp_path / "a") == sorted(f"p_{kind}_document.{end}" for kind in kinds for end in ("bin", "idx"))
    for name in names(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_prompt_and_completion_with_a_template_of_ones_own(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ greeting }}" + CHATML)
    source = jsonl(tmp_path / "in.jsonl", {"q": "Hi", "a": "Hello"})
    done = run(
        *(TOOL, "--input", source, "--output-prefix", tmp_path / "c", "--tokenizer-path", tokenizer),
        *("--prompt-key", "q", "--completion-key", "a", "--chat-template", tmp_path / "mine.jinja"),
        *("--template-kwargs", '{"greeting": "Servus! "}'),
    )
    assert names(tmp_path) == [f"c_a_{kind}document.{end}" for kind in ("", "label_") for end in ("bin", "idx")]
    assert "Servus! <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>⟧" in done.stderr


def test_bad_records_stop_or_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"messages": TWO}, {"messages": "x"}, {"messages": TWO[:1]}, {"messages": []})
    command = (TOOL, "--input", source, "--output-prefix", tmp_path / "out" / "c", "--tokenizer-path", tokenizer)
    done = run(*command, check=2)
    assert "in.jsonl:2: key 'messages': " in done.stderr
    assert "--skip-bad-lines" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    done = run(*command, "--skip-bad-lines")
    assert "c_messages_document: 1 documents" in done.stdout
    assert "in.jsonl:3: key 'messages': " in done.stderr
    assert re.search(r"\b2 empty\b.*\b1 unusable\b", done.stderr)


def test_answers_without_an_end_are_warned_about(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", "bare")
    source = jsonl(tmp_path / "in.jsonl", {"messages": THREE})
    command = (TOOL, "--input", source, "--output-prefix", tmp_path / "c", "--tokenizer-path", folder)
    warning = "not every answer ends with a special token"
    assert warning in run(*command).stderr
    assert warning not in run(*command, "--only-last").stderr


def test_the_begin_of_a_long_first_chat_is_shown(tmp_path: Path, tokenizer: Path) -> None:
    turns = [part for i in range(3000) for part in say(("user", f"{i} and more"), ("assistant", f"{i}."))]
    source = jsonl(tmp_path / "in.jsonl", {"messages": turns})
    done = run(TOOL, "--input", source, "--output-prefix", tmp_path / "c", "--tokenizer-path", tokenizer)
    tokens = IndexedDataset(tmp_path / "c_messages_document").num_tokens
    assert "⟦7.<|im_end|>⟧" in done.stderr and "2999" not in done.stderr
    assert f"... and {tokens - chat_tool.SHOWN} tokens more" in done.stderr


def test_nothing_to_train_is_an_error(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"messages": TWO})
    command = (TOOL, "--input", source, "--output-prefix", tmp_path / "out" / "c", "--tokenizer-path", tokenizer)
    done = run(*command, "--generation-role", "model", check=2)
    assert "answer of model" in done.stderr
    assert "key 'messages'" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "in.jsonl: .*--jsonl-keys"),
        (["--tokenizer-path", "./none", "--jsonl-keys", "text"], "--tokenizer-path ./none"),
        (["--tokenizer-path", "BARE", "--jsonl-keys", "text"], "bare .*--chat-template FILE"),
        (["--jsonl-keys", "text", "--chat-template", "x.jinja"], "--chat-template x.jinja"),
        (["--jsonl-keys", "text", "--template-kwargs", "{"], "--template-kwargs {: "),
        (["--jsonl-keys", "text", "--template-kwargs", "[]"], r"--template-kwargs \[\]: "),
        (["--jsonl-keys", "text", "--chosen", "a"], "--jsonl-keys"),
        (["--chosen", "a"], "--chosen-key and --rejected-key"),
        (["--jsonl-keys", "text", "--dataset-impl", "lazy"], "--dataset-impl lazy"),
        (["--jsonl-keys", "text", "--max-length", "0"], "--max-length 0"),
        (["--jsonl-keys", "text"], r"in.jsonl:1: key 'text': "),
    ],
)
def test_mistakes(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    bare = write_folder(tmp_path / "bare", "chatml", chat_template=None)
    given = [str(bare) if word == "BARE" else word for word in more]
    source = jsonl(tmp_path / "in.jsonl", {"text": "x"})
    argv = [TOOL, "--input", source, "--output-prefix", tmp_path / "out" / "c", "--tokenizer-path", tokenizer, *given]
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    monkeypatch.setattr(chat_tool, "start_command", get_logger)
    with pytest.raises(UserError, match=message):
        chat_tool.main()
    assert not (tmp_path / "out").exists()


def test_shards_join_to_the_unsharded_bytes(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"messages": [*TWO, *say(("user", "x" * (i % 50)), ("assistant", str(i)))], "r": i} for i in range(400)]
    source = jsonl(tmp_path / "in.jsonl", *records)
    command = (TOOL, "--input", source, "--tokenizer-path", tokenizer, "--reward-key", "r")
    run(*command, "--output-prefix", tmp_path / "whole" / "c")
    for index in range(2):
        run(*command, "--output-prefix", tmp_path / "shards" / "c", "--shard", f"{index}/2")
    run(
        "tools/datasets/merge_datasets.py", "--input", tmp_path / "shards", "--output-prefix", tmp_path / "joined" / "c"
    )
    assert names(tmp_path / "whole")
    for name in names(tmp_path / "whole"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "joined" / name).read_bytes(), name


def test_a_shard_without_a_chat(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"messages": TWO})
    done = run(
        *(TOOL, "--input", source, "--tokenizer-path", tokenizer, "--output-prefix", tmp_path / "c", "--shard", "1/2")
    )
    assert "c_shard_00001_of_00002_messages_label_document: 0 documents" in done.stdout


def test_masked_texts(tmp_path: Path) -> None:
    vocab, merges = write_gpt2(tmp_path / "gpt2")
    source = jsonl(tmp_path / "in.jsonl", {"text": "hello Answer: world"}, {"text": "hello"})
    tokenizer = ("--vocab", vocab, "--merge-file", merges, "--tokenizer-type", "GPT2BPETokenizer", "--append-eod")
    command = (MASK, "--input", source, "--output-prefix", tmp_path / "out" / "m", *tokenizer)
    done = run(*command, "--mask-before-token", "Answer:", "--workers", 2)
    assert names(tmp_path / "out") == [
        f"m_{kind}_document.{end}" for kind in ("label", "text") for end in ("bin", "idx")
    ]
    data, labels = (IndexedDataset(tmp_path / "out" / f"m_{kind}_document") for kind in ("text", "label"))
    assert data.sizes.tolist() == labels.sizes.tolist()
    trained = labels.get(0)[labels.get(0) >= 0].tolist()
    assert trained == data.get(0)[-len(trained) :].tolist()
    assert len(trained) == 3  # Ġworl, d and the end
    assert labels.get(1).tolist() == data.get(1).tolist()
    assert "1 of 2 texts have no 'Answer:'" in done.stderr
    done = run(*command, "--mask-before-token", "Answer:", "--skip-unmatched")
    assert "texts have no" not in done.stderr
    assert len(IndexedDataset(tmp_path / "out" / "m_text_document")) == 1
    done = run(*command, "--jsonl-keys", "text", "text_label", check=2)
    assert "text_label" in done.stderr


GUIDE = (ROOT / "documentation" / "chat_data.md").read_text(encoding="utf-8")


def test_the_guide_names_flags_that_exist() -> None:
    library = ROOT / "megatron"
    sources = [ROOT / TOOL, ROOT / MASK, library / "data/tokenise/flags.py", library / "cluster/command_line.py"]
    known = set(re.findall(r'"(--[a-z-]+)"', "".join(path.read_text(encoding="utf-8") for path in sources)))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GUIDE))
    assert len(named) > 15
    assert named <= known


def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    """Word for word, in a folder that looks like the repository."""
    for name in ("tools", "megatron"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_json(tmp_path / "data" / "stdlib" / "tokenizer.json")
    jsonl(tmp_path / "pairs.jsonl", {"chosen": TWO, "rejected": say(("user", "q"), ("assistant", "b"))})
    jsonl(tmp_path / "qa.jsonl", {"text": "Question: a Answer: b"})
    blocks = re.findall(r"```\n(.*?)```", GUIDE, flags=re.DOTALL)
    commands = [block for block in blocks if "python tools/datasets/" in block]
    assert len(commands) == 3
    script = "set -e\n" + "".join(commands).replace("python tools/", f"{sys.executable} tools/")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "⟦4.<|endoftext|>⟧\n<|user|>\nAnd twice that?\n<|assistant|>\n⟦8.<|endoftext|>⟧" in done.stderr
    for name in (
        "chats_messages",
        "chats_messages_label",
        "pairs_chosen",
        "pairs_rejected_label",
        "qa_text",
        "qa_label",
    ):
        assert len(IndexedDataset(tmp_path / "data" / f"{name}_document")) > 0
