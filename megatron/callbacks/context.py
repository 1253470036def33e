"""What callbacks are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.data.batch import StepBatch
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer

Batches = Callable[[int], Iterator[StepBatch]]
"""`batches(consumed)`: this data rank's steps, after that many consumed samples."""


@dataclass(frozen=True)
class NamedSet:
    """A validation set with a name: its `iterations` batches are the same in every evaluation."""

    name: str
    tags: tuple[str, ...]
    iterations: int
    batches: Batches


@dataclass(frozen=True)
class RunContext:
    """A run before its first step.

    Attributes:
        args: the derived configuration.
        state: this rank's place in the layout.
        vocab_size: of the tokenizer.
        folder: the run folder, None without one.
        batches: by role ("train", "valid", "test").
        sets: the named validation sets.
        tokenizer: the run's; None where only trackers are built.
    """

    args: NeoXArgs
    state: ParallelState
    vocab_size: int
    folder: Path | None = None
    batches: Mapping[str, Batches] = field(default_factory=dict)
    sets: Sequence[NamedSet] = ()
    tokenizer: Tokenizer | None = None
