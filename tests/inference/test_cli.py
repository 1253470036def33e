"""generate.py and eval.py as a user starts them, on real ranks; bad input ends before any rank starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.inference.models import GPT_NEOX, Layout, make_checkpoint

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
BYTES = 512
KEYS = {**GPT_NEOX, "tokenizer_type": "CharLevelTokenizer", "save": "checkpoints", "max_position_embeddings": 64}
TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: choice.jsonl, cache_dir: cache}
output_type: multiple_choice
test_split: train
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_checkpoint(folder / "checkpoints", KEYS, Layout(tp=2), BYTES)
    (folder / "run.yml").write_text(yaml.safe_dump(KEYS))
    (folder / "text.yml").write_text((ROOT / "configs" / "text_generation.yml").read_text())
    (folder / "prompts.txt").write_text("hello\nworld, how\nx\n")
    (folder / "choice.yml").write_text(TASK)
    perplexity = TASK.replace("local_choice", "local_perplexity").replace("multiple_choice", "loglikelihood")
    perplexity = perplexity.replace("doc_to_choice: choices\n", "").replace(
        "doc_to_target: answer", "doc_to_target: ' a'"
    )
    perplexity = perplexity.replace("metric: acc, aggregation: mean, higher_is_better: true", "metric: perplexity")
    (folder / "perplexity.yml").write_text(perplexity)
    documents = [{"question": f"number {i}", "choices": [" a", " bb"], "answer": i % 2} for i in range(5)]
    (folder / "choice.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    return folder


def start(folder: Path, *argv: str, launcher: tuple[str, ...] = (str(ROOT / "deepy.py"),), typed: str = ""):
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, *argv]
    return subprocess.run(
        command, cwd=folder, env=env, input=typed, capture_output=True, text=True, timeout=200, check=False
    )


def records(path: Path) -> list[tuple[str, str]]:
    return [(r["context"], r["text"]) for r in map(json.loads, path.read_text(encoding="utf-8").splitlines())]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_generate_under_deepy_and_torchrun(folder: Path):
    generate = str(ROOT / "generate.py")
    given = ("-d", ".", "run.yml", "text.yml", "maximum_tokens=12", "temperature=0")
    layout = ("pipe_parallel_size=2", "model_parallel_size=2")
    done = start(folder, generate, *given, "-i", "prompts.txt", "-o", "out.jsonl", *layout)
    assert done.returncode == 0, done.stderr
    found = records(folder / "out.jsonl")
    assert [context for context, _ in found] == ["hello", "world, how", "x"] and all(text for _, text in found)
    assert "".join(found[0]) in done.stdout and "Traceback" not in done.stderr
    assert not (folder / "checkpoints" / "logs").exists()  # the run's folder is only read

    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    again = start(folder, generate, *given, "-i", "prompts.txt", "-o", "again.jsonl", launcher=torchrun)
    assert again.returncode == 0, again.stderr
    assert records(folder / "again.jsonl") == found

    stop = found[0][1][5]  # on every rank
    asked = start(
        folder,
        generate,
        *(*given, "text_gen_type=interactive", "model_parallel_size=2", f"stop_tokens={[ord(stop)]}"),
        typed="hello\nx\n",
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout == "".join(text.split(stop)[0] + "\n" for _, text in (found[0], found[2]))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_eval_under_deepy(folder: Path):
    given = ("-d", ".", "run.yml", "--eval_tasks", "choice.yml", "perplexity.yml", "--eval_results_prefix", "small")
    done = start(folder, str(ROOT / "eval.py"), *given, "model_parallel_size=2", "num_gpus=4", "tensorboard_dir=tb")
    assert done.returncode == 0, done.stderr
    assert "local_choice" in done.stdout and "acc" in done.stdout
    # Nothing of the harness's own: bars, a line for each metric, what it bootstraps.
    assert "it/s" not in done.stderr and "aggregation" not in done.stderr and "bootstrap" not in done.stdout
    (path,) = folder.glob("small_eval_results_*.json")
    results = json.loads(path.read_text())
    assert results["n-samples"]["local_choice"]["effective"] == 5  # on two copies of the model: none counted twice
    assert results["results"]["local_choice"]["acc,none"] in [i / 5 for i in range(6)]
    assert results["results"]["local_perplexity"]["perplexity_stderr,none"] > 0  # by forked processes
    assert list((folder / "tb").iterdir())
    assert results["config"]["checkpoint"].endswith("global_step1")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_eval_of_a_task_without_its_data_is_exit_code_2(folder: Path):
    (folder / "missing.yml").write_text(TASK.replace("choice.jsonl", "nothing.jsonl"))
    done = start(folder, str(ROOT / "eval.py"), "run.yml", "--eval_tasks", "missing.yml", "pipe_parallel_size=2")
    assert done.returncode == 2
    assert "eval_tasks: missing.yml cannot be loaded" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "argv", "message"),
    [
        ("generate.py", ("-i", "nowhere.txt"), "sample_input_file: nowhere.txt does not exist"),
        ("generate.py", ("load=empty",), "load: folder empty does not exist"),
        ("generate.py", ("iteration=5",), "checkpoint of iteration 5"),
        ("generate.py", ("temperature=-1",), "temperature"),
        ("eval.py", (), "eval_tasks is not set"),
    ],
)
def test_bad_input_is_refused_before_ranks_start(folder: Path, script: str, argv: tuple[str, ...], message: str):
    done = start(folder, str(ROOT / script), "run.yml", "pipe_parallel_size=2", *argv)
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr and "generating" not in done.stderr
