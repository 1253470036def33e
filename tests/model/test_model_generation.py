"""generate.py's modes as users of GPT-NeoX know them, at pipe_parallel_size 0, 1, 2 and model_parallel_size 1, 2."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.errors import UserError
from megatron.inference.modes import write_texts
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.training.setup import Process
from tests.distributed import run_distributed
from tests.inference.models import GPT_NEOX, VOCAB, Layout, Letters, make_checkpoint

pytestmark = pytest.mark.cpu

TEXT_GENERATION = str(Path(__file__).resolve().parents[2] / "configs" / "text_generation.yml")
RECORD = {"context", "text", "length", "finished", "message", "duration_seconds"}
PROMPTS = ["abc", "The end.", "x", "a b c d", "12345"]
LAYOUTS = [(0, 1), (1, 2), (2, 1), (2, 2)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training run's config and its checkpoint, and prompts."""
    folder = tmp_path_factory.mktemp("run")
    make_checkpoint(folder / "checkpoints", GPT_NEOX, Layout(pp=2))
    keys = {**GPT_NEOX, "save": str(folder / "checkpoints"), "sequence_parallel": True, "data_path": "gone"}
    (folder / "run.yml").write_text(yaml.safe_dump({**keys, "train_micro_batch_size_per_gpu": 2}))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def generate_py(rank: int, world: int, run: Path, overrides: tuple[str, ...], typed: str = "") -> str:
    """What generate.py does on a rank; what rank 0 shows on stdout."""
    args = for_inference(NeoXArgs.from_files([str(run / "run.yml"), TEXT_GENERATION], list(overrides)))
    args = derive(args, Facts(vocab_size=VOCAB, num_devices=world))
    sizes = args.parallel
    topology = Topology(
        {"pipe": max(1, sizes.pipe_parallel_size), "data": sizes.data_parallel_size, "model": sizes.model_parallel_size}
    )
    device = torch.device("cpu")
    state = ParallelState.build(topology, rank, device, sizes.sequence_parallel) if world > 1 else None
    sys.stdin, shown, sys.stdout = io.StringIO(typed), sys.stdout, io.StringIO()
    try:
        assert write_texts(Process(args, state or ParallelState.single(), Letters())) == 0
        return sys.stdout.getvalue()
    finally:
        sys.stdin, sys.stdout = sys.__stdin__, shown


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(path: Path) -> list[tuple[str, str, int]]:
    return [(record["context"], record["text"], record["length"]) for record in records(path)]


@pytest.mark.parametrize(("pipe", "model"), LAYOUTS)
@pytest.mark.parametrize("how", ["temperature=0", "temperature=0.9", "recompute=true"])
def test_prompts_from_a_file_give_the_same_records_everywhere(run: Path, pipe: int, model: int, how: str):
    given = (f"sample_input_file={run}/prompts.txt", how, "maximum_tokens=10", "top_k=0")
    generate_py(0, 1, run, (*given, f"sample_output_file={run}/reference.jsonl"))
    overrides = (*given, f"sample_output_file={run}/out.jsonl")
    overrides += (f"pipe_parallel_size={pipe}", f"model_parallel_size={model}")
    ranks = max(1, pipe) * model
    shown = run_distributed(generate_py, ranks, run, overrides)[0]
    assert texts(run / "out.jsonl") == texts(run / "reference.jsonl")
    for prompt, record in zip(PROMPTS, records(run / "out.jsonl"), strict=True):
        assert set(record) == RECORD and record["context"] == prompt and record["duration_seconds"] > 0
        assert record["length"] == len(record["text"]) == 10 or record["finished"]
        assert prompt + record["text"] in shown


def test_prompts_are_dealt_over_copies_of_the_model(run: Path):
    """Three copies, five prompts; then more copies than prompts."""
    given = (f"sample_input_file={run}/prompts.txt", "maximum_tokens=6")
    generate_py(0, 1, run, (*given, f"sample_output_file={run}/reference.jsonl"))
    run_distributed(generate_py, 3, run, (*given, f"sample_output_file={run}/out.jsonl"))
    assert texts(run / "out.jsonl") == texts(run / "reference.jsonl")
    run_distributed(generate_py, 3, run, ("num_samples=1", f"sample_output_file={run}/one.jsonl"))
    assert len(records(run / "one.jsonl")) == 1


def test_unconditional_samples_differ_and_repeat_with_their_seed(run: Path):
    shown = []

    def samples(seed: int) -> list[tuple[str, str, int]]:
        path = run / f"{seed}.jsonl"
        given = (f"sample_output_file={path}", f"seed={seed}", "maximum_tokens=8", "num_samples=4")
        shown.append(generate_py(0, 1, run, given))
        return texts(path)

    first = samples(1)
    assert re.findall(r"^--- sample (\d) of 4 -{60}-*$", shown[0], re.MULTILINE) == ["1", "2", "3", "4"]
    assert first == samples(1) != samples(2)
    assert len(set(first)) == 4 and all(context == "" for context, _, _ in first)


@pytest.mark.parametrize("world", [1, 2])
def test_interactive_prompts_are_answered_in_turn(run: Path, world: int):
    options = ("temperature=0", "maximum_tokens=5", f"pipe_parallel_size={world}")
    shown = run_distributed(generate_py, world, run, ("text_gen_type=interactive", *options), "abc\n\nxyz\n")[0]
    (run / "two.txt").write_text("abc\nxyz\n")
    files = (f"sample_input_file={run}/two.txt", f"sample_output_file={run}/two.jsonl")
    generate_py(0, 1, run, (*files, *options[:2]))
    assert shown == "".join(f"{text}\n" for _, text, _ in texts(run / "two.jsonl"))


@pytest.mark.parametrize("world", [1, 2])
def test_logits_are_those_of_the_last_stage(run: Path, world: int):
    path = run / "logits.jsonl"
    overrides = (f"sample_output_file={path}", "return_logits=true", "temperature=0", "maximum_tokens=4")
    overrides += ("num_samples=1", f"pipe_parallel_size={world}")
    run_distributed(generate_py, world, run, overrides)
    (record,) = records(path)
    assert set(record) == RECORD | {"logits"} and len(record["logits"]) == record["length"]
    best = [max(range(VOCAB), key=row.__getitem__) for row in record["logits"]]
    assert Letters().detokenize(best) == record["text"]


@pytest.mark.parametrize("how", [(1, 1, "recompute=true"), (2, 2, "recompute=false")], ids=["alone", "spread"])
def test_stop_strings_and_log_probabilities_are_the_same_everywhere(run: Path, how: tuple[int, int, str]):
    """A stop string of three tokens; log-probabilities by the logits, in fp64, whatever the temperature."""
    common = (f"sample_input_file={run}/prompts.txt", "maximum_tokens=12", "temperature=0.8", "seed=5")
    generate_py(0, 1, run, (*common, "return_logits=true", f"sample_output_file={run}/free.jsonl"))
    free = records(run / "free.jsonl")
    stop = free[1]["text"][4:7]
    assert len(stop) == 3
    pipe, model, cache = how
    given = (*common, "return_logprobs=true", f"sample_output_file={run}/stopped.jsonl", cache)
    given += (f"stop_strings={[stop]}", f"pipe_parallel_size={pipe}", f"model_parallel_size={model}")
    run_distributed(generate_py, pipe * model, run, given)
    for record, whole in zip(records(run / "stopped.jsonl"), free, strict=True):
        assert set(record) == RECORD | {"logprobs"}
        text = whole["text"].split(stop)[0]
        assert record["text"] == text and record["finished"] == (stop in whole["text"] or whole["finished"])
        kept = len(text) + 3 if stop in whole["text"] else len(text)
        assert record["length"] == len(record["logprobs"]) == kept
        assert "".join(one["token"] for one in record["logprobs"]) == whole["text"][:kept]
        logits = torch.tensor(whole["logits"][:kept], dtype=torch.float64)
        for row, one in zip(logits.log_softmax(dim=-1), record["logprobs"], strict=True):
            assert one["logprob"] == pytest.approx(float(row[one["id"]]), abs=2e-4)


def test_a_prompt_of_the_command_line_is_shown_as_it_is_completed(run: Path):
    common = ("temperature=0", "maximum_tokens=6")
    (run / "two.txt").write_text("abc\nxyz\n")
    generate_py(0, 1, run, (*common, f"sample_input_file={run}/two.txt", f"sample_output_file={run}/two.jsonl"))
    (_, first, _), (_, second, _) = texts(run / "two.jsonl")
    given = (*common, "prompt=abc", "pipe_parallel_size=2", f"sample_output_file={run}/shown.jsonl")
    assert run_distributed(generate_py, 2, run, given) == [f"abc{first}\n", ""]
    assert [text for _, text, _ in texts(run / "shown.jsonl")] == [first]
    shown = generate_py(0, 1, run, (*common, "prompt=[abc, xyz]", f"sample_output_file={run}/both.jsonl"))
    assert shown == f"abc{first}\nxyz{second}\n"


def test_a_prompt_that_is_too_long_says_so_and_the_others_are_completed(run: Path):
    limit = GPT_NEOX["max_position_embeddings"]
    (run / "long.txt").write_text("y" * limit + "\nabc\n")
    generate_py(0, 1, run, (f"sample_input_file={run}/long.txt", f"sample_output_file={run}/long.jsonl"))
    too_long, fine = records(run / "long.jsonl")
    assert too_long["text"] == "" and f"the model takes {limit}" in too_long["message"]
    assert fine["text"] and (fine["message"] is None or "positions" in fine["message"])


def test_nothing_is_written_next_to_the_records(run: Path):
    before = set(os.listdir(run / "checkpoints"))
    (run / "made").mkdir()
    generate_py(0, 1, run, (f"sample_output_file={run}/made/deep/out.jsonl", "num_samples=1", "maximum_tokens=2"))
    assert os.listdir(run / "made" / "deep") == ["out.jsonl"]
    assert set(os.listdir(run / "checkpoints")) == before


def fail(rank: int, world: int, run: Path, overrides: tuple[str, ...]) -> str:
    try:
        generate_py(rank, world, run, overrides)
    except UserError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("override", ["load=/nowhere", "iteration=77", "sample_input_file=/nowhere.txt"])
def test_what_is_missing_is_an_error_on_every_rank(run: Path, override: str):
    wanted = override.partition("=")[2]
    assert all(wanted in message for message in run_distributed(fail, 2, run, (override, "pipe_parallel_size=2")))
