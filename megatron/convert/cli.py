"""What the commands of conversion have in common: flags with the same names everywhere, and the lines of the result.

Imports no torch, so that `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint import layout
from megatron.flags import Parser
from megatron.log import configure, result
from megatron.neox_arguments import plugin_key

# Names of types that users write → the name here.
PRECISIONS = {
    "auto": "auto",
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}


def add_precision(flags: argparse.ArgumentParser, *names: str, auto: str = "as stored") -> None:
    """The type to write, as `given.precision`: auto, fp16, bf16, fp32, or their long names."""
    flags.add_argument(
        *(names or ("--precision",)),
        dest="precision",
        type=_precision,
        default="auto",
        metavar="{auto,fp16,bf16,fp32}",
        help=f"type of the weights; auto (the default): {auto}",
    )


def _precision(text: str) -> str:
    if text.removeprefix("torch.") not in PRECISIONS:
        raise argparse.ArgumentTypeError(f"{text!r} is not known; choices: {', '.join(PRECISIONS)}")
    return PRECISIONS[text.removeprefix("torch.")]


def add_safety(flags: argparse.ArgumentParser, what: str) -> None:
    """`--no-check` and `--overwrite`; `what`: what may exist already."""
    flags.add_argument("--no-check", action="store_true", help="publish without comparing logits")
    flags.add_argument("--overwrite", action="store_true", help=f"replace {what}")


def add_plugins(flags: argparse.ArgumentParser) -> None:
    """`--plugins`: the only way, besides a config file, to have code run that a model needs."""
    flags.add_argument(
        "--plugins",
        nargs="+",
        default=(),
        metavar="MODULE_OR_FILE",
        help="your own code that knows the model (documentation/plugins.md); it is run",
    )


def begin(given: argparse.Namespace) -> None:
    """Set up logging, and import the plugins that the command line names."""
    configure()
    plugin_key.import_named(given.plugins, "--plugins")


def add_import_flags(flags: argparse.ArgumentParser, model: str = "--hf-model", output: str | None = None) -> None:
    """The flags of every command that makes a checkpoint from a Hugging Face model; `output`: what --output-dir is when
    it is left out, in words."""
    flags.add_argument(model, dest="hf_model", required=True, metavar="PATH_OR_ID", help="a folder, or a Hub model")
    flags.add_argument("--revision", help="branch, tag or commit on the Hub")
    purpose = "the folder to make, or one with other steps of the model" + (f" (default: {output})" if output else "")
    flags.add_argument("--output-dir", required=output is None, help=purpose)
    flags.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks to split the files for")
    flags.add_argument("--iteration", type=int, default=0, help="the step in the checkpoint's name")
    add_plugins(flags)
    add_safety(flags, "an existing iteration")


def default_output(model: str, base: str | None) -> str:
    """Where the checkpoint of `model` (a folder or a Hub id) is made when no folder is named: in one of its name, which
    of a `global_step<N>` is that of the folder around it."""
    folder = Path(os.path.abspath(model))
    name = folder.name if layout.step_of(folder.name) is None else layout.run_name(folder.parent)
    return str(Path(base or "checkpoints") / name.removeprefix("sfm-"))


def run_import(given: argparse.Namespace, **options: Any) -> None:
    """Convert as the flags ask; `options` are further ones of `import_model`."""
    configure()
    from megatron.convert.hf.import_hf import import_model  # after the flags: torch takes seconds to import

    done = import_model(
        given.hf_model,
        given.output_dir,
        revision=given.revision,
        tp=given.tp,
        iteration=given.iteration,
        check=not given.no_check,
        overwrite=given.overwrite,
        plugins=getattr(given, "plugins", ()),
        **options,
    )
    report(f"{done.folder}\n{done.config}", done.largest_difference, "transformers")


def report(made: str, difference: float | None, other: str) -> None:
    """Print what was made, and how far its logits are from the other side's."""
    result(made)
    checked = "not checked" if difference is None else f"largest {difference:.2e}"
    result(f"logit difference between Deepy and {other} in fp32: {checked}")


def add_config_files(flags: argparse.ArgumentParser, more: str = "") -> None:
    """`--config_file` and `--plugins`, for a command that reads a checkpoint; `more` ends the help of the first."""
    flags.add_argument(
        "--config_file",
        nargs="+",
        metavar="YAML",
        default=(),
        help=f"YAML files of the run; default: the checkpoint's own config, for a GPT-NeoX folder its configs/{more}",
    )
    add_plugins(flags)


def take_places(flags: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags that were given, with `CHECKPOINT OUTPUT` as `--input_dir` and `--output_dir`."""
    given = flags.parse_args(argv)
    if given.places and (len(given.places) != 2 or given.input_dir or given.output_dir):
        flags.error(f"{' '.join(given.places)}: give CHECKPOINT OUTPUT, or --input_dir and --output_dir")
    if given.places:
        given.input_dir, given.output_dir = given.places
    if not (given.input_dir and given.output_dir):
        flags.error("give CHECKPOINT OUTPUT (or --input_dir and --output_dir)")
    return given


def add_export_flags(flags: argparse.ArgumentParser, *, by_place: bool = False) -> None:
    """The flags of every command that makes a Hugging Face folder from a checkpoint. `by_place`: `take_places` has the
    folder."""
    flags.add_argument("--output_dir", "--output-dir", required=not by_place, help="the folder to make")
    flags.add_argument("--iteration", type=int, help="which checkpoint of a save folder; default: its latest")
    add_config_files(flags, "; their vocab_file wins")
    flags.add_argument("--ema", action="store_true", help="the moving averages of the weights (ema_decay) as weights")
    flags.add_argument("--no_save_tokenizer", action="store_true", help="leave the tokenizer's files out")
    flags.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of the files: 500MB, 5GB (default 5GB)")
    flags.add_argument(
        "--push-to-hub",
        nargs="?",
        const="",
        metavar="REPO",
        help="upload the finished folder to this model repository (name or owner/name); default: the folder's name",
    )
    add_upload_flags(flags)
    add_safety(flags, "an earlier export in --output_dir")


def add_upload_flags(flags: argparse.ArgumentParser) -> None:
    """The flags of every command that uploads to the Hub: who sees a new repository, and how long to keep trying."""
    seen = flags.add_mutually_exclusive_group()
    seen.add_argument("--public", action="store_true", help="everybody sees a new repository (default: its owner)")
    seen.add_argument("--private", action="store_true", help="only its owner sees a new repository (the default)")
    add = flags.add_argument
    add("--max-retries", type=int, default=20, metavar="N", help="of a call that the Hub is too busy for (default 20)")
    least = "shortest wait before a retry, where the Hub does not say how long (default 120)"
    add("--retry-min-wait", type=float, default=120.0, metavar="SECONDS", help=least)
    add("--retry-max-wait", type=float, default=3600.0, metavar="SECONDS", help="longest such wait (default 3600)")


class Hub(Protocol):
    """What `--push-to-hub` needs: megatron/hub/push.py, which is a level above this package."""

    def retry_of(self, given: argparse.Namespace) -> Any: ...
    def check_hub(self, repo: str, retry: Any) -> str: ...
    def push_folder(self, folder: Path, repo: str, *, private: bool, retry: Any) -> str: ...


def run_olmo_export(description: str | None, hub: Hub, *, checkpoint: str, reference: str, precision: str) -> None:
    """The fork's export of OLMo models, under the names of flags that its commands have."""
    flags = Parser(description=description)
    flags.add_argument(checkpoint, dest="input_dir", required=True, help="a global_step<N> folder, or a save folder")
    flags.add_argument(reference, dest="reference", metavar="PATH_OR_ID", help="the published model it began from")
    add_export_flags(flags)
    names = dict.fromkeys((precision, "--precision", "--dtype"))  # the fork's own first
    add_precision(flags, *names, auto="as trained")
    run_export(flags.parse_args(), hub, families=("olmo2", "olmo3", "olmoe"))


def run_export(given: argparse.Namespace, hub: Hub, *, families: tuple[str, ...] = (), **options: Any) -> None:
    """Convert as the flags ask; `options` are further ones of `export`.

    `hub`: takes the finished folder. `families`: the only ones that will do. `given.reference`, where a command has it,
    names the published model whose network the checkpoint has and whose tokenizer is written.
    """
    begin(given)
    retry = hub.retry_of(given)
    from megatron.convert.hf.export_hf import export  # after the flags: torch takes seconds to import
    from megatron.convert.hf.safetensors_writer import shard_bytes
    from megatron.convert.pairs import reference_of
    from megatron.convert.published.folder import open_model

    repo = None
    if given.push_to_hub is not None:
        repo = hub.check_hub(given.push_to_hub or Path(given.output_dir).resolve().name, retry)
    named = getattr(given, "reference", None)
    done = export(
        given.input_dir,
        given.output_dir,
        config_files=given.config_file,
        iteration=given.iteration,
        reference=None if named is None else reference_of(open_model(named, None)),
        averaged=given.ema,
        precision=given.precision,
        tokenizer=not given.no_save_tokenizer,
        check=not given.no_check,
        overwrite=given.overwrite,
        families=families,
        max_shard_bytes=shard_bytes(given.max_shard_size),
        **options,
    )
    report(f"{done.folder}: {done.architecture}", done.largest_difference, "transformers")
    if repo is not None:
        result(hub.push_folder(done.folder, repo, private=not given.public, retry=retry))
