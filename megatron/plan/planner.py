"""The dry run: check what the real run would check, and show what it would do. Starts no rank, allocates no tensor."""

from __future__ import annotations

from megatron.checkpoint.start import Start
from megatron.cluster.launch import Placement
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_device, derive
from megatron.plan import sections
from megatron.plan.memory import estimate
from megatron.plan.preflight import kind_of, preflight
from megatron.plan.refusals import check_data_plan
from megatron.plan.saves import saves_of
from megatron.plan.stages import stage_sizes, topology
from megatron.run.data import resolve_epochs
from megatron.run.data_table import evaluation_notes


def plan(args: NeoXArgs, placement: Placement, user_script: str, command: str | None = None) -> str:
    """The text of the dry run for a loaded config; `command` is what would be run.

    What is checked follows the script: `eval.py` and `generate.py` need a checkpoint, everything else is taken for
    training and needs data. Raises the `UserError` that the real run would end with.
    """
    kind = kind_of(user_script) or "train"
    args = derive(args, Facts(num_devices=placement.world_size))
    found = preflight(args, kind)
    tokenizer, vocab_size = found.tokenizer, found.tokenizer.vocab_size
    args = resolve_epochs(derive(args, Facts(vocab_size, placement.world_size)), tokenizer)
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
    parts = [
        sections.config(args),
        sections.differences(args),
        sections.plugins(args),
        sections.ranks(topology(args, experts=True), placement),
        sections.model(args, tokenizer.describe(), vocab_size),
        sections.stages(stages, held),
        sections.memory(args, memory),
    ]
    if isinstance(found.start, Start):
        plan = check_data_plan(args, tokenizer, found.start)
        begins = found.start.step if found.start.kind in ("load", "init") else 0  # after steps of another folder
        saves = saves_of(args, sum(stage.parameters or 0 for stage in stages), begins)
        parts += [
            sections.steps(args, vocab_size),
            sections.callbacks(args),
            sections.data(plan.table(), [*plan.notes(), *evaluation_notes(plan, args.training.eval_iters)]),
            sections.checkpoints(found.start, saves, args.checkpoint.save),
        ]
    else:
        parts.append(sections.with_title("checkpoint", [f"reads {found.start.path}"]))
    if kind == "train" and placement.gpus == 0:
        try:  # a plan may be made on another machine than the run's, so this alone is no reason to refuse it
            check_device(args, on_gpu=False)
        except UserError as error:
            parts.append(sections.with_title("not on this machine, which has no GPU", [str(error)]))
    if command is not None:
        parts.append(sections.with_title("would run", [command]))
    parts.append(["Dry run: nothing was started."])
    return "\n\n".join("\n".join(part) for part in parts if part)
