"""The command line of `deepy.py`, and the same grammar for ranks started by torchrun, srun or mpirun.

Both take config files and `key=value` overrides in any order; flags are those of GPT-NeoX's launcher and are turned
into overrides, so that there is one way in which a value reaches the config.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron.errors import UserError, nearest, nearest_name
from megatron.neox_arguments.problems import collector

_OVERRIDE = re.compile(r"^(?:--)?([A-Za-z_][A-Za-z0-9_.\-]*)=")
_CONFIG_SUFFIXES = (".yml", ".yaml", ".json")

# flag -> config key it overrides
_VALUE_FLAGS = {
    "--wandb_group": "wandb_group",
    "--wandb_run_name": "wandb_run_name",
    "--wandb_team": "wandb_team",
    "--eval_results_prefix": "eval_results_prefix",
    "--num_fewshot": "eval_num_fewshot",
    "--limit": "eval_task_limit",
    "--iteration": "iteration",
    "--hostfile": "hostfile",
    "--sample_input_file": "sample_input_file",
    "--sample_output_file": "sample_output_file",
}
# flag with several values -> config key
_LIST_FLAGS = {
    "--eval_tasks": "eval_tasks",
    "--eval_suite": "eval_suite",
    "--include_path": "eval_tasks_path",
    "--prompt": "prompt",
}
_OTHER_VALUE_FLAGS = (
    *("-d", "--conf_dir", "-H", "-i", "-o", "--explain", "--autotuning", "--resolved"),
    *("--local_rank", "--local-rank", "--megatron_config", "--deepspeed_config"),
)

EXAMPLES = """\
examples:
  one machine, two config files, one key changed:
    python deepy.py train.py configs/pythia/70M.yml configs/local_setup.yml train_iters=100
  reach inside a nested key:
    python deepy.py train.py run.yml optimizer.params.lr=3e-4 zero_optimization.stage=1
  check and plan everything, start nothing:
    python deepy.py train.py run.yml --dry-run
  check the data and build its sample indices ahead, on a node without GPUs:
    python deepy.py train.py run.yml --prepare
  where does a value come from and what does it mean?
    python deepy.py train.py run.yml --explain train_batch_size
  tensor parallel 2 x pipeline 2 on four CPU ranks:
    python deepy.py train.py configs/tiny.yml model_parallel_size=2 pipe_parallel_size=2
  several machines (`host slots=N` lines; add launcher=slurm, openmpi or mvapich for those):
    python deepy.py train.py run.yml -H hosts.txt
  evaluate, generate:
    python deepy.py eval.py -d configs run.yml --eval_tasks lambada hellaswag
    python deepy.py generate.py -d configs run.yml text_generation.yml -i prompts.txt -o out.jsonl
    python deepy.py generate.py -d configs run.yml text_generation.yml --prompt "Once upon a time" temperature=0
  the same run without deepy.py:
    torchrun --nproc_per_node 4 train.py run.yml

exit codes:
  0 done    2 the input is wrong    3 stopped on request, all saved: start again
  4 the numbers went bad    5 a rank hangs or was lost    6 disk full or another limit of the machine
  130 ended at once by a second Ctrl-C    1 anything else
"""


@dataclass(frozen=True)
class CommandLine:
    """What the user of `deepy.py` asked for. Config paths are complete, flags are already overrides."""

    user_script: str
    paths: list[str]
    overrides: list[str]
    dry_run: bool = False
    prepare: bool = False
    explain: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`s that name the nearest flag."""

    def error(self, message: str) -> NoReturn:
        match = re.search(r"unrecognized arguments: (-\S+)", message)
        if match:
            flags = [flag for action in self._actions for flag in action.option_strings]
            message += f".{nearest(match.group(1), flags)} Config keys are given as key=value."
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help)")


def parse_launcher_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse `deepy.py`'s arguments. Raises `UserError` for bad ones; `--help` prints and exits 0."""
    parser = _Parser(
        prog="deepy.py",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Start USER_SCRIPT on every rank with the merged config.",
        usage="deepy.py USER_SCRIPT CONF [CONF ...] [key=value ...] [flags]",
        epilog=EXAMPLES,
    )
    parser.add_argument("user_script", help="what every rank runs: train.py, eval.py, generate.py or your own script")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="check and plan everything, start nothing")
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="check the data and build its sample indices, start nothing (no GPU needed)",
    )
    parser.add_argument(
        "--explain",
        metavar="KEY",
        action="append",
        default=[],
        help="print value, source, default and meaning of a config key (may be repeated)",
    )
    parser.add_argument("--autotuning", choices=["tune", "run"], help="GPT-NeoX's flag; not available in Deepy")
    _add_shared_arguments(parser)
    items, inline = _split_overrides(argv)
    known = parser.parse_intermixed_args(items)
    if known.autotuning:
        raise UserError(
            "--autotuning is not available: set train_micro_batch_size_per_gpu and zero_optimization by hand "
            "(--dry-run estimates the memory of each choice)"
        )
    if not Path(known.user_script).is_file():
        raise UserError(f"{known.user_script}: no such script. The first argument is what the ranks run, e.g. train.py")
    return CommandLine(
        user_script=known.user_script,
        paths=_config_paths(known.conf_file, known.conf_dir),
        overrides=inline + _flag_overrides(known),
        dry_run=known.dry_run,
        prepare=known.prepare,
        explain=tuple(known.explain),
    )


def parse_rank_command_line(
    argv: Sequence[str], description: str | None = None, example: str = "run.yml"
) -> tuple[list[str], list[str], str | None]:
    """Parse the arguments of train.py, eval.py or generate.py on a rank: (config paths, overrides, resolved file).

    A rank started by deepy.py gets `--resolved FILE` and nothing else; one started by torchrun, srun or mpirun gets
    the same config files and overrides that deepy.py takes. `description` and `example` (arguments) are for --help.
    """
    parser = _Parser(
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description,
        usage="%(prog)s CONF [CONF ...] [key=value ...] [flags]",
        epilog=f"example:\n  torchrun --nproc_per_node 4 %(prog)s {example}",
    )
    parser.add_argument("--resolved", metavar="FILE", help="the resolved config, as written by deepy.py")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS
    )  # DeepSpeed's launcher adds it
    for flag in ("--megatron_config", "--deepspeed_config", "--explain"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in (("--dry-run", "--dry_run"), ("--prepare",)):
        parser.add_argument(*flag, action="store_true", help=argparse.SUPPRESS)
    _add_shared_arguments(parser, need_config=False)
    items, inline = _split_overrides(argv)
    known = parser.parse_intermixed_args(items)
    if known.megatron_config or known.deepspeed_config:
        raise UserError("--megatron_config belongs to GPT-NeoX's launcher: start the script with `python deepy.py`")
    if known.dry_run or known.explain or known.prepare:
        raise UserError(
            "--dry-run, --prepare and --explain belong to the launcher: "
            f"python deepy.py {parser.prog} CONF... --dry-run"
        )
    overrides = inline + _flag_overrides(known)
    paths = _config_paths(known.conf_file, known.conf_dir)
    if known.resolved and (paths or overrides):
        raise UserError("--resolved FILE holds the whole config: give it alone, without config files or key=value")
    if not known.resolved and not paths:
        raise UserError(f"no config file given. Example: torchrun --nproc_per_node 4 {parser.prog} {example}")
    return paths, overrides, known.resolved


def _add_shared_arguments(parser: argparse.ArgumentParser, need_config: bool = True) -> None:
    """The arguments that the launcher and the ranks have in common."""
    add = parser.add_argument
    add("conf_file", nargs="+" if need_config else "*", metavar="CONF", help="config file; .yml may be left out")
    add("-d", "--conf_dir", metavar="DIR", help="put DIR in front of every config file")
    add("-H", "--hostfile", metavar="PATH", help="file of `host slots=N` lines")
    add("--iteration", metavar="N", help="checkpoint step to load")
    add("--eval_tasks", metavar="TASK", nargs="+", help="lm-eval tasks")
    add("--eval_suite", metavar="SUITE", nargs="+", help="suites of tasks: core, core_mmlu, mmlu_5, ...")
    add("--include_path", metavar="DIR", nargs="+", help="folders with task files that --eval_tasks may name")
    add("--num_fewshot", metavar="N", help="examples before each question")
    add("--limit", metavar="N", help="documents of each task; below 1: their share")
    add("--eval_results_prefix", metavar="S", help="prefix of the evaluation's result file")
    add("--prompt", metavar="TEXT", nargs="+", help="prompts for generate.py, instead of a file")
    add("-i", "--sample_input_file", metavar="FILE", help="prompts for generate.py")
    add("-o", "--sample_output_file", metavar="FILE", help="where generate.py writes")
    add("--wandb_group", metavar="S", help="W&B group")
    add("--wandb_run_name", metavar="S", help="W&B run name")
    add("--wandb_team", metavar="S", help="W&B team")


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `key=value` and `--key=value` items from flags and paths."""
    takes_value = {*_VALUE_FLAGS, *_OTHER_VALUE_FLAGS}
    own_flags = {*takes_value, *_LIST_FLAGS}
    items: list[str] = []
    overrides: list[str] = []
    for position, item in enumerate(argv):
        match = _OVERRIDE.match(item)
        own = item.startswith("--") and item.split("=", 1)[0] in own_flags
        value_of_flag = position > 0 and argv[position - 1] in takes_value
        if match and not own and not value_of_flag:
            overrides.append(item.removeprefix("--"))
        else:
            items.append(item)
    return items, overrides


def _flag_overrides(known: argparse.Namespace) -> list[str]:
    """Flags as `key=value` items. Text is quoted as JSON, which YAML reads as text whatever it looks like."""
    overrides = []
    for flag, key in _VALUE_FLAGS.items():
        value = getattr(known, flag.removeprefix("--"))
        if value is not None:
            overrides.append(f"{key}={value if key == 'iteration' else json.dumps(value)}")
    for flag, key in _LIST_FLAGS.items():
        if values := getattr(known, flag.removeprefix("--")):
            overrides.append(f"{key}={json.dumps(values)}")
    return overrides


def _config_paths(names: Sequence[str], folder: str | None) -> list[str]:
    """Config names with folder and `.yml` added, as GPT-NeoX does; a missing file is a `UserError`."""
    paths = []
    with collector() as found:
        for name in names:
            path = Path(folder, name) if folder else Path(name)
            if not name.endswith(_CONFIG_SUFFIXES):
                path = Path(f"{path}.yml")
            if not path.is_file():
                siblings = sorted(p.name for p in path.parent.glob("*.yml")) if path.parent.is_dir() else []
                there = f" {path.parent}/ holds: {', '.join(siblings[:12])}" if siblings else ""
                meant = nearest_name(path.stem, [Path(one).stem for one in siblings])  # all end in .yml
                hint = f" Did you mean '{meant}.yml'?" if meant else ""
                found.add(f"{path}: no such config file.{hint}{there}")
            paths.append(str(path))
    return paths
