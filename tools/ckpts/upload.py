"""Upload a folder to a model repository of the Hugging Face Hub, as a whole.

python tools/ckpts/upload.py hf/ my-org/my-model main

A missing repository or branch is made, private unless --public is given; files that the Hub has with the same content
are not sent again, so the same command goes on after a failure. At the end the hashes that the Hub lists are compared
with the files. The token is that of `hf auth login`, or of the environment variable HF_TOKEN.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_upload_flags
from megatron.errors import UserError, run_cli
from megatron.flags import Parser
from megatron.hub.push import check_hub, push_folder, retry_of
from megatron.log import configure, result


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("folder", help="what convert_neox_to_hf.py made, or any folder")
    flags.add_argument("repo", help="name or owner/name")
    flags.add_argument("branch", nargs="?", default=None, help="default: main")
    add_upload_flags(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Upload with GPT-NeoX's three arguments."""
    given = parser().parse_args(argv)
    configure()
    folder = Path(given.folder)
    if not folder.is_dir() or not any(folder.iterdir()):
        raise UserError(f"{folder} is no folder with files in it")
    branch, retry = None if given.branch == "main" else given.branch, retry_of(given)
    result(push_folder(folder, check_hub(given.repo, retry), revision=branch, private=not given.public, retry=retry))
    return 0


if __name__ == "__main__":
    run_cli(main)
