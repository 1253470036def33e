"""`deepy data mixtures`: which mixtures there are by name, and what one holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.flags import Parser
from megatron.home import HOME
from megatron.neox_arguments.keys import Entry
from megatron.neox_arguments.mixture_files import parse_entry, read_named, resolve
from megatron.neox_arguments.mixtures import NamedMixture

_ABOUT = """List the mixtures that `mixture: NAME` of a config can mean, or show the shares of some.

deepy data mixtures                           those in mixtures/ here, and those that come with Deepy
deepy data mixtures web_then_selected         sources, shares by phase, caps, validation sets
deepy data mixtures mine.yml late_math -d configs

A file here, or in the folder of -d, comes before one that comes with Deepy. guide: documentation/mixtures.md"""
_PLACES = ("mixtures", "configs/mixtures")


def parser() -> Parser:
    """Names of mixtures."""
    flags = Parser(description=_ABOUT)
    flags.add_argument("names", nargs="*", metavar="NAME", help="names or files of mixtures; default: list all")
    flags.add_argument("-d", "--conf_dir", metavar="DIR", help="the folder of configs, as for training")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list, or what each mixture holds."""
    given = parser().parse_args(argv)
    if not given.names:
        folders = [Path(place) for place in (given.conf_dir, *_PLACES) if place] + [HOME / "configs/mixtures"]
        files = {path.resolve(): path for folder in folders for path in sorted(folder.glob("*.y*ml"))}
        given.names = [str(path) for path in files.values() if "\nmixture:" in f"\n{path.read_text(encoding='utf-8')}"]
        print("\n".join(f"{Path(name).stem:24} {name}" for name in given.names) or "no mixture here")
        return 0
    for name in given.names:
        entry = resolve(read_named(Entry(name, "command line"), given.conf_dir), given.conf_dir)
        print("\n".join([f"{name}:", *_lines(parse_entry(entry))]))
    return 0


def _lines(mixture: NamedMixture) -> Iterator[str]:
    """A line per source with its share in each phase, then the validation sets."""
    width = max(len(name) for name in (*mixture.sources, *mixture.valid_sets, "from step"))
    yield "  ".join([f"  {'from step':{width}}", *(f"{step:>8}" for step, _ in mixture.phases), "file"])
    shares = [mixture.shares_at(step) for step, _ in mixture.phases]
    for name, source in mixture.sources.items():
        rest = [f"{key} {value}" for key, value in source.items() if key != "path" and value is not None]
        columns = (f"{share.get(name, 0):8.2%}" for share in shares)
        yield "  ".join([f"  {name:{width}}", *columns, ", ".join([source["path"], *rest])])
    for name, source in mixture.valid_sets.items():
        tags = f" ({', '.join(source['tags'])})" if source.get("tags") else ""
        yield f"  {name:{width}}  validation: {source['path']}{tags}"
