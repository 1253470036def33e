"""Convert a Pythia or GPT-NeoX model of Hugging Face to a checkpoint without a pipeline, with GPT-NeoX's flags.

python tools/ckpts/convert_hf_to_sequential.py --hf-model-name pythia-70m --revision 143000 \\
    --output-dir checkpoints/pythia-70m --config configs/pythia/70M.yml configs/local_setup.yml --test

--hf-model-name is an EleutherAI model, whose revisions are steps; --hf-model takes any folder or Hub model. The
checkpoint loads at any layout, with or without a pipeline; pipe_parallel_size is 0 in its config file. --config is
optional: files given are compared with the model, and a difference is refused before anything is written.

As in GPT-NeoX the launcher may start it, with the config of the run that is to train the model:

python deepy.py tools/ckpts/convert_hf_to_sequential.py -d configs pythia/70M.yml local_setup.yml \\
    load=EleutherAI/pythia-70m save=checkpoints/pythia-70m

Then rank 0 converts `load` (a folder or Hub model) into `save`, for the config's tensor ranks, and compares the config.
Where `load` and `save` are the same, as in local_setup.yml, it is GPT-NeoX's example: pythia-70m-v0 at step 143000,
into checkpoints/neox_converted/pythia/70m.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from megatron.convert.cli import add_precision, add_safety, run_import
from megatron.errors import UserError, run_cli
from megatron.flags import Parser
from megatron.neox_arguments import NeoXArgs

EXAMPLE = "EleutherAI/pythia-70m-v0", "step143000", "checkpoints/neox_converted/pythia/70m"


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--hf-model-name", metavar="NAME", help="an EleutherAI model on the Hub: pythia-70m")
    flags.add_argument("--hf-model", metavar="PATH_OR_ID", help="instead: a folder, or any model of the Hub")
    flags.add_argument("--revision", help="a step (143000), branch, tag or commit on the Hub; default: main")
    flags.add_argument("--output-dir", help="the folder to make, or one with other steps of the model")
    flags.add_argument("--config", nargs="*", default=[], metavar="YAML", help="the run's files, to be compared")
    flags.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks to split the files for")
    flags.add_argument("--iteration", type=int, help="the step in the checkpoint's name; default: --revision or 0")
    flags.add_argument(
        "--test", action="store_true", help="ignored, for GPT-NeoX's scripts: logits are always compared"
    )
    flags.add_argument("--download-only", action="store_true", help="only fetch the model into the Hub's cache")
    flags.add_argument("--cache-dir", help="the Hub's cache")
    flags.add_argument("--ckpt-tmp-dir", help="ignored, for GPT-NeoX's scripts: the draft is next to --output-dir")
    add_precision(flags)
    add_safety(flags, "an existing iteration")
    flags.add_argument("--resolved", help=argparse.SUPPRESS)  # the launcher's: the merged config
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert with GPT-NeoX's flags."""
    given = parser().parse_args(argv)
    if given.resolved:
        return convert_as_rank(given) if os.environ.get("RANK", "0") == "0" else 0
    if (given.hf_model is None) == (given.hf_model_name is None):
        raise UserError("give --hf-model-name or --hf-model")
    if given.output_dir is None:
        raise UserError("give --output-dir: the folder to make")
    given.hf_model = given.hf_model or f"EleutherAI/{given.hf_model_name}"
    step = given.revision if (given.revision or "").isdigit() else None
    given.revision = f"step{step}" if step else given.revision
    given.iteration = int(step or 0) if given.iteration is None else given.iteration
    if given.download_only:
        from megatron.convert.published.folder import open_model  # after the flags: torch takes seconds to import

        print(open_model(given.hf_model, given.revision, given.cache_dir).path)
        return 0
    convert(given)
    return 0


def convert(given: argparse.Namespace) -> None:
    """Convert as the flags say."""
    run_import(
        given,
        pp=0,
        precision=given.precision,
        families=("neox",),
        config_files=given.config,
        cache_dir=given.cache_dir,
    )


def convert_as_rank(given: argparse.Namespace) -> int:
    """What rank 0 does for the launcher, whose config takes the place of flags."""
    args = NeoXArgs.from_resolved(Path(given.resolved).read_text(encoding="utf-8"))
    load, save = args.checkpoint.load, args.checkpoint.save
    example = load is None or save is None or load == save
    given.hf_model, given.revision, given.output_dir = EXAMPLE if example else (load, given.revision, save)
    given.iteration = 143000 if example else args.checkpoint.iteration or 0
    given.tp = args.parallel.model_parallel_size
    with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as merged:
        yaml.safe_dump(args.to_dict(), merged)
        merged.flush()
        given.config = [merged.name]
        convert(given)
    return 0


if __name__ == "__main__":
    run_cli(main)
