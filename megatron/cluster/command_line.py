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
from typing import Any

from megatron.checkpoint.hugging_face import hub_id
from megatron.errors import UserError, nearest, nearest_name
from megatron.flags import Parser
from megatron.home import HOME, version
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.keys import KeyInfo, union_members
from megatron.neox_arguments.problems import collector

_OVERRIDE = re.compile(r"^(?:--)?([A-Za-z_][A-Za-z0-9_.\-]*)=")
_CONFIG_SUFFIXES = (".yml", ".yaml", ".json")
_TRUTHS = ("true", "false", "yes", "no", "on", "off")

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
    "--host": "serve_host",
    "--port": "serve_port",
}
_TAKE_CHECKPOINTS = ("generate.py", "eval.py", "serve.py")  # in place of config files
_NUMBERS = ("iteration", "serve_port")
# flag with several values -> config key
_LIST_FLAGS = {
    "--eval_tasks": "eval_tasks",
    "--eval_suite": "eval_suite",
    "--include_path": "eval_tasks_path",
    "--prompt": "prompt",
}

EXAMPLES = """\
examples:
  one machine, two config files, one key changed:
    python deepy.py train.py configs/pythia/70M.yml configs/local_setup.yml train_iters=100
  check and plan everything, start nothing:
    python deepy.py train.py run.yml --dry-run
  evaluate, generate:
    python deepy.py eval.py -d configs run.yml --eval_tasks lambada hellaswag
    python deepy.py generate.py -d configs run.yml text_generation.yml -i prompts.txt -o out.jsonl
  what a script takes, with its examples:
    python deepy.py train.py --help
    python deepy.py eval.py --help
    python deepy.py generate.py --help
  several machines (`host slots=N` lines; add launcher=slurm, openmpi or mvapich for those):
    python deepy.py train.py run.yml -H hosts.txt
  the same run without deepy.py:
    torchrun --nproc_per_node 4 train.py run.yml
"""
_ABOUT_CONFIGS = """\
configs are merged from left to right; key=value and --key value win, and reach inside (optimizer.params.lr=3e-4).
A config is looked for in the folder of the call, then among those that come with Deepy (configs/: tiny.yml,
llama/7B.yml, ...). Relative paths inside a config start in the folder of the call, those with ${CONFIG_DIR} in the
folder of the config. All keys: documentation/CONFIG_ARGUMENTS.md

exit codes:
  0 done    2 the input is wrong    3 stopped on request, all saved: start again
  4 the numbers went bad    5 a rank hangs or was lost    6 disk full or another limit of the machine
  130 ended at once by a second Ctrl-C    1 anything else
"""


@dataclass(frozen=True)
class _Script:
    """What --help says of a script of ours: which flags besides the common ones, and the keys asked for most."""

    reads: str
    purpose: str
    examples: str
    keys: tuple[str, ...]

    @property
    def epilog(self) -> str:
        known = all_keys()
        keys = "".join(f"  {name:18} {known[name].doc.partition('. ')[0].rstrip('.')}\n" for name in self.keys)
        return f"{self.examples}\nkeys, as key=value:\n{keys}\n{_ABOUT_CONFIGS}"


_SCRIPTS = {
    "train.py": _Script(
        "train",
        "Train a model; where `save` holds a checkpoint of the run, resume it.",
        """\
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
""",
        ("save", "load", "train_iters", "train_batch_size", "seq_length", "num_gpus", "data_path", "precision"),
    ),
    "eval.py": _Script(
        "eval",
        "Score the checkpoint in `load` (else `save`) on tasks of lm-eval; the results go to a JSON file.",
        """\
examples:
  two tasks:
    python deepy.py eval.py run.yml --eval_tasks lambada_openai hellaswag
  a suite, the first 100 documents of each task, an older checkpoint:
    python deepy.py eval.py run.yml --eval_suite core --limit 100 --iteration 1000
  five examples before each question, tasks of your own:
    python deepy.py eval.py run.yml --include_path my_tasks/ --eval_tasks my_task --num_fewshot 5
  another checkpoint than the config's:
    python deepy.py eval.py run.yml load=checkpoints/other --eval_tasks piqa
guide: documentation/generation_and_evaluation.md
""",
        ("load", "eval_tasks", "eval_suite", "eval_num_fewshot", "eval_task_limit", "eval_batch_size"),
    ),
    "generate.py": _Script(
        "generate",
        "Write texts with the checkpoint in `load` (else `save`): after prompts, or from nothing.",
        """\
examples:
  a prompt, the likeliest text:
    python deepy.py generate.py run.yml configs/text_generation.yml --prompt "Once upon a time" temperature=0
  the newest checkpoint of a folder, without a config:
    python deepy.py generate.py checkpoints --prompt "Once upon a time"
  prompts from a file (a line each, or lines of JSON), results to another:
    python deepy.py generate.py run.yml text_gen_type=input-file -i prompts.txt -o out.jsonl
  ten texts from nothing, of 200 tokens at most:
    python deepy.py generate.py run.yml text_gen_type=unconditional num_samples=10 maximum_tokens=200 top_p=0.9
  answer what is typed:
    python deepy.py generate.py run.yml text_gen_type=interactive
guide: documentation/generation_and_evaluation.md
""",
        (
            "text_gen_type",
            "maximum_tokens",
            "temperature",
            "top_k",
            "top_p",
            "stop_tokens",
            "num_samples",
            "prompt_end",
        ),
    ),
    "serve.py": _Script(
        "serve",
        "Answer over HTTP in OpenAI's form, with the checkpoint in `load` (else `save`); a page to talk to it.",
        """\
examples:
  on this machine alone, at http://127.0.0.1:8000:
    python deepy.py serve.py run.yml
  the newest checkpoint of a folder, without a config:
    python deepy.py serve.py checkpoints
  on another port, an older checkpoint, on four ranks:
    python deepy.py serve.py run.yml --port 9000 --iteration 1000 model_parallel_size=2 pipe_parallel_size=2
  for everybody who reaches this machine; 64 texts at a time, none longer than 2000 tokens:
    python deepy.py serve.py run.yml --host 0.0.0.0 serve_batch_size=64 maximum_tokens=2000
guide: documentation/generation_and_evaluation.md
""",
        ("load", "serve_host", "serve_port", "serve_batch_size", "maximum_tokens", "stop_tokens"),
    ),
}


@dataclass(frozen=True)
class CommandLine:
    """What the user of `deepy.py` asked for. Config paths are complete, flags are already overrides."""

    user_script: str
    paths: list[str]
    overrides: list[str]
    dry_run: bool = False
    prepare: bool = False
    explain: tuple[str, ...] = ()


def parse_launcher_command_line(argv: Sequence[str], prog: str = "deepy.py") -> CommandLine:
    """Parse `deepy.py`'s arguments. Raises `UserError` for bad ones; `--help` prints and exits 0.

    `prog`: the command's name in messages; `deepy generate` for one whose script is not the user's to choose.
    """
    if argv and argv[0].endswith(_CONFIG_SUFFIXES):
        meant = f"Did you mean `{prog} train.py {argv[0]}`?"
        raise UserError(f"{argv[0]} is a config file; the first argument is the script that the ranks run. {meant}")
    parser = launcher_parser(argv[0] if argv else "", prog)
    items, inline = _split_overrides(parser, argv)
    known = parser.parse_intermixed_args(items)
    if known.autotuning:
        raise UserError(
            "--autotuning is not available: set train_micro_batch_size_per_gpu and zero_optimization by hand "
            "(--dry-run estimates the memory of each choice)"
        )
    script = Path(known.user_script)
    if not script.is_file() and not (HOME / script).is_file():
        raise UserError(
            f"{script}: no such script. The first argument is what the ranks run, e.g. train.py"
            f"{nearest(script.name, list(_SCRIPTS))}"
        )
    return CommandLine(
        user_script=str(script if script.is_file() else HOME / script),
        paths=_config_paths(known.conf_file, known.conf_dir, takes_checkpoint=script.name in _TAKE_CHECKPOINTS),
        overrides=inline + _flag_overrides(known),
        dry_run=known.dry_run,
        prepare=known.prepare,
        explain=tuple(known.explain),
    )


def launcher_parser(script: str = "", prog: str = "deepy.py") -> Parser:
    """The launcher's flags; of one of our scripts the help shows those that it reads, with its examples."""
    name = Path(script).name
    about = _SCRIPTS.get(name)
    named = about is not None and prog == "deepy.py"
    parser = Parser(
        prog=f"{prog} {name}" if named else prog,
        allow_abbrev=False,
        description=about.purpose if about else "Start USER_SCRIPT on every rank with the merged config.",
        usage=f"%(prog)s {'' if about else 'USER_SCRIPT '}CONF [CONF ...] [key=value ...] [flags]",
        epilog=about.epilog if about else f"{EXAMPLES}\n{_ABOUT_CONFIGS}",
    )
    parser.add_argument("--version", action="version", version=f"deepy {version()}")
    which = "what every rank runs: train.py, eval.py, generate.py, serve.py or your own script"
    parser.add_argument("user_script", help=argparse.SUPPRESS if about else which)
    parser.add_argument("--dry-run", action="store_true", help="check and plan everything, start nothing")
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
    _add_shared_arguments(parser, about)
    return parser


def parse_rank_command_line(
    argv: Sequence[str], description: str | None = None, example: str = "run.yml"
) -> tuple[list[str], list[str], str | None]:
    """Parse the arguments of train.py, eval.py or generate.py on a rank: (config paths, overrides, resolved file).

    A rank started by deepy.py gets `--resolved FILE` and nothing else; one started by torchrun, srun or mpirun gets
    the same config files and overrides that deepy.py takes. `description` and `example` (arguments) are for --help.
    """
    parser = Parser(
        allow_abbrev=False,
        description=description,
        usage="%(prog)s CONF [CONF ...] [key=value ...] [flags]",
    )
    about = _SCRIPTS.get(parser.prog)
    more = about.epilog if about else _ABOUT_CONFIGS
    parser.epilog = f"example:\n  torchrun --nproc_per_node 4 %(prog)s {example}\n\n{more}"
    parser.add_argument("--resolved", metavar="FILE", help="the resolved config, as written by deepy.py")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    for flag in ("--megatron_config", "--deepspeed_config", "--explain"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in ("--dry-run", "--prepare"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    _add_shared_arguments(parser, about, need_config=False)
    items, inline = _split_overrides(parser, argv)
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


def _add_shared_arguments(parser: Parser, about: _Script | None, need_config: bool = True) -> None:
    """The arguments that the launcher and the ranks have in common. All scripts take all, as in GPT-NeoX; the help of
    ours leaves out what only others read."""

    def add(*flags: str, only: str = "", help: str, **options: Any) -> None:
        shown = about is None or only in ("", about.reads)
        parser.add_argument(*flags, help=help if shown else argparse.SUPPRESS, **options)

    parser.more_names = [f"--{key}" for key in all_keys()]
    trains = about is None or about.reads == "train"
    conf = "config file; .yml may be left out"
    conf += "" if trains else "; or the folder of a checkpoint, or owner/name of a Hugging Face model"
    add("conf_file", nargs="+" if need_config else "*", metavar="CONF", help=conf)
    add("-d", "--conf_dir", metavar="DIR", help="put DIR in front of every config file")
    add("-H", "--hostfile", metavar="PATH", help="file of `host slots=N` lines")
    add("--iteration", metavar="N", help="checkpoint step to load")
    add("--eval_tasks", only="eval", metavar="TASK", nargs="+", help="lm-eval tasks")
    suites = "suites of tasks: core, core_mmlu, mmlu_5, ..."
    add("--eval_suite", only="eval", metavar="SUITE", nargs="+", help=suites)
    folders = "folders with task files that --eval_tasks may name"
    add("--include_path", only="eval", metavar="DIR", nargs="+", help=folders)
    add("--num_fewshot", only="eval", metavar="N", help="examples before each question")
    add("--limit", only="eval", metavar="N", help="documents of each task; below 1: their share")
    add("--eval_results_prefix", only="eval", metavar="S", help="prefix of the evaluation's result file")
    add("--prompt", only="generate", metavar="TEXT", nargs="+", help="prompts, instead of a file")
    add("-i", "--sample_input_file", only="generate", metavar="FILE", help="prompts: a line each, or lines of JSON")
    add("-o", "--sample_output_file", only="generate", metavar="FILE", help="where the texts go")
    add("--host", only="serve", metavar="ADDRESS", help="where to listen; default: 127.0.0.1, this machine alone")
    add("--port", only="serve", metavar="N", help="the port; default: 8000; 0: any that is free")
    add("--wandb_group", only="train", metavar="S", help="W&B group")
    add("--wandb_run_name", only="train", metavar="S", help="W&B run name")
    add("--wandb_team", only="train", metavar="S", help="W&B team")


def _split_overrides(parser: Parser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `key=value`, `--key=value` and `--key value` from the parser's own flags and from paths."""
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    items: list[str] = []
    overrides: list[str] = []
    rest = list(argv)
    while rest:
        item = rest.pop(0)
        own = parser.flags_named(item.split("=", 1)[0]) if item.startswith("--") else []
        if not own and _OVERRIDE.match(item):
            overrides.append(item.removeprefix("--"))
        elif not own and (info := _key_of(item)) is not None:
            overrides.append(f"{item.removeprefix('--')}={_value_after(item, info, rest)}")
        else:
            items.append(item)
            action = actions.get(own[0] if own else item)
            if action is not None and action.nargs in (None, "+") and "=" not in item and rest:
                items.append(rest.pop(0))  # a value may look like an override: --prompt "E=mc^2"
    return items, overrides


def _key_of(item: str) -> KeyInfo | None:
    """The config key of `--key` or `--key.inside`."""
    if not item.startswith("--") or "=" in item:
        return None
    return all_keys().get(item.removeprefix("--").split(".")[0].replace("-", "_"))


def _value_after(flag: str, info: KeyInfo, rest: list[str]) -> str:
    """The value that follows `--key`, taken from `rest`; of a key that is true or false, it may be missing: true."""
    follows = rest[0] if rest and not rest[0].startswith("--") else None
    if bool in union_members(info.type) and "." not in flag and (follows or "").lower() not in _TRUTHS:
        return "true"
    if follows is None:
        raise UserError(f"{flag} is a config key and needs a value: {flag.removeprefix('--')}=VALUE")
    return rest.pop(0)


def _flag_overrides(known: argparse.Namespace) -> list[str]:
    """Flags as `key=value` items. Text is quoted as JSON, which YAML reads as text whatever it looks like."""
    overrides = []
    if configs := [text for text in (known.prompt or [])[1:] if text.endswith(_CONFIG_SUFFIXES) and " " not in text]:
        raise UserError(f"--prompt: {configs[0]} would be one more prompt; give config files before --prompt")
    for flag, key in _VALUE_FLAGS.items():
        value = getattr(known, flag.removeprefix("--"))
        if value is not None:
            overrides.append(f"{key}={value if key in _NUMBERS else json.dumps(value)}")
    for flag, key in _LIST_FLAGS.items():
        if values := getattr(known, flag.removeprefix("--")):
            overrides.append(f"{key}={json.dumps(values)}")
    return overrides


def _config_paths(names: Sequence[str], folder: str | None, takes_checkpoint: bool = False) -> list[str]:
    """Config names with folder and `.yml` added, as GPT-NeoX does; a file that is not there may be one of those that
    come with Deepy, else it is a `UserError`. `takes_checkpoint`: the folder of one, or
    the name of a Hugging Face model, may stand for a config."""
    paths = []
    with collector() as found:
        for name in names:
            path = Path(folder, name) if folder else Path(name)
            if takes_checkpoint and path.is_dir() and not Path(f"{path}.yml").is_file():
                paths.append(str(path))
                continue
            if not name.endswith(_CONFIG_SUFFIXES):
                path = Path(f"{path}.yml")
            shipped = [root / path for root in (HOME / "configs", HOME) if (root / path).is_file()]
            if not path.is_file() and shipped:
                path = shipped[0]
            elif not path.is_file() and takes_checkpoint and hub_id(name) is not None:
                path = Path(name)
            elif not path.is_file():
                siblings = sorted(p.name for p in path.parent.glob("*.yml")) if path.parent.is_dir() else []
                there = f" {path.parent}/ holds: {', '.join(siblings[:12])}" if siblings else ""
                stem = nearest_name(path.stem, [Path(one).stem for one in siblings])  # all end in .yml
                ours = [one.relative_to(HOME / "configs").as_posix() for one in (HOME / "configs").rglob("*.yml")]
                meant = f"{stem}.yml" if stem else nearest_name(path.as_posix(), ours, cutoff=0.85)
                hint = f" Did you mean {meant!r}?" if meant else ""
                found.add(f"{path}: no such config file.{hint}{there}")
            paths.append(str(path))
    return paths
