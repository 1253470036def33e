#!/usr/bin/env python
"""Start a script on every rank with the merged config: `python deepy.py train.py a.yml b.yml key=value`. See --help.

`import deepy` gives the same as functions: deepy.train(["a.yml", "b.yml"], key=value); documentation/python_api.md."""

from __future__ import annotations

from megatron import signals

if __name__ == "__main__":
    signals.ExitAtStop()  # one may come during the other imports

from megatron.api import evaluate, export_to_hf, generate, import_from_hf, load_config, runs, train
from megatron.commands.launch_cli import main
from megatron.errors import run_cli

__all__ = ["evaluate", "export_to_hf", "generate", "import_from_hf", "load_config", "runs", "train"]

if __name__ == "__main__":
    run_cli(main, is_run=True)
