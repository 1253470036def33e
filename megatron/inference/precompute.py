"""A model's log-probabilities of the texts of a run's data sets, written next to them (`text_gen_type: precompute`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpoint.find import Checkpoint, identity
from megatron.data.order.sources import named_paths
from megatron.data.order.splits import NAMES
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.token_files import TokenFiles
from megatron.errors import UserError
from megatron.files import write_atomically
from megatron.inference.build import build_stage
from megatron.inference.inputs import requested_checkpoint
from megatron.inference.scoring import token_logprobs
from megatron.inference.team import Control, Team
from megatron.log import ProgressBar, get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.training.setup import Process

logger = get_logger(__name__)

AT_A_TIME = 256
"""Texts that rank 0 deals to the copies of the model at a time, for each copy and row of a batch."""


def precompute(process: Process) -> int:
    """Write `<data path>_<precompute_model_name>` for every data set that the config names, and return the exit code.

    float32, for each text the log-probabilities of its tokens from the second on, of at most the `seq_length` + 1
    tokens that a sample has. What was written by the same checkpoint is not computed again. The same call on every
    rank.

    Raises `UserError`: precompute_model_name or data are not set, or such a file is there from another checkpoint.
    """
    args, state = process.args, process.state
    control = Control(state)
    checkpoint, missing = control.on_rank_zero(lambda: _missing(args))
    stage = build_stage(args, state, process.tokenizer, checkpoint)
    batch = args.training.train_micro_batch_size_per_gpu or 1

    def score(texts: Sequence[list[int]], options: Mapping[str, Any]) -> list[list[float]]:
        return token_logprobs(stage, [(text[:1], text[1:]) for text in texts], batch)

    team = Team(control, stage, {"score": score})
    length = (args.model.seq_length or stage.max_positions) + 1

    def lead() -> None:
        for path, output in missing.items():
            data, size = TokenFiles.of(args.data).open(path), AT_A_TIME * batch * stage.copy[1]
            with (
                IndexedDatasetBuilder(output, np.float32) as builder,
                ProgressBar(f"log-probabilities of {path}", len(data), "texts") as report,
            ):
                for first in range(0, len(data), size):
                    numbers = range(first, min(first + size, len(data)))
                    for values in team.ask("score", [data.get(number)[:length].tolist() for number in numbers], {}):
                        builder.add_document(np.asarray(values, np.float32))
                    report(len(numbers))
                _note(output).unlink(missing_ok=True)
                builder.finalize()
            write_atomically(_note(output), json.dumps(_origin(args, checkpoint, data)) + "\n")
            logger.info(f"log-probabilities of {len(data):,} texts written to {output}.bin")

    team.run(lead)
    return 0


def _missing(args: NeoXArgs) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint, and what it has to score: data path -> output."""
    name = args.data.precompute_model_name
    if name is None:
        raise UserError("text_gen_type precompute: set precompute_model_name, the ending of the files it writes")
    checkpoint, missing = requested_checkpoint(args), {}
    paths = dict.fromkeys(named_paths(args.data, NAMES))
    if not paths:
        raise UserError("text_gen_type precompute: set the data paths whose texts are scored (train_data_paths, ...)")
    for path in paths:
        for part in TokenFiles.of(args.data).open(path).parts:
            output = f"{part.prefix}_{name}"
            if not _is_there(output, part, _origin(args, checkpoint, part)):
                missing[str(part.prefix)] = output
    return checkpoint, missing


def _is_there(output: str, data: IndexedDataset, origin: Mapping[str, Any]) -> bool:
    """Whether `output` was written before, of the same texts. Raises `UserError` when by something else."""
    if not Path(f"{output}.idx").exists():
        return False
    note = _note(output)
    if (
        note.is_file()
        and json.loads(note.read_text(encoding="utf-8")) == origin
        and len(IndexedDataset(output)) == len(data)
    ):
        logger.info(f"{output}.bin is there already")
        return True
    raise UserError(
        f"precompute_model_name: {output}.bin is there already, of another checkpoint, seq_length or data; remove it "
        "and its .idx, or give another precompute_model_name"
    )


def _note(output: str) -> Path:
    return Path(f"{output}.json")


def _origin(args: NeoXArgs, checkpoint: Checkpoint, data: IndexedDataset) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "checkpoint": str(checkpoint.path.absolute()),
        "crc32": identity(checkpoint.path),
        "seq_length": args.model.seq_length,
        "precision": args.optimizer.precision,
        "data": [identity for file in data.identity for identity in file[1:]],
    }
