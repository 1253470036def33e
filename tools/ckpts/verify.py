"""Do two models compute the same logits? Each is a checkpoint (Deepy's or GPT-NeoX's) or a Hugging Face model.

python tools/ckpts/verify.py checkpoints/global_step100 hf/
python tools/ckpts/verify.py checkpoints other-checkpoints --iteration 100
python tools/ckpts/verify.py neox/global_step9 EleutherAI/pythia-70m --revision step3000

Both run in fp32 on the same random tokens, one layer at a time, with their weights rounded to the narrower of the two
stored types. Exit code 0: they agree to 1e-4 (times the logits' standard deviation where that is above 1). Exit code 2:
they do not, and the first part of the network whose output differs is named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_config_files, begin
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """Two places, in any order."""
    flags = Parser(description=__doc__)
    what = "a global_step<N> folder, a save folder, a Hugging Face folder, or a model of the Hub"
    flags.add_argument("one", metavar="A", help=what)
    flags.add_argument("other", metavar="B", help="the model to compare with: any of these kinds")
    add_config_files(flags, " or the config of the other side")
    flags.add_argument("--iteration", type=int, help="which checkpoint of a save folder; default: its latest")
    flags.add_argument("--revision", help="branch, tag or commit of a model of the Hub")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print the difference."""
    given = parser().parse_args(argv)
    begin(given)
    from megatron.convert.pairs import Place  # after the flags: torch takes seconds to import
    from megatron.convert.verify import verify

    one, other = (
        Place(path, name, given.iteration, given.revision) for path, name in ((given.one, "A"), (given.other, "B"))
    )
    found = verify(one, other, given.config_file)
    drift = "" if found.ok else f", first after {found.first_drift}"
    print(f"largest logit difference in fp32: {found.logits:.2e} (allowed {found.allowed:.2e}){drift}")
    return 0 if found.ok else 2


if __name__ == "__main__":
    run_cli(main)
