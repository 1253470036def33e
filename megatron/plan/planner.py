"""The dry run: check what the real run would check, and show what it would do. Starts no rank, allocates no tensor."""

from __future__ import annotations

from dataclasses import replace

from megatron.checkpoint.start import Start
from megatron.cluster.launch import Placement
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_device, check_trainable, derive
from megatron.neox_arguments.problems import Problems, collector
from megatron.plan import sections
from megatron.plan.memory import bytes_beside, estimate
from megatron.plan.preflight import Found, kind_of, located, preflight
from megatron.plan.refusals import check_data_plan, check_trained
from megatron.plan.saves import saves_of
from megatron.plan.stages import saved_parameters, stage_sizes, topology
from megatron.run.data import resolve_epochs, resume_order
from megatron.run.data_table import evaluation_notes

# Where there is no tokenizer to ask: GPT-2's, and within a row of memory that of GPT-NeoX-20B.
_ASSUMED_VOCABULARY = 50_257


def plan(
    args: NeoXArgs,
    placement: Placement | None,
    user_script: str,
    command: str | None = None,
    problems: Problems | None = None,
) -> str:
    """The text of the dry run for a loaded config; `command` is what would be run.

    What is checked follows the script: `eval.py` and `generate.py` need a checkpoint, everything else is taken for
    training and needs data. Raises the `UserError` that the real run would end with, one for all that is wrong. With
    `problems` missing files and keys are added to them and the rest is planned, with an assumed vocabulary where the
    tokenizer is missing. `placement` is None when they hold what is wrong with it.
    """
    kind = kind_of(user_script) or "train"
    with collector(problems) as found:
        args = derive(args, Facts(num_devices=placement.world_size if placement else None), found)
        if kind == "train":
            check_trainable(args, found)
        files = preflight(args, kind, problems=found)
        if placement is None or found.keys:
            found.raise_all()  # without these values there is nothing to plan
        assert placement is not None
        vocab_size = files.tokenizer.vocab_size if files.tokenizer else args.tokenizer.vocab_size or _ASSUMED_VOCABULARY
        args = derive(args, Facts(vocab_size, placement.world_size), found)
        if found.keys:
            found.raise_all()
        parts = _parts(args, placement, files, vocab_size, kind, found)
        if command is not None:
            parts.append(sections.with_title("would run", [command]))
        number = len(found.found)
        problems = f"{number} problem{'s' * (number > 1)} below"
        end = f", and the run would not start: see the {problems}" if number else ""
        parts.append([f"Dry run: nothing was started{end}."])
        return "\n\n".join("\n".join(part) for part in parts if part)
    raise AssertionError("the collector has raised")


def _parts(
    args: NeoXArgs, placement: Placement, files: Found, vocab_size: int, kind: str, found: Problems
) -> list[list[str]]:
    """The sections of the plan, as far as the files that are there allow."""
    tokenizer, start = files.tokenizer, files.start
    if tokenizer is not None and files.has_data:
        with found.collect():
            args = resolve_epochs(args, tokenizer)
    stages, held = stage_sizes(args, vocab_size)
    memory = [
        estimate(
            args,
            held=one,
            stage=stage.stage,
            blocks=[layer.index - 2 for layer in stage.layers if layer.is_block],
            padded_vocab_size=args.tokenizer.padded_vocab_size,
        )
        for stage, one in zip(stages, held, strict=True)
    ]
    with located(args, found):
        beside = bytes_beside(args)
        memory = [replace(one, weights=one.weights + beside) for one in memory]
    named = "missing; the size of its vocabulary is assumed" if tokenizer is None else tokenizer.describe()
    parts = [
        sections.config(args),
        sections.differences(args),
        sections.plugins(args),
        sections.ranks(topology(args, experts=True), placement),
        sections.model(args, named, vocab_size),
        sections.stages(stages, held),
        sections.memory(args, memory),
    ]
    if kind == "train":
        with found.collect():
            check_trained(args, vocab_size, held)
        parts += [sections.steps(args, vocab_size), sections.callbacks(args), sections.completions(args, files.prompts)]
    if isinstance(start, Start):
        if tokenizer is not None and files.has_data:
            with found.collect():
                data = check_data_plan(args, tokenizer, start)
                notes = [*data.notes(), *evaluation_notes(data, args.training.eval_iters)]
                parts.append(sections.data(data.table(), notes))
                parts.append(sections.read_ahead(args, data, resume_order(start, args.checkpoint.load)[1][1]))
        begins = start.step if start.kind in ("load", "init") else 0  # after steps of another folder
        saves = saves_of(args, saved_parameters(args, vocab_size, begins_anew=start.checkpoint is None), begins)
        parts.append(sections.checkpoints(start, saves, args.checkpoint.save))
    elif start is not None:
        parts.append(sections.with_title("checkpoint", [f"reads {start.path}"]))
    if kind == "train" and placement.gpus == 0:
        on_cpu = (
            Problems()
        )  # a plan may be made on another machine than the run's: this alone is no reason to refuse it
        check_device(args, on_gpu=False, problems=on_cpu)
        if on_cpu.found:
            parts.append(sections.with_title("not on this machine, which has no GPU", list(map(str, on_cpu.found))))
    return parts
