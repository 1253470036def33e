"""Show what a checkpoint or a Hugging Face folder holds, and how two of them differ.

python tools/ckpts/inspect_checkpoints.py checkpoints/global_step100             facts, every parameter with its norm
python tools/ckpts/inspect_checkpoints.py checkpoints --iteration 100 --tree     modules and their sizes, nothing read
python tools/ckpts/inspect_checkpoints.py checkpoints/global_step100 --diff hf/  what differs, parameter by parameter
python tools/ckpts/inspect_checkpoints.py -c checkpoints/global_step100,hf/ -d   the same, as in GPT-NeoX
python tools/ckpts/inspect_checkpoints.py checkpoints/global_step100 --attributes args/num_layers iteration

Two models may be of any layout and any kind: they are compared by the names of the network. The last line says how
many parameters are equal and how many differ; the exit code is 0 in either case. A folder that GPT-NeoX wrote needs
the YAML files of its run (--config_file), unless it keeps them in configs/ or the other side is the same model.
"""

from __future__ import annotations

import argparse
import code
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_config_files, begin
from megatron.errors import UserError, run_cli
from megatron.flags import Parser

if TYPE_CHECKING:
    from megatron.convert.pairs import Place


def parser() -> Parser:
    """GPT-NeoX's flags and ours; a folder by position or as `--checkpoint-path`."""
    flags = Parser(description=__doc__)
    flags.add_argument(
        "folder", nargs="?", help="a global_step<N>, save or Hugging Face folder, or one torch file; two with -c: A,B"
    )
    flags.add_argument("--checkpoint-path", dest="path", metavar="FOLDER", help="FOLDER as a flag, as in GPT-NeoX")
    flags.add_argument("--iteration", type=int, help="which checkpoint of a save folder; default: its latest")
    flags.add_argument("--tree", action="store_true", help="modules with their sizes; equal layers are listed once")
    flags.add_argument("-c", "--compare", action="store_true", help="compare the two folders A,B")
    flags.add_argument(
        "-d",
        "--diff",
        nargs="?",
        const="",
        metavar="OTHER",
        help="compare with OTHER, and name only what differs; -c with -d alone: leave equal parameters out",
    )
    flags.add_argument(
        "--attributes", nargs="+", default=(), metavar="NAME", help="entries of the files; / goes inside"
    )
    flags.add_argument("-i", "--interactive", action="store_true", help="a Python prompt with `checkpoint` afterwards")
    add_config_files(flags, " or the config of the other side")
    flags.add_argument("--checksums", action="store_true", help="also compare every file with its checksum")
    return flags


def places(given: argparse.Namespace) -> list[Place]:
    """The one or two models that the flags name."""
    from megatron.convert.pairs import Place

    first, other = given.folder or given.path, given.diff
    if given.compare and not first:
        first, other = other, None  # `-c -d A,B`: the folders are given after -d
    if not first:
        raise UserError("give the folder of a checkpoint")
    paths = [(first, "--checkpoint-path" if first == given.path else "folder")] + ([(other, "--diff")] if other else [])
    if given.compare and not other:
        paths = [(path.strip(), "-c") for path in first.split(",")]
        if len(paths) != 2:
            raise UserError(f"-c: expected two folders separated by a comma, got {first!r}")
    return [Place(path, key, given.iteration) for path, key in paths]


def main(argv: Sequence[str] | None = None) -> None:
    """Print lines, then the prompt if it is wanted."""
    given = parser().parse_args(argv)
    begin(given)
    found = places(given)
    opened: list[object] = []
    for line in lines(given, found, opened):
        print(line)
    if given.interactive:
        names = {"checkpoint": opened[0] if opened else None, "opened": opened}
        code.interact(banner=f"`checkpoint` is {names['checkpoint']!r}; try checkpoint.names()", local=names)


def lines(given: argparse.Namespace, found: list[Place], opened: list[object]) -> Iterable[str]:
    """What is asked for; what is read goes into `opened`."""
    from megatron.checkpoint.find import find_checkpoint
    from megatron.convert.inspect import describe, describe_folder, difference, tree
    from megatron.convert.neox.peek import peek
    from megatron.convert.pairs import open_parameters, open_two

    place = found[0]
    path = Path(place.path).expanduser()
    if len(found) == 2:
        opened.extend(open_two(*found, given.config_file, checksums=given.checksums))
        return difference(opened[0], opened[1], only_differing=given.diff is not None)  # type: ignore[arg-type]
    if path.is_file():
        return peek(path, given.attributes)
    if given.attributes:
        return peek(find_checkpoint(path, place.iteration, key=place.key).path, given.attributes)
    if place.is_hf:
        folder = place.folder()
        opened.append(folder)
        sizes = {name: (part.shape, str(part.dtype).removeprefix("torch.")) for name, part in folder.tensors.items()}
        return tree(sizes) if given.tree else describe_folder(folder)
    reader = open_parameters(place, given.config_file, checksums=given.checksums)
    opened.append(reader)
    shapes = {name: (reader.entry(name).shape, reader.entry(name).dtype) for name in reader.names()}
    return tree(shapes) if given.tree else describe(reader)


if __name__ == "__main__":
    run_cli(main)
