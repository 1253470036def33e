"""Deepy from a script or a notebook: what the command lines do, as functions. `import deepy` has them all.

Ranks, one or many, are processes of their own, started as `deepy.py` starts them: nothing of a run stays in the caller,
and its GPUs are free between calls. Keywords are config keys and override the files; one inside a mapping is
`**{"optimizer.params.lr": 1e-3}`. Wrong input raises `UserError` before a rank starts, a failed job the error of its
exit code (megatron/errors.py).
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import log
from megatron.cluster.launch import launch
from megatron.errors import DeepyError, LostRankError, MachineError, NumericsError, StopRequested, UserError
from megatron.home import HOME
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.overrides import Overrides
from megatron.neox_arguments.problems import collector
from megatron.plan.preflight import check_before_launch, load

if TYPE_CHECKING:
    from megatron.convert.hf.export_hf import Exported
    from megatron.convert.importing import Imported
    from megatron.monitor.table import Runs

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_ERRORS = {error.exit_code: error for error in (UserError, StopRequested, NumericsError, LostRankError, MachineError)}
_PROMPT_END = "\x1e"  # ASCII's record separator: prompts are taken as they are, whatever they begin or end with


def load_config(files: Files, **overrides: Any) -> NeoXArgs:
    """The merged, derived and checked configuration of config files."""
    return NeoXArgs.from_ymls(_paths(files), overrides)


def train(files: Files, **overrides: Any) -> None:
    """Train, or resume the run in `save`, until `train_iters`."""
    _run("train.py", files, overrides)


def generate(files: Files, prompts: Sequence[str] | None = None, **overrides: Any) -> list[dict[str, Any]]:
    """Texts from the checkpoint in `load` (else `save`): one record per prompt, without prompts `num_samples` records.

    A record has `context`, `text`, `length`, `finished`, `message` and `duration_seconds`. Records are also written to
    `sample_output_file` when that is given.
    """
    with tempfile.TemporaryDirectory(prefix="deepy-") as folder:
        output = Path(overrides.setdefault("sample_output_file", f"{folder}/records.jsonl"))
        overrides["text_gen_type"] = "unconditional"
        if prompts is not None:
            if blank := [i for i, prompt in enumerate(prompts) if not prompt.strip()]:
                raise UserError(f"prompts[{blank[0]}] is empty; leave prompts out to generate without one")
            file = Path(folder, "prompts.txt")
            file.write_text(f"{_PROMPT_END}\n".join(prompts), encoding="utf-8")
            overrides |= {"text_gen_type": "input-file", "sample_input_file": str(file), "prompt_end": _PROMPT_END}
        _run("generate.py", files, overrides)
        with output.open(encoding="utf-8") as records:
            return [json.loads(line) for line in records]


def evaluate(files: Files, tasks: Sequence[str], **overrides: Any) -> dict[str, Any]:
    """The results of lm-eval tasks on the checkpoint in `load` (else `save`), as `eval.py` writes them; those without
    a result are in "failed"."""
    with tempfile.TemporaryDirectory(prefix="deepy-") as folder:
        try:
            _run("eval.py", files, {**overrides, "eval_tasks": list(tasks), "eval_results_prefix": f"{folder}/api"})
        except DeepyError:
            if not any(Path(folder).iterdir()):
                raise
        (file,) = Path(folder).glob("api_eval_results_*.json")
        return json.loads(file.read_text(encoding="utf-8"))


def runs(*folders: str | os.PathLike[str]) -> Runs:
    """The runs in these folders, or below them, as `monitor` shows them: a list of rows that prints as its table, in
    Jupyter too."""
    from megatron.cluster.slurm import Slurm
    from megatron.monitor.collect import Selection, look
    from megatron.monitor.table import Runs

    return Runs(look(Selection(folders=tuple(map(Path, folders))), Slurm(), socket.gethostname()).rows)


def export_to_hf(checkpoint: str | Path, output: str | Path, **options: Any) -> Exported:
    """A checkpoint as a Hugging Face folder; `options` as in `megatron.convert.hf.export_hf.export`."""
    from megatron.convert.hf.export_hf import export

    return export(checkpoint, output, **options)


def import_from_hf(model: str, output: str | Path, **options: Any) -> Imported:
    """A Hugging Face folder or Hub model as a checkpoint with its config file; `options` as in `import_model`."""
    from megatron.convert.hf.import_hf import import_model

    return import_model(model, output, **options)


def start(script: str, paths: Sequence[str], overrides: Overrides) -> int:
    """Check what can be checked here, start `script` on every rank, wait; returns the job's exit code."""
    with collector() as problems:
        args, placement = load(paths, overrides, script, os.environ, problems)
        check_before_launch(args, placement, script, problems)
    assert placement is not None  # else there were problems
    return launch(script, args, placement, os.environ)


def _run(name: str, files: Files, overrides: dict[str, Any]) -> None:
    log.configure(level=os.environ.get("LOGLEVEL", "INFO"))
    code = start(str(HOME / name), _paths(files), overrides)
    if code:
        raise _ERRORS.get(code, DeepyError)(f"{name} ended with exit code {code}; its messages above name the cause")


def _paths(files: Files) -> list[str]:
    return [os.fspath(file) for file in ([files] if isinstance(files, (str, os.PathLike)) else files)]
