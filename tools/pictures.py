#!/usr/bin/env python
"""Draw the pictures of the README anew, from real commands: `python tools/pictures.py` (about two minutes of a CPU).

The terminal's text as SVG, at 100 columns; a page as PNG, by chromium without a window.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parents[1]))

from megatron.errors import MachineError, run_cli

PICTURES = ROOT / "documentation" / "pictures"
COLUMNS = 100
DEEPY = [sys.executable, "-m", "megatron.commands.cli"]


def main(arguments: list[str] | None = None) -> int:
    """Run, look, draw."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.parse_args(arguments)
    if shutil.which("chromium") is None:
        raise MachineError("chromium, which draws the page, is not on the PATH")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "configs").symlink_to(ROOT / "configs")
        (folder / "deepy").write_text(f'#!/bin/sh\nexec {" ".join(DEEPY)} "$@"\n')
        (folder / "deepy").chmod(0o755)
        _screen(folder, "data corpus stdlib -d ./data")
        plan = _screen(folder, "plan configs/tiny.yml")
        _draw(
            "plan",
            "plan configs/tiny.yml",
            "[...]\n\n" + plan[plan.index("== model") : plan.index("== callbacks")] + "[...]",
        )
        train = "train configs/tiny.yml save=checkpoints/tiny train_iters=40"
        _draw("run", train, _screen(folder, train))
        _screen(folder, "data inspect sample configs/tiny.yml --sample 17 --html page.html")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,620"]
        picture = [f"--screenshot={PICTURES / 'data.png'}", (folder / "page.html").as_uri()]
        subprocess.run([*command, *picture], check=True, timeout=120, stderr=subprocess.DEVNULL)
    return 0


def _screen(folder: Path, arguments: str) -> str:
    """What a terminal of `COLUMNS` shows at the end of a command."""
    import pyte

    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "OMP_NUM_THREADS": "1",
        "LINES": "40",
        "TERM": "xterm-256color",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # its `deepy` is what the end names
    }
    process = subprocess.Popen([*DEEPY, *arguments.split()], cwd=folder, env=environment, stdout=writer, stderr=writer)
    os.close(writer)
    pieces = []
    while True:
        try:
            piece = os.read(reader, 1 << 16)
        except OSError:  # how Linux says that nobody writes any more
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(reader)
    if process.wait(timeout=600):
        raise MachineError(f"deepy {arguments} failed:\n{b''.join(pieces).decode()}")
    terminal = pyte.Screen(COLUMNS, 500)
    pyte.ByteStream(terminal).feed(b"".join(pieces))
    return "\n".join(line.rstrip() for line in terminal.display).rstrip()


def _draw(name: str, command: str, text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (f"deepy {command}", "bold")))
    console.print(Text(text.strip("\n")))
    svg = console.export_svg(title="deepy", unique_id=name)
    svg = re.sub(r"\s*@font-face \{[^}]*\}", "", svg)  # no font of another site
    (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    run_cli(main)
