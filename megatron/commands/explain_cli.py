"""`deepy explain`: a key's value, where it comes from, what it means; with or without a config."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.cluster.command_line import parse_launcher_command_line
from megatron.flags import Parser
from megatron.neox_arguments import NeoXArgs
from megatron.plan.preflight import config_for, explain

_EXAMPLES = """\
examples:
  deepy explain train_batch_size run.yml            value, source, default, meaning
  deepy explain lr weight_decay run.yml optimizer.params.lr=1e-3
  deepy explain lora_r                              default and meaning, without a config
"""


def parser() -> Parser:
    """Keys and configs in any order."""
    flags = Parser(
        description="Where has a config key its value from, and what does it mean?",
        usage="%(prog)s KEY [KEY ...] [CONF ...] [key=value ...]",
        epilog=_EXAMPLES,
    )
    flags.add_argument("words", nargs="+", metavar="KEY", help="a key, a config file (with its .yml), or key=value")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Print what `--explain` of the launcher prints."""
    words = parser().parse_args(argv).words
    keys = [word for word in words if "=" not in word and not word.endswith((".yml", ".yaml", ".json"))]
    rest = [word for word in words if word not in keys]
    if all("=" in word for word in rest):  # no config
        args = NeoXArgs.from_files([], rest)
        print("\n".join(map(args.explain, keys)))
        return 0
    line = parse_launcher_command_line(["train.py", *rest], "deepy explain")
    args = config_for(NeoXArgs.from_files(line.paths, line.overrides), "train.py")
    print("\n".join(explain(args, key, os.environ) for key in keys))
    return 0
