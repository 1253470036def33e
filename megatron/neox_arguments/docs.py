"""Write documentation/CONFIG_ARGUMENTS.md and DIFFERENCES.md from the tables in code.

python -m megatron.neox_arguments.docs
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from megatron.errors import run_cli
from megatron.files import write_atomically
from megatron.flags import Parser
from megatron.log import configure, get_logger
from megatron.neox_arguments.callback_key import keys_of
from megatron.neox_arguments.coerce import thaw, type_name
from megatron.neox_arguments.differences import differences_markdown
from megatron.neox_arguments.groups import GROUPS, all_keys
from megatron.neox_arguments.keys import KeyInfo
from megatron.neox_arguments.retired import ALIASES, RETIRED
from megatron.rows import FOLDERS, rows

_TITLES = {
    "model": "Model",
    "tokenizer": "Tokenizer",
    "data": "Data",
    "optimizer": "Optimizer and precision",
    "schedule": "Learning-rate schedule",
    "training": "Training",
    "post": "Post-training",
    "checkpoint": "Checkpoints",
    "generation": "Generation and evaluation",
    "parallel": "Parallelism",
    "launcher": "Launcher",
    "logging": "Logging",
    "deepspeed": "DeepSpeed",
}

# What a first config has, in the order in which one thinks of it.
FIRST = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    *("train_data_paths", "valid_data_paths", "vocab_file"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "train_iters"),
    *("optimizer", "lr_decay_style", "warmup", "precision"),
    *("model_parallel_size", "pipe_parallel_size", "zero_optimization"),
    *("save", "load", "checkpoint_factor"),
)


def config_arguments_markdown() -> str:
    """The text of documentation/CONFIG_ARGUMENTS.md."""
    live = [info for info in all_keys().values() if info.available and info.derived is None]
    unavailable = [info for info in all_keys().values() if not info.available]
    derived = [info for info in all_keys().values() if info.derived is not None]
    return "\n".join(_document(live, unavailable, derived)) + "\n"


def _document(live: list[KeyInfo], unavailable: list[KeyInfo], derived: list[KeyInfo]) -> Iterator[str]:
    yield "# Configuration keys"
    yield ""
    yield "Generated from `megatron/neox_arguments` by `python -m megatron.neox_arguments.docs`; do not edit."
    yield ""
    yield f"* {len(live)} keys can be set ({sum(info.new for info in live)} of them are not GPT-NeoX's, marked *new*)."
    yield f"* {len(unavailable)} more are known but not available: setting one is an error that names the alternative."
    yield f"* {len(RETIRED)} are retired: they are accepted with a warning and do nothing."
    yield f"* {len(derived)} values are computed and shown by `--dry-run` and `--explain`."
    yield ""
    yield "`-` and `_` are the same in names; choices are matched without regard to case; `null` means the default."
    yield "Files merge left to right; the same key in two of them must have equal values. `extends: base.yml` inside a"
    yield "file inherits and may override; `key=value` and `optimizer.params.lr=3e-4` on the command line win over all."
    yield "`${CONFIG_DIR}` in a value is the folder of the file that it is written in."
    yield from _table("The twenty keys to begin with", [all_keys()[name] for name in FIRST])
    for group in GROUPS:
        yield from _table(_TITLES[group], [info for info in live if info.group == group])
    yield from ("", "## Choices", "", "| key | choice | meaning |", "|---|---|---|")
    for kind in FOLDERS:
        info = next(info for info in live if info.registry == kind)
        for names, doc in _entries(kind):
            others = [f"`{other}`" for other, meant in info.spellings.items() if meant in names]
            also = f" Also written {', '.join(others)}." if others else ""
            yield f"| `{info.name}` | {', '.join(f'`{name}`' for name in names)} | {_cell(doc + also)} |"
    yield from ("", "## Computed values", "", "| value | group | meaning |", "|---|---|---|")
    for info in derived:
        yield f"| `{info.name}` | {info.group} | {_cell(info.doc)} |"
    yield from ("", "## Known, not available", "", "| key | instead |", "|---|---|")
    for info in unavailable:
        yield f"| `{info.name}` | {_cell(str(info.unavailable))} |"
    yield from ("", "## Retired", "", "| key | instead |", "|---|---|")
    for name, retired in RETIRED.items():
        yield f"| `{name}` | {_cell(retired.instead)} |"
    yield from ("", "## Other names", "", "| accepted | meant |", "|---|---|")
    for name, meant in ALIASES.items():
        yield f"| `{name}` | `{meant}` |"


def _table(title: str, keys: Sequence[KeyInfo]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|")
    for info in keys:
        yield f"| `{info.name}` | {_cell(_type(info))} | `{_default(info)}` | {_cell(_meaning(info))} |"


def _entries(kind: str) -> Iterator[tuple[list[str], str]]:
    """(names, meaning) of each registration of a kind."""
    for _, group in groupby(rows(kind).items(), key=lambda item: item[1].place):
        found = list(group)
        row = found[0][1]
        keys = f" Keys: {', '.join(f'`{key}`' for key in keys_of(row.values))}." if keys_of(row.values) else ""
        yield [name for name, _ in found], row.doc + keys


def _type(info: KeyInfo) -> str:
    text = type_name(info.accepts(info.own_choices))
    return text + (", or a plugin's" if info.registry is not None and text.startswith("one of") else "")


def _default(info: KeyInfo) -> str:
    return json.dumps(thaw(info.default), ensure_ascii=False).replace("|", "\\|")


def _meaning(info: KeyInfo) -> str:
    parts = (["*new*"] if info.new else []) + [info.doc]
    if info.differs:
        parts.append(f"Differs from GPT-NeoX: {info.differs}.")
    if isinstance(info.unavailable, dict):
        parts += [f"Not available: `{value}` ({advice})." for value, advice in info.unavailable.items()]
    return " ".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def documents() -> dict[str, str]:
    """File name -> text of the generated documents."""
    return {"CONFIG_ARGUMENTS.md": config_arguments_markdown(), "DIFFERENCES.md": differences_markdown()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the documents into the folder given, each in one step."""
    flags = Parser(
        prog="python -m megatron.neox_arguments.docs",
        description=__doc__,
    )
    flags.add_argument("folder", nargs="?", default="documentation", help="where to write (default: documentation)")
    folder = flags.parse_args(arguments).folder
    configure()
    os.makedirs(folder, exist_ok=True)
    for name, text in documents().items():
        path = Path(folder, name)
        write_atomically(path, text)
        get_logger(__name__).info(str(path))


if __name__ == "__main__":
    run_cli(main)
