"""The sub-commands of `deepy`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One sub-command.

    Attributes:
        help: one line.
        where: a script below `HOME`, or a module, with `main(argv)`, and with `parser()` for the completion of flags.
        before: arguments that come before those of the user.
        is_run: it starts ranks with a config, and ends as runs do (megatron/errors.py).
    """

    help: str
    where: str
    before: tuple[str, ...] = ()
    is_run: bool = False


@dataclass(frozen=True)
class Group:
    """Sub-commands of a sub-command."""

    help: str
    commands: Mapping[str, Command]


def _launch(help: str, *before: str) -> Command:
    return Command(help, "megatron.commands.launch_cli", before, is_run=True)


def _ckpts(help: str, script: str) -> Command:
    return Command(help, f"tools/ckpts/{script}.py")


def _datasets(help: str, script: str) -> Command:
    return Command(help, f"tools/datasets/{script}.py")


_DATA = {
    "inspect": _datasets("show documents, training samples, and what was in which step", "inspect"),
    "verify": _datasets("check datasets: sizes, ids, checksums", "verify_dataset"),
    "merge": _datasets("join datasets", "merge_datasets"),
    "count": _datasets("count tokens and documents", "dataset_token_count"),
    "mixtures": Command("mixtures by name, and their shares by phase", "megatron.plan.mixtures_cli"),
    "convert": _datasets(".npy files and GPT-NeoX's old kinds to .bin/.idx", "convert_dataset"),
    "chats": _datasets("tokenise chats and preference pairs, with labels", "preprocess_data_with_chat_template"),
    "masked": _datasets("tokenise texts of which only the end is trained", "preprocess_data_with_mask"),
    "prepare": _datasets("a Hugging Face dataset, or files, to tokens in one go", "prepare_hf_dataset"),
    "corpus": Command("a named corpus: stdlib (on every machine), enwik8, pile, ...", "prepare_data.py"),
}
_CONVERT = {
    "to-peft": _ckpts("adapters to a folder of PEFT", "convert_neox_to_peft"),
    "from-peft": _ckpts("adapters of PEFT to a checkpoint", "convert_peft_to_neox"),
    "to-llama": _ckpts("to LLaMA's or Mistral's own files", "convert_neox_to_raw_llama"),
    "from-llama": _ckpts("LLaMA's or Mistral's own files to a checkpoint", "convert_raw_llama_weights_to_neox"),
    "to-mamba-ssm": _ckpts("to the folder that mamba-ssm opens", "convert_neox_to_mamba_ssm"),
    "split": _ckpts("rewrite the files for another number of tensor-parallel ranks", "merge20b"),
    "average": _ckpts("the mean of the weights of several checkpoints", "average"),
}
COMMANDS: dict[str, Command | Group] = {
    "new": Command("from a folder of text to a run that trains a model of it", "megatron.recipes.new_cli"),
    "train": _launch("train a model, or resume its run", "train.py"),
    "plan": _launch("check and plan a training, start nothing", "train.py", "--dry-run"),
    "explain": Command("a config key: value, source, meaning", "megatron.commands.explain_cli", is_run=True),
    "generate": _launch("write texts", "generate.py"),
    "chat": Command("talk to a model in the terminal", "megatron.commands.chat_cli"),
    "serve": _launch("answer over HTTP in OpenAI's form, with a page to talk to the model", "serve.py"),
    "eval": _launch("score a model on tasks", "eval.py"),
    "tokenize": _datasets("texts to token files", "preprocess_data"),
    "tokenizer": _datasets("train a tokenizer", "train_tokenizer"),
    "data": Group("token files", _DATA),
    "import": Command("a Hugging Face model to a checkpoint", "huggingface/convert_hf_to_neox.py"),
    "export": _ckpts("a checkpoint to a Hugging Face folder", "convert_neox_to_hf"),
    "convert": Group("checkpoints of other kinds", _CONVERT),
    "verify": _ckpts("do two models compute the same?", "verify"),
    "inspect-ckpt": _ckpts("what a checkpoint holds, how two differ", "inspect_checkpoints"),
    "diff-runs": _ckpts("at which step, layer and tensor two runs part", "diff_runs"),
    "report": Command("one page about runs: curves, spikes, restarts", "tools/report.py"),
    "monitor": Command("runs and jobs now, in the terminal", "slurm/monitor.py"),
    "submit": Command("send a training to a SLURM cluster", "slurm/submit.py"),
    "upload": Command("publish a checkpoint on the Hugging Face Hub", "huggingface/upload_checkpoint.py"),
    "compat": Command("try all GPT-NeoX configs of a folder", "tools/compat.py"),
    "environment": Command("does this environment have what Deepy needs?", "tools/check_environment.py"),
    "demo": Command("data, training on 4 ranks, resume, text, export, on this CPU", "tools/demo.py"),
}


def rows(table: Mapping[str, Command | Group], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Every sub-command with its words: `("data", "merge")`."""
    for name, row in table.items():
        if isinstance(row, Group):
            yield from rows(row.commands, (*path, name))
        else:
            yield (*path, name), row
