"""`prepare_hf_dataset.py` as a command, against local files and against a Hub on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.tokens.indexed import IndexedDataset
from tests.data.hub_server import Fault, Hub, Repo
from tests.tokenizer.vocabularies import byte_level, write_json
from tests.tools.command import ROOT

pytestmark = pytest.mark.cpu

TOOL = "tools/datasets/prepare_hf_dataset.py"
ROWS = [{"text": f"hello world {i}", "title": f"t{i}"} for i in range(20)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_json(tmp_path / "tokenizer" / "tokenizer.json")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        # No two alike: the client fetches the same content once.
        files = {f"data/train-{i}.jsonl": LINES.replace(b"hello", b"hello" * (i + 1)) for i in range(3)}
        hub.datasets["me/corpus"] = Repo({**files, "data/test-0.jsonl": LINES})
        yield hub


class Command:
    """Runs the tool with its caches and default outputs in one folder."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        offline = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
        self.environment = {**os.environ, **offline, **environment, "PYTHONPATH": str(ROOT)}

    def __call__(self, *flags: object, check: int = 0, tool: str = TOOL) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / tool), *map(str, flags)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done


@pytest.fixture
def local(tmp_path: Path) -> Command:
    return Command(tmp_path, {})


@pytest.fixture
def online(tmp_path: Path, hub: Hub) -> Command:
    return Command(tmp_path, hub.environment(tmp_path / "home"))


# ---- local files


def test_the_command_of_the_forks_users(tmp_path: Path, tokenizer: Path, local: Command) -> None:
    """Every flag, under the path that the tool has there, from another folder than the repository's."""
    (tmp_path / "corpus.jsonl").write_bytes(LINES)
    done = local(
        *("--dataset", "me/corpus", "--subset", "s", "--split", "train", "--data-files", "corpus.jsonl"),
        *("--output-base", "base", "--text-column", "title", "--vocab-file", tokenizer, "--hf-tokenizer", tokenizer),
        *("--num-proc", 2, "--batch-size", 10, "--tokenize-workers", 2, "--download-workers", 2),
        tool="prepare_hf_dataset.py",
    )
    prefix = "base/corpus_s_train/corpus_s_train_text_document"
    assert done.stdout.splitlines() == [
        "20 documents, 50 tokens",
        f'"train_data_paths": ["{prefix}"],',
        '"tokenizer_type": "HFTokenizer",',
        f'"vocab_file": "{tokenizer}",',
    ]
    assert len(IndexedDataset(tmp_path / prefix)) == 20
    assert [line[:5] for line in done.stderr.splitlines() if line.startswith("[")] == [f"[{i}/5]" for i in range(1, 6)]


def test_stages_are_left_out(tmp_path: Path, tokenizer: Path, local: Command) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(LINES)
    common = ("--dataset", "corpus.jsonl", "--vocab-file", tokenizer)
    done = local(*common, "--count-only")
    assert done.stdout.startswith("20 documents, ")
    assert not (tmp_path / "data").exists()
    done = local(*common, "--skip-count", "--skip-tokenize", "--join-columns", "title, text")
    assert done.stdout == ""
    first = (tmp_path / "data" / "corpus_train" / "dataset.jsonl").read_text().splitlines()[0]
    assert json.loads(first) == {"text": "t0\n\nhello world 0"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dataset", "gone.jsonl"], "--dataset gone.jsonl: no such file"),
        (["--dataset", "me/gone"], "HF_HUB_OFFLINE|Offline"),
        (["--text-column", "txt"], "--text-column: no column 'txt'. Did you mean 'text'?"),
        (["--join-columns", "text,b"], "--join-columns: no column 'b'"),
        (["--midtrain-chat-messages"], "--midtrain-chat-messages: no column 'messages'"),
        (["--num-proc", "0"], "--num-proc 0: give at least 1"),
        (["--split", "test"], "Unknown split"),
        (["--vocab-file", "gone.json"], "vocab_file: no such file: gone.json"),
        (["--vocab-file", "noeod.json"], "needs an end-of-document token"),
        (["--data-files", "./gone.jsonl"], "./gone.jsonl: no such file"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    tmp_path: Path, tokenizer: Path, local: Command, flags: list[str], said: str
) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(LINES)
    write_json(tmp_path / "noeod.json", byte_level(("<s>",)))
    done = local("--dataset", "corpus.jsonl", "--vocab-file", tokenizer, *flags, check=2)
    assert re.search(said, done.stderr)
    assert done.stderr.count("error:") == 1
    assert not (tmp_path / "data").exists()


def test_help_is_there_at_once(local: Command) -> None:
    started = time.monotonic()
    done = local("--help")
    assert time.monotonic() - started < 40
    for flag in (
        "--midtrain-chat-messages",
        "--download-workers",
        "--data-dir",
        "documentation/huggingface_datasets.md",
    ):
        assert flag in done.stdout


def test_terminated_in_the_middle_of_the_export(tmp_path: Path, tokenizer: Path, local: Command) -> None:
    """What is written half goes; the next command does the rest."""
    path = tmp_path / "corpus.jsonl"
    os.mkfifo(path)
    command = [sys.executable, str(ROOT / TOOL), "--dataset", "corpus.jsonl", "--skip-count", "--skip-tokenize"]
    big = tmp_path / "big.jsonl"
    with big.open("wb") as file:
        for _ in range(2000):
            file.write(LINES * 100)
    path.unlink()
    big.rename(path)
    process = subprocess.Popen(
        [*command, "--num-proc", "1"], cwd=tmp_path, env=local.environment, stderr=subprocess.PIPE
    )
    folder = tmp_path / "data" / "corpus_train"
    deadline = time.monotonic() + 30
    while not list(folder.glob("*.tmp")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert [p.name for p in folder.iterdir()] == ["pipeline_results.json"]
    assert json.loads((folder / "pipeline_results.json").read_text())["status"] == "failed"


def test_the_guides_example(tmp_path: Path, local: Command) -> None:
    """The commands under "Try it here", as written."""
    guide = (ROOT / "documentation" / "huggingface_datasets.md").read_text(encoding="utf-8")
    section = guide.split("## Try it here\n")[1].split("\n## ")[0]
    script = "".join(re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL))
    for name in ("tools", "prepare_hf_dataset.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = f'python() {{ "{sys.executable}" "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-e", "-c", python + script],
        cwd=tmp_path,
        env=local.environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = "".join(re.findall(r"```text\n(.*?)```", section, flags=re.DOTALL))
    assert done.stdout.endswith(shown), done.stdout


def test_every_command_of_the_guide_has_flags_that_exist() -> None:
    guide = (ROOT / "documentation" / "huggingface_datasets.md").read_text(encoding="utf-8")
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / TOOL).read_text(encoding="utf-8")))
    code = re.findall(r"```bash\n(.*?)```", guide, flags=re.DOTALL)
    commands = [c for block in code for c in block.replace("\\\n", " ").splitlines() if "prepare_hf_dataset.py" in c]
    assert len(commands) > 5
    for command in commands:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", command)) <= known, command


# ---- the Hub


def test_a_dataset_of_the_hub(tmp_path: Path, tokenizer: Path, hub: Hub, online: Command) -> None:
    common = ("--dataset", "me/corpus", "--vocab-file", tokenizer, "--num-proc", 2)
    done = online(*common)
    assert done.stdout.startswith("60 documents, ")
    assert hub.count("GET /datasets/me/corpus/resolve") == 3  # the split's files, and no other
    results = json.loads((tmp_path / "data" / "corpus_train" / "pipeline_results.json").read_text())
    assert results["num_documents"] == 60

    again = online(*common)
    assert again.stderr.count("done already") == 3
    assert hub.count("GET /datasets/me/corpus/resolve") == 3

    hub.datasets["me/corpus"].files["data/train-1.jsonl"] = LINES * 2  # a new commit
    assert online(*common).stdout.startswith("80 documents, ")

    online("--dataset", "me/corpus", "--split", "test", "--skip-count", "--skip-tokenize")
    assert len((tmp_path / "data" / "corpus_test" / "dataset.jsonl").read_text().splitlines()) == 20


def test_without_the_hub_an_earlier_command_is_resumed(
    tmp_path: Path, tokenizer: Path, hub: Hub, online: Command
) -> None:
    """Downloaded with a network, tokenised without."""
    common = ("--dataset", "me/corpus", "--vocab-file", tokenizer, "--num-proc", 1)
    online(*common, "--skip-tokenize")
    online.environment["HF_HUB_OFFLINE"] = "1"
    before = len(hub.requests)
    done = online(*common)
    assert re.search("me/corpus: .*earlier", done.stderr)
    assert len(hub.requests) == before
    assert len(IndexedDataset(tmp_path / "data" / "corpus_train" / "corpus_train_text_document")) == 60
    assert "cannot be loaded" in online(*common, "--split", "test", "--count-only", check=2).stderr


def test_subsets_and_files_of_the_hub(tmp_path: Path, hub: Hub, online: Command) -> None:
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*\n" for name in "ab")
    files = {"a/0.jsonl": LINES, "b/0.jsonl": LINES * 3, "other.jsonl": LINES * 2}
    hub.datasets["me/many"] = Repo({"README.md": f"---\nconfigs:\n{configs}---\n".encode(), **files})
    common = ("--dataset", "me/many", "--skip-count", "--skip-tokenize", "--num-proc", 1)

    def rows(name: str) -> int:
        return len((tmp_path / "data" / name / "dataset.jsonl").read_text().splitlines())

    online(*common, "--subset", "b")
    assert rows("many_b_train") == 60
    online(*common, "--data-files", "other.jsonl")
    online(*common, "--data-files", "a/*.jsonl", "--split", "train[:5]", "--output-dir", tmp_path / "data" / "slice")
    assert (rows("many_train"), rows("slice")) == (40, 5)
    said = online(*common, check=2).stderr
    assert "['a', 'b']" in said and "--subset" in said
    said = online(*common, "--subset", "c", check=2).stderr
    assert "BuilderConfig 'c' not found" in said and "--subset" in said
    said = online("--dataset", "me/gone", "--skip-count", "--skip-tokenize", check=2).stderr
    assert "doesn't exist on the Hub" in said and "hf auth login" in said


@pytest.mark.parametrize(
    "fault",
    [
        Fault("/api/datasets/me/corpus", 2, headers={"Retry-After": "1"}),
        Fault("/api/datasets/me/corpus", 1, headers={"RateLimit": '"api";r=0;t=1'}),
        Fault("/resolve/", 8, headers={"Retry-After": "0"}),
        Fault("train-1.jsonl", 8, headers={"Retry-After": "0"}),
    ],
    ids=["dataset", "dataset, RateLimit", "any file", "one data file"],
)
def test_too_many_requests_are_waited_for(hub: Hub, online: Command, fault: Fault) -> None:
    """8 refusals: the client's own six tries at a file are not enough."""
    fault = Fault(fault.match, fault.times, fault.status, fault.headers)
    hub.faults.append(fault)
    done = online("--dataset", "me/corpus", "--skip-count", "--skip-tokenize", "--num-proc", 1)
    assert fault.times == 0
    assert re.search(r"\(try 1 of 10\).*\b[0-9]+ s\b", done.stderr)
    assert "60 docs" in done.stderr


def test_other_errors_of_the_hub_are_not_waited_for(hub: Hub, online: Command) -> None:
    hub.faults.append(Fault("/api/datasets/me/corpus", 99, status=403, headers={}))
    done = online("--dataset", "me/corpus", "--skip-count", "--skip-tokenize", check=2)
    assert "waiting" not in done.stderr
    assert "--dataset me/corpus: cannot be loaded" in done.stderr


def test_a_table_of_the_hub(tmp_path: Path, hub: Hub, online: Command) -> None:
    """CSV goes through `datasets`, here as everywhere."""
    table = "text,title\n" + "".join(f"{row['text']},{row['title']}\n" for row in ROWS[:7])
    hub.datasets["me/table"] = Repo({"train.csv": table.encode()})
    hub.faults.append(Fault("train.csv", 8, headers={"Retry-After": "0"}))
    online("--dataset", "me/table", "--skip-count", "--skip-tokenize", "--num-proc", 2)
    lines = (tmp_path / "data" / "table_train" / "dataset.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [row["text"] for row in ROWS[:7]]


def test_a_tokenizer_of_the_hub(tmp_path: Path, tokenizer: Path, hub: Hub, online: Command) -> None:
    hub.models["me/tok"] = Repo({"tokenizer.json": tokenizer.read_bytes(), "model.safetensors": b"x" * 1000})
    hub.faults.append(Fault("/api/models/me/tok", 1, headers={"Retry-After": "1"}))
    done = online("--dataset", "me/corpus", "--hf-tokenizer", "me/tok", "--num-proc", 1)
    assert re.search(r"me/tok: .*\(try 1 of 10\).*\b1 s\b", done.stderr)
    assert hub.count("model.safetensors") == 0
    data = IndexedDataset(tmp_path / "data" / "corpus_train" / "corpus_train_text_document")
    assert data.get(0).tolist()[-1] == 0
    assert "--hf-tokenizer me/gone" in online("--dataset", "me/corpus", "--hf-tokenizer", "me/gone", check=2).stderr


def test_the_default_tokenizer_is_the_forks(tmp_path: Path, tokenizer: Path, hub: Hub, online: Command) -> None:
    name = "geodesic-research/gpt-neox-instruct-tokenizer"
    (tmp_path / "corpus.jsonl").write_bytes(LINES)
    hub.models[name] = Repo({"tokenizer.json": tokenizer.read_bytes()})
    done = online("--dataset", "corpus.jsonl", "--count-only")
    assert done.returncode == 0 and done.stdout.startswith("20 documents, ") and name in done.stderr
