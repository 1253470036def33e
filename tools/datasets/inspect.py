"""Look at data: documents of a dataset, training samples of a run, the samples of its steps. See --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main(argv: Sequence[str] | None = None) -> None:
    """Show what the command line asks for."""
    from megatron.plan.inspect_cli import main as inspect

    inspect(sys.argv[1:] if argv is None else argv, os.environ)


if __name__ == "__main__":
    # Replaces this folder, where Python would find this file instead of its own `inspect`.
    sys.path[0] = ROOT
    from megatron.errors import run_cli

    run_cli(main)
elif __name__ == "inspect":
    # Another tool of this folder, which is first on the path, imports Python's `inspect`: load that one instead.
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("inspect", [os.path.dirname(os.__file__)])
    assert spec is not None and spec.loader is not None
    sys.modules["inspect"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["inspect"])
