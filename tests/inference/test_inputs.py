"""What a user asks for: a config without training keys, prompts, checkpoints; and what is refused at once."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megatron.cluster.command_line import parse_launcher_command_line
from megatron.errors import UserError
from megatron.inference.evaluate import results_prefix, stamped
from megatron.inference.inputs import check_requests, output_path, prompts_of, read_prompts, requested_checkpoint
from megatron.inference.modes import prompts_from
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import DEFAULT_BATCH, for_inference

pytestmark = pytest.mark.cpu

MODEL = "num_layers: 2\nhidden_size: 16\nnum_attention_heads: 2\nseq_length: 8\n"
TRAINING = """\
train_batch_size: 48
train_micro_batch_size_per_gpu: 2
gradient_accumulation_steps: 3
global_num_gpus: 32
model_parallel_size: 2
pipe_parallel_size: 2
sequence_parallel: true
checkpoint_activations: true
zero_optimization: {stage: 1}
bf16: {enabled: true}
data_path: nowhere
save: run
train_iters: 10
log_dir: logs
seed: 99
"""


def prepared(tmp_path: Path, text: str, *overrides: str) -> NeoXArgs:
    (tmp_path / "run.yml").write_text(text)
    return for_inference(NeoXArgs.from_files([str(tmp_path / "run.yml")], list(overrides)))


def test_a_model_alone_is_enough(tmp_path: Path):
    args = derive(prepared(tmp_path, MODEL), Facts(num_devices=1))
    assert args.training.train_micro_batch_size_per_gpu == DEFAULT_BATCH


def test_a_training_config_runs_on_any_number_of_ranks(tmp_path: Path):
    args = prepared(tmp_path, MODEL + TRAINING)
    assert for_inference(args) == args
    for ranks in (4, 8):
        derived = derive(args, Facts(num_devices=ranks))
        assert derived.parallel.data_parallel_size == ranks // 4
        assert derived.training.train_micro_batch_size_per_gpu == 2
        assert derive(for_inference(derived), Facts(num_devices=ranks)) == derived
    assert not derived.parallel.sequence_parallel
    assert (derived.optimizer.precision, derived.training.seed) == ("bfloat16", 99)
    # The run's folder is read, never written.
    assert (derived.checkpoint.load, derived.checkpoint.save, derived.logging.log_dir) == ("run", None, None)


def test_prompts_on_the_command_line_win_over_a_file_that_says_unconditional(tmp_path: Path):
    text = MODEL + "text_gen_type: unconditional\nsample_input_file: a.txt\n"
    assert derive(prepared(tmp_path, text)).generation.text_gen_type == "unconditional"
    chosen = derive(prepared(tmp_path, text, "sample_input_file=b.txt")).generation
    assert (chosen.text_gen_type, chosen.sample_input_file) == ("input-file", "b.txt")
    both = prepared(tmp_path, text, "sample_input_file=b.txt", "text_gen_type=interactive")
    assert derive(both).generation.text_gen_type == "interactive"


def test_prompts_are_separated_and_not_blank_and_lines_stripped(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two words \nthree", encoding="utf-8")
    assert read_prompts(str(path), "\n") == ["one", "two words", "three"]
    path.write_text("one\nline two###\n\n###drei\n", encoding="utf-8")
    assert read_prompts(str(path), "###") == ["one\nline two", "drei\n"]
    path.write_text("\n ask\n<|assistant|>\n@@\n@@\n  next\n<|assistant|>\n@@\n", encoding="utf-8")
    assert read_prompts(str(path), "@@") == ["\n ask\n<|assistant|>\n", "  next\n<|assistant|>\n"]


@pytest.mark.parametrize(
    ("content", "prompt_end", "message"),
    [
        (None, "\n", "does not exist"),
        (b" \n\n", "\n", "holds no prompt"),
        (b"one", "", "prompt_end is empty"),
        (b"\xff\xfe\xfa", "\n", "is not UTF-8 text"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, content: bytes | None, prompt_end: str, message: str):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(str(path), prompt_end)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("eval", (), "eval_tasks is not set"),
        ("eval", ("eval_suite=cor",), "eval_suite: .*Did you mean 'core'"),
        ("train", ("eval_suite=cor",), "eval_suite: .*Did you mean 'core'"),
        ("generate", ("text_gen_type=input-file",), "needs sample_input_file"),
        ("generate", ("sample_input_file=nowhere.txt",), "nowhere.txt does not exist"),
        ("generate", ("text_gen_type=interactive", 'prompt_end=""'), "prompt_end is empty"),
        ("generate", ("sample_output_file=/",), "/ is a folder"),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, kind: str, overrides: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=message):
        check_requests(derive(prepared(tmp_path, MODEL, *overrides)).generation, kind)


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_tasks_without_the_harness_are_refused_before_a_rank_starts(tmp_path: Path, monkeypatch, kind: str):
    monkeypatch.setattr("megatron.inference.inputs.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"eval_tasks: .*pip install -r /.*requirements-eval\.txt"):
        check_requests(derive(prepared(tmp_path, MODEL, "eval_tasks=[piqa]")).generation, kind)
    check_requests(derive(prepared(tmp_path, MODEL)).generation, "train")


def test_prompts_of_the_command_line(tmp_path: Path):
    text = MODEL + "text_gen_type: unconditional\n"
    options = derive(prepared(tmp_path, text, "prompt=one two")).generation
    assert (options.text_gen_type, prompts_of(options)) == ("input-file", ["one two"])
    assert prompts_of(derive(prepared(tmp_path, text, 'prompt=["1e-4", "#x "]')).generation) == ["1e-4", "#x "]
    with pytest.raises(UserError, match=r"prompt: sample_input_file is set, too \(a.txt\)"):
        prompts_of(derive(prepared(tmp_path, text, "prompt=x", "sample_input_file=a.txt")).generation)
    with pytest.raises(UserError, match="prompt: number 2 is empty"):
        prompts_of(derive(prepared(tmp_path, text, 'prompt=[x, " "]')).generation)
    parsed = parse_launcher_command_line([__file__, str(tmp_path / "run.yml"), "--prompt", "1e-4", "a: b"])
    assert parsed.overrides == ['prompt=["1e-4", "a: b"]']


def test_prompts_and_chats_of_a_jsonl_file(tmp_path: Path):
    turns = [{"role": "user", "content": "hi"}]
    path = tmp_path / "prompts.jsonl"
    options = derive(prepared(tmp_path, MODEL, f"sample_input_file={path}")).generation
    text = " a\n\u2028\x85b"  # unescaped, as other tools write them
    lines = [json.dumps(one, ensure_ascii=False) for one in ({"prompt": text, "id": 1}, {"messages": turns})]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    assert prompts_of(options) == [text, turns]
    for line, message in (
        ("nothing", r"prompts.jsonl:1 is not JSON"),
        ('{"text": "x"}', r"prompts.jsonl:1 has neither"),
    ):
        path.write_text(line)
        with pytest.raises(UserError, match=f"sample_input_file: .*{message}"):
            prompts_of(options)


def test_a_system_turn_needs_a_chat(tmp_path: Path):
    with pytest.raises(UserError, match="chat_system.*chat: true"):
        derive(prepared(tmp_path, MODEL, "chat_system=Be brief."))


def test_where_records_go(tmp_path: Path):
    options = derive(prepared(tmp_path, MODEL)).generation
    assert output_path(options, False) == Path("samples.jsonl")
    options = derive(prepared(tmp_path, MODEL, "sample_input_file=in.txt")).generation
    assert output_path(options, False) == Path("in.txt.output.jsonl")
    assert output_path(options, True) == Path("samples.jsonl")
    assert output_path(derive(prepared(tmp_path, MODEL, "prompt=x")).generation, False) is None


def test_results_lie_in_the_folder_of_the_run_that_is_evaluated(tmp_path: Path):
    (tmp_path / "a").mkdir()
    text = MODEL + f"save: {tmp_path}/a\n"
    assert results_prefix(derive(prepared(tmp_path, text))) == f"{tmp_path}/a/eval_results/"
    assert results_prefix(derive(prepared(tmp_path, text, "eval_results_prefix=x/y"))) == "x/y"
    assert results_prefix(derive(prepared(tmp_path, text, "load=owner/model"))) == ""  # no folder
    assert stamped("a/eval_results/").parent == Path("a/eval_results")


def test_a_missing_checkpoint_is_never_random_weights(tmp_path: Path):
    with pytest.raises(UserError, match="load is not set"):
        requested_checkpoint(prepared(tmp_path, MODEL))
    with pytest.raises(UserError, match=f"load: no checkpoint in {tmp_path}"):
        requested_checkpoint(prepared(tmp_path, MODEL, f"load={tmp_path}"))


@pytest.mark.parametrize(
    ("typed", "prompt_end", "expected"),
    [
        ("one\n\ntwo\n", "\n", ["one", "two"]),
        ("one\ntwo", "\n", ["one", "two"]),
        ("one\nmore###\ntwo ### three\n", "###", ["one\nmore", "two ", " three\n"]),
        ("", "\n", []),
    ],
)
def test_prompts_typed_by_a_user(typed: str, prompt_end: str, expected: list[str]):
    assert list(prompts_from(io.StringIO(typed), prompt_end)) == expected
