"""Publish one checkpoint on the Hugging Face Hub: converted, compared, uploaded, and verified by hashes.

python huggingface/upload_checkpoint.py my-run                        the latest checkpoint, to your own account
python huggingface/upload_checkpoint.py checkpoints/my-run 1000 my-org
python huggingface/upload_checkpoint.py my-run 1000 my-org --dry-run   what would go where, without a network

makes  my-org/my-run            revision global_step1000, the model for transformers with its card; the last step of the
                                run is also `main`
       my-org/neox-ckpt-my-run  revision global_step1000, the raw checkpoint; main likewise

Repositories are private unless --public. Killed and started again, it goes on where it was. The checkpoint itself is
never changed or deleted. documentation/publishing.md explains names, cards and retries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.jobs.publishing import parser_of_one, publish_one


def parser() -> Parser:
    """The command's flags."""
    return parser_of_one(__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Publish with the arguments of the command line."""
    return publish_one(argv, os.environ, __doc__)


if __name__ == "__main__":
    run_cli(main)
