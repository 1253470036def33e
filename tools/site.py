#!/usr/bin/env python
"""Build the documentation as a site of its own: `python tools/site.py` (or `make site`).

The pages are the Markdown files of the repository, at their own places, so that their links work here as there. A link
that leads nowhere ends with exit code 2. Nothing is loaded from other sites, neither now nor by the reader: pictures
in Mermaid are drawn by its own library, which npm brings once (without npm they stay text).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parents[1]))

from megatron.errors import MachineError, UserError, run_cli
from megatron.flags import Parser
from megatron.log import configure, get_logger

MERMAID = "mermaid@11.12.0"
"""The version that mkdocs-material was written for."""
_TARGET = re.compile(r"\]\(([^)#:]+)[)#]")


def pages(nav: list[Any]) -> Iterator[str]:
    """The Markdown files of a `nav` of mkdocs.yml: names, {title: name} and {title: nav}."""
    for entry in nav:
        for inner in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(inner) if isinstance(inner, list) else [inner]


def lay_out(folder: Path, names: Iterable[str]) -> None:
    """These files of the repository, and the pictures and files that they link to, as links below `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    wanted = set()
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        wanted |= {ROOT / name, *((ROOT / name).parent / target for target in _TARGET.findall(text))}
    for path in {Path(os.path.normpath(path)) for path in wanted if path.is_file()}:
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)


def add_mermaid(folder: Path) -> None:
    """The library that draws pictures, unpacked next to the pages; an empty file where npm cannot bring it."""
    package = ROOT / "build" / f"{MERMAID.replace('@', '-')}.tgz"
    if not package.exists() and shutil.which("npm"):
        package.parent.mkdir(exist_ok=True)
        command = ["npm", "pack", "--silent", MERMAID, "--pack-destination", str(package.parent)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=120)
    script = b""
    if package.exists():
        with tarfile.open(package) as files:
            member = files.extractfile("package/dist/mermaid.min.js")
            script = member.read() if member else b""
    else:
        get_logger(__name__).warning("pictures stay text: npm, which brings the library that draws them, is not here")
    (folder / "mermaid.min.js").write_bytes(script)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lay out the pages and build, or serve them while they are written."""
    flags = Parser(description=__doc__)
    flags.add_argument("-o", "--output", default=str(ROOT / "build" / "site"), help="folder of the site (%(default)s)")
    flags.add_argument("--serve", action="store_true", help="show the site on localhost:8000 and follow changes")
    given = flags.parse_args(arguments)
    configure()
    try:
        from mkdocs.commands import build, serve
        from mkdocs.config import load_config
        from mkdocs.exceptions import Abort, BuildError, ConfigurationError
    except ImportError as error:
        raise MachineError(f"{error}: pip install -r requirements/requirements-dev.txt") from error
    logging.getLogger("mkdocs").addHandler(logging.StreamHandler())
    file, folder = str(ROOT / "mkdocs.yml"), ROOT / "build" / "site-pages"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config = load_config(file, strict=True, site_dir=os.path.abspath(given.output))
        lay_out(folder, pages(config.nav))
        add_mermaid(folder)
        if given.serve:
            serve.serve(file)
        else:
            build.build(config)
    except (Abort, BuildError, ConfigurationError) as error:
        raise UserError(f"{file}: {error}") from error
    get_logger(__name__).info(Path(given.output, "index.html"))
    return 0


if __name__ == "__main__":
    run_cli(main)
