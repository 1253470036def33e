"""Show what a checkpoint holds: its step, layout and versions, every parameter with shape, type and norm.

python tools/ckpts/inspect_checkpoints.py checkpoints/global_step100
python tools/ckpts/inspect_checkpoints.py checkpoints/global_step100 --diff checkpoints/global_step200

A folder that GPT-NeoX wrote needs the YAML files of its run, unless it keeps them in `configs/`:

python tools/ckpts/inspect_checkpoints.py neox/global_step100 --config_file run.yml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.errors import UserError, run_cli


def parser() -> argparse.ArgumentParser:
    """A folder, by position or as `--checkpoint-path`."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folder", nargs="?", help="a global_step<N> folder, or a save folder (its latest)")
    flags.add_argument("--checkpoint-path", dest="path", metavar="FOLDER", help="the same")
    flags.add_argument("-d", "--diff", metavar="OTHER", help="compare with another checkpoint, parameter by parameter")
    flags.add_argument("--config_file", nargs="+", metavar="YAML", default=(), help="for folders of GPT-NeoX")
    flags.add_argument("--checksums", action="store_true", help="also compare every file with its checksum")
    return flags


def main() -> None:
    """Print one line per parameter."""
    given = parser().parse_args()
    path = given.folder or given.path
    if path is None:
        raise UserError("give the folder of a checkpoint")
    from megatron.convert.inspect import describe, difference
    from megatron.convert.settings import open_weights

    reader = open_weights(path, given.config_file, key="folder", checksums=given.checksums)
    if given.diff is None:
        lines = describe(reader)
    else:
        other = open_weights(given.diff, given.config_file, key="--diff", checksums=given.checksums)
        lines = difference(reader, other)
    for line in lines:
        print(line)


if __name__ == "__main__":
    run_cli(main)
