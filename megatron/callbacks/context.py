"""What callbacks are built from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron.data.batch import StepBatch
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer


class Batches(Protocol):
    """This data rank's steps, after that many consumed samples; `step` is the number of the first one."""

    def __call__(self, consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]: ...


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
        fresh: the weights are new ones, none are loaded.
        tokenizer: the run's; None where only trackers are built.
    """

    args: NeoXArgs
    state: ParallelState
    vocab_size: int
    folder: Path | None = None
    batches: Mapping[str, Batches] = field(default_factory=dict)
    sets: Sequence[NamedSet] = ()
    tokenizer: Tokenizer | None = None
    fresh: bool = True
