"""What evaluation and generation read besides the weights: which checkpoint, prompts, names of tasks.

Needs neither torch nor a device, so that the launcher refuses bad input before it starts a rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.checkpoint.find import Checkpoint, find_checkpoint
from megatron.errors import UserError
from megatron.home import installs
from megatron.inference.suites import read_suites
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.schema_post import PostConfig
from megatron.neox_arguments.schema_train import GenerationConfig
from megatron.rows import row
from megatron.tokenizer.model_tokens import inherit

Prompt = str | list[dict[str, Any]]
"""A text, or a chat: its turns, each with `role` and `content`."""


def requested_checkpoint(args: NeoXArgs) -> Checkpoint:
    """The checkpoint to use: `iteration`, or the latest of `load` (else of `save`).

    Raises:
        UserError: neither key is set, or the folder holds no such checkpoint, or one of a reward model.
    """
    options = args.checkpoint
    if options.load is None and options.save is None:
        raise UserError("load is not set: evaluation and generation need a checkpoint, e.g. load=checkpoints")
    key = "load" if options.load is not None else "save"
    found = find_checkpoint(options.load or options.save or "", options.iteration, key)
    if "reward" in (args.model.output_head, found.manifest.config.get("output_head")):
        raise UserError(
            f"{key}: {found.path} holds a reward model (train_impl: rm), which gives a number for a text and no words; "
            "its accuracy on pairs is what training logs for its validation data, and "
            "tools/ckpts/convert_neox_to_hf.py exports it as AutoModelForSequenceClassification"
        )
    return found


def check_reward_model(checkpoint: Checkpoint) -> None:
    """Raise `UserError` unless a checkpoint that `reward_model` names is one."""
    if checkpoint.manifest.config.get("output_head") != "reward":
        raise UserError(f"reward_model: {checkpoint.path} is of no reward model; train one with train_impl: rm")


def inherit_tokens(args: NeoXArgs, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The key `model_tokens` of the config, with what the checkpoint knows (model_tokens.py)."""
    return inherit(args.tokenizer.model_tokens, checkpoint.manifest.config.get("model_tokens"))


def batch_size(args: NeoXArgs) -> int:
    """Texts that a copy of the model evaluates at a time."""
    return args.generation.eval_batch_size or args.training.train_micro_batch_size_per_gpu or 1


def check_requests(options: GenerationConfig, kind: str) -> None:
    """What a run of this kind (train, eval, generate or serve) is asked to do makes sense. Raises `UserError`."""
    if kind == "serve":
        check_serving(options)
        return
    for folder in options.eval_tasks_path or () if kind != "generate" else ():
        if not Path(folder).is_dir():
            raise UserError(f"eval_tasks_path: there is no folder {folder}")
    if kind == "eval" and not (options.eval_tasks or options.eval_suite):
        raise UserError(
            "eval_tasks is not set: name what to evaluate, e.g. --eval_tasks lambada_openai hellaswag, or --eval_suite "
            "core"
        )
    if kind != "generate":
        if (options.eval_tasks or options.eval_suite) and find_spec("lm_eval") is None:
            raise UserError(f"eval_tasks: tasks come from lm-evaluation-harness, not installed: {installs('eval')}")
        read_suites(options.eval_suite)
        return
    if options.text_gen_type == "input-file":
        prompts_of(options)
    check_prompt_end(options.prompt_end)
    if options.text_gen_type not in ("interactive", "precompute"):
        check_writable(options.sample_output_file)


def check_serving(options: GenerationConfig) -> None:
    """Raises `UserError` for a port or a number of texts that cannot be."""
    if not 0 <= options.serve_port < 1 << 16:
        raise UserError(f"serve_port: {options.serve_port} is not between 0 and 65535")
    if options.serve_batch_size < 1:
        raise UserError(f"serve_batch_size: {options.serve_batch_size} is less than 1")


def prompts_of(options: GenerationConfig) -> list[Prompt]:
    """What there is to complete: `prompt`, else the file. Raises `UserError`, also where both are given."""
    if options.prompt is None:
        file = options.sample_input_file
        return (
            _read_objects(file)
            if file is not None and file.endswith(".jsonl")
            else [*read_prompts(file, options.prompt_end)]
        )
    if options.sample_input_file is not None:
        raise UserError(f"prompt: sample_input_file is set, too ({options.sample_input_file}); give one of them")
    if blank := [number for number, text in enumerate(options.prompt, start=1) if not text.strip()]:
        raise UserError(f"prompt: number {blank[0]} is empty; leave prompt out to generate without one")
    return list(options.prompt)


def read_prompts(file: str | None, prompt_end: str, key: str = "sample_input_file") -> list[str]:
    """The prompts of the file that `key` names, separated by `prompt_end`; see `clean_prompt`. Blank ones are left out.

    Raises:
        UserError: there is no such file, it is not UTF-8 text, or it holds no prompt.
    """
    if file is None:
        raise UserError("text_gen_type input-file needs sample_input_file (-i FILE)")
    text = _read(file, key)
    check_prompt_end(prompt_end)
    prompts = [clean_prompt(part, prompt_end, first=i == 0) for i, part in enumerate(text.split(prompt_end))]
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise UserError(f"{key}: {file} holds no prompt")
    return prompts


def _read_objects(file: str) -> list[Prompt]:
    """The prompts of a file with an object a line."""
    return [prompt for prompt, _ in read_objects(file, "sample_input_file")]


def rollout_prompts(post: PostConfig, key: str = "rollout_prompts") -> list[tuple[Prompt, dict[str, Any]]]:
    """The prompts that `key` names, each with the other fields of its line. Raises `UserError`, also for a line
    without a field that `reward` reads."""
    needs = row("reward", post.reward).get("reads", ()) if post.reward is not None else ()
    read = (read_objects(file, key, needs) for file in getattr(post, key) or ())
    return [prompt for prompts in read for prompt in prompts]


def read_objects(file: str, key: str, needs: Sequence[str] = ()) -> list[tuple[Prompt, dict[str, Any]]]:
    """The prompts of a file with an object a line, each with the other fields of its line, among them those that it
    `needs`. Raises `UserError`."""
    lines = enumerate(_read(file, key).split("\n"), start=1)  # other ends of lines may be in a text
    prompts = []
    for number, line in lines:
        if line.strip():
            where = f"{key}: {file}:{number}"
            prompts.append(_from_object(line, where))
            if lacking := [name for name in needs if name not in prompts[-1][1]]:
                raise UserError(f"{where} has no field `{lacking[0]}`, which the reward reads; add it, or set another")
    if not prompts:
        raise UserError(f"{key}: {file} holds no prompt")
    return prompts


def _read(file: str, key: str) -> str:
    if not Path(file).is_file():
        raise UserError(f"{key}: {file} does not exist")
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: {file} is not UTF-8 text ({error})") from error


def _from_object(line: str, where: str) -> tuple[Prompt, dict[str, Any]]:
    """`{"prompt": text}`, or `{"messages": [{"role": ..., "content": ...}, ...]}`, and the other fields."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error})") from error
    if isinstance(item, dict) and isinstance(text := item.get("prompt"), str) and text.strip():
        return text, {key: value for key, value in item.items() if key != "prompt"}
    turns = item.get("messages") if isinstance(item, dict) else None
    if isinstance(turns, list) and turns and all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return turns, {key: value for key, value in item.items() if key != "messages"}
    raise UserError(f"{where} has neither a text `prompt` nor `messages`, a list of objects with `role` and `content`")


def clean_prompt(part: str, prompt_end: str, *, first: bool) -> str:
    """A prompt from the text between two `prompt_end`; `first`: before the first one.

    Between line breaks or blanks it is stripped, as in GPT-NeoX. Between other texts it stays as it is, since a chat's
    prompt may have to end with a line break; only a line break right after a `prompt_end` belongs to that.
    """
    if not prompt_end.strip(" \t\r\n"):
        return part.strip()
    return part if first else part.removeprefix("\n")


def check_prompt_end(prompt_end: str) -> None:
    """Raises `UserError` when it is empty."""
    if not prompt_end:
        raise UserError("prompt_end is empty: give the text that separates prompts, for instance '\\n'")


def output_path(options: GenerationConfig, output_is_set: bool) -> Path | None:
    """Where the records go: `sample_output_file`, or next to the file of prompts when that is not set; nowhere if the
    prompts are no file's."""
    if options.text_gen_type == "input-file" and options.prompt is not None and not output_is_set:
        return None
    if options.text_gen_type == "input-file" and not output_is_set and options.sample_input_file:
        return Path(options.sample_input_file + ".output.jsonl")
    return Path(options.sample_output_file or "samples.jsonl")


def check_writable(file: str | None) -> None:
    """A folder cannot be overwritten by records; better known before an hour of generation. Raises `UserError`."""
    if file and Path(file).is_dir():
        raise UserError(f"sample_output_file: {file} is a folder; name a file")
