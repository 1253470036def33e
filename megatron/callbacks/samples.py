"""Texts of the model that is being trained, in the console, in trackers and in a file of the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.evaluator import used_as_model
from megatron.inference.inputs import read_prompts
from megatron.inference.live import live_stage
from megatron.inference.lockstep import Stopped
from megatron.inference.modes import TextGenerator
from megatron.inference.sampling import Sampling
from megatron.inference.team import Control
from megatron.log import get_logger
from megatron.tokenizer.model_tokens import ModelTokens, stop_ids
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

FILE = "samples.jsonl"


@CALLBACKS.register(
    "samples",
    phase="score",
    idle={"sample_every": 0},
    keys=("sample_prompts", "prompt_end", "maximum_tokens", "temperature", "top_k", "top_p", "stop_tokens"),
    loses="no texts are generated while training",
)
class Samples(Callback):
    """Every `sample_every` steps and at the end continues each prompt of `sample_prompts`, as `generate.py` would: with
    the same keys, and each prompt with the same draws every time. Texts are appended to `samples.jsonl` of the run
    folder.

    Random states are as before afterwards, and a stop request ends it. What fails is logged; the run continues.
    """

    def __init__(self, context: RunContext, every: int) -> None:
        assert context.tokenizer is not None
        self.args, self.tokenizer, self.every = context.args, context.tokenizer, every
        self.file = None if context.folder is None else context.folder / FILE
        self.control = Control(context.state)
        options = self.args.generation

        def read() -> tuple[list[str], frozenset[int]]:
            Sampling(options.temperature, options.top_k, options.top_p)  # refuses what is out of range
            prompts = read_prompts(options.sample_prompts, options.prompt_end, "sample_prompts")
            model = ModelTokens.of(self.tokenizer, self.args.tokenizer.model_tokens)
            return prompts, model.ends() | stop_ids(options.stop_tokens or (), self.tokenizer)

        # Now, so that a wrong prompt file does not end a run that has trained for a while.
        self.prompts, self.ends = self.control.on_rank_zero(read)
        self.tokenizer.require_eod("sample_every")
        self._sampled_at = -1

    @classmethod
    def build(cls, context: RunContext) -> Samples:
        return cls(context, context.args.generation.sample_every)

    def loaded(self, trainer: Trainer) -> None:
        self._sampled_at = -1  # a run that went back comes to the same steps again

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if due(trainer.step, self.every):
            self._sample(trainer)

    def end(self, trainer: Trainer) -> None:
        if trainer.step >= (trainer.args.training.train_iters or 0):
            self._sample(trainer)

    def _sample(self, trainer: Trainer) -> None:
        if self._sampled_at == trainer.step:
            return
        trainer.settle()
        self._sampled_at, texts = trainer.step, []
        with used_as_model(trainer):
            stage = live_stage(trainer.engine, self.args, self.control, trainer.stopping)
            generator = TextGenerator(self.control, stage, self.tokenizer, self.args, self.ends)
            generator.team.run(lambda: texts.extend(self._lead(generator, trainer.step)))
            texts = self.control.broadcast(texts)
        if texts:
            trainer.call("sampled", texts)

    def _lead(self, generator: TextGenerator, step: int) -> list[tuple[str, str]]:
        """Rank 0's part: (prompt, text) of each; none when it was stopped or did not work."""
        try:
            records = generator.complete(self.prompts, "samples")
            texts = [(record["context"], record["text"]) for record in records]
            if self.file is not None:
                _append(self.file, step, texts)
            return texts
        except Stopped:
            logger.info(f"the samples at iteration {step} were stopped")
        except Exception as error:  # a full disk, for instance: samples are no reason to end a run
            if generator.team.broken:
                raise
            logger.warning(f"the samples at iteration {step} failed: {type(error).__name__}: {error}")
        return []


def _append(file: Path, step: int, texts: Sequence[tuple[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        for prompt, text in texts:
            line = {"step": step, "time": time.time(), "prompt": prompt, "text": text}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
