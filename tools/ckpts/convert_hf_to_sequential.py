"""Convert a Pythia or GPT-NeoX model of Hugging Face to a checkpoint without a pipeline, with GPT-NeoX's flags.

python tools/ckpts/convert_hf_to_sequential.py --hf-model-name pythia-70m --revision 143000 \\
    --output-dir checkpoints/pythia-70m --config configs/pythia/70M.yml configs/local_setup.yml --test

--hf-model-name is an EleutherAI model, whose revisions are steps; --hf-model takes any folder or Hub model. The
checkpoint loads at any layout, with or without a pipeline; pipe_parallel_size is 0 in its config file. --config is
optional: files given are compared with the model, and a difference is refused before anything is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_precision, add_safety, flags_for, run_import
from megatron.errors import UserError, run_cli


def main() -> int:
    """Convert with GPT-NeoX's flags."""
    flags = flags_for(__doc__)
    flags.add_argument("--hf-model-name", metavar="NAME", help="an EleutherAI model on the Hub: pythia-70m")
    flags.add_argument("--hf-model", metavar="PATH_OR_ID", help="instead: a folder, or any model of the Hub")
    flags.add_argument("--revision", help="a step (143000), branch, tag or commit on the Hub; default: main")
    flags.add_argument("--output-dir", required=True, help="the folder to make, or one with other steps of the model")
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
    given = flags.parse_args()
    if (given.hf_model is None) == (given.hf_model_name is None):
        raise UserError("give --hf-model-name or --hf-model")
    given.hf_model = given.hf_model or f"EleutherAI/{given.hf_model_name}"
    step = given.revision if (given.revision or "").isdigit() else None
    given.revision = f"step{step}" if step else given.revision
    given.iteration = int(step or 0) if given.iteration is None else given.iteration
    if given.download_only:
        from megatron.convert.hf.folder import open_model  # after the flags: torch takes seconds to import

        print(open_model(given.hf_model, given.revision, given.cache_dir).path)
        return 0
    run_import(
        given,
        pp=0,
        precision=given.precision,
        families=("neox",),
        config_files=given.config,
        cache_dir=given.cache_dir,
    )
    return 0


if __name__ == "__main__":
    run_cli(main)
