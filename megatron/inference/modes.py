"""The ways to ask for text: unconditional, from a file of prompts, interactively.

Every rank of the job calls the same function with the same arguments. Prompts are dealt to the data-parallel copies
of the model; rank 0 gets all records back, in the order of the prompts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import UserError
from megatron.inference.generate import Completion, Limits, generate
from megatron.inference.sampling import Sampling
from megatron.inference.stage import Stage
from megatron.log import get_logger, progress, result
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer

logger = get_logger(__name__)

Record = dict[str, Any]


class TextGenerator:
    """Completes texts with one model, spread over the ranks of a job.

    Args:
        batch: prompts completed at the same time by one copy of the model.
    """

    def __init__(self, stage: Stage, tokenizer: Tokenizer, args: NeoXArgs, batch: int) -> None:
        self.stage = stage
        self.tokenizer = tokenizer
        self.batch = max(1, batch)
        options = args.generation
        self.sampling = Sampling(options.temperature, options.top_k, options.top_p)
        if tokenizer.eod is None:
            raise UserError(
                "the tokenizer has no end-of-document token, so generation could not stop; set one in its file"
            )
        self.limits = Limits(options.maximum_tokens, args.model.max_position_embeddings, tokenizer.eod)
        self.use_cache = not options.recompute
        self.return_logits = options.return_logits
        state = stage.state
        # The same draws on every rank of a copy (they must agree on a token), other draws in another copy.
        self.generator = torch.Generator(state.device).manual_seed(args.training.seed + state.dp_rank)

    def complete(self, texts: Sequence[str], what: str = "generating") -> list[Record] | None:
        """One record per text, in order, on rank 0; None on other ranks. Collective over all ranks."""
        state = self.stage.state
        mine = range(state.dp_rank, len(texts), state.dp_size)
        chunks = [mine[i : i + self.batch] for i in range(0, len(mine), self.batch)]
        records: dict[int, Record] = {}
        for chunk in progress(chunks, what=what, unit="batch") if state.rank == 0 else chunks:
            start = time.perf_counter()
            prompts = [self.tokenizer.tokenize(texts[i]) if texts[i] else [] for i in chunk]
            completions = generate(
                self.stage,
                prompts,
                self.limits,
                self.sampling,
                self.generator,
                use_cache=self.use_cache,
                return_logits=self.return_logits,
            )
            seconds = time.perf_counter() - start
            for i, completion in zip(chunk, completions, strict=True):
                records[i] = self._record(texts[i], completion, seconds)
        return self._gather(records, len(texts))

    def _record(self, context: str, completion: Completion, seconds: float) -> Record:
        record = {
            "context": context,
            "text": self.tokenizer.detokenize(completion.tokens),
            "length": len(completion.tokens),
            "finished": completion.finished,
            "message": completion.message,
            "duration_seconds": seconds,
        }
        if self.return_logits:
            record["logits"] = [row.tolist() for row in completion.logits]
        return record

    def _gather(self, records: dict[int, Record], count: int) -> list[Record] | None:
        """Records of all copies on rank 0; the last stage's, because only that one has logits."""
        state = self.stage.state
        if state.topology.world_size > 1:
            speaks = state.tp_rank == 0 and state.is_last_stage
            everyone: list[Any] = [None] * state.topology.world_size
            dist.all_gather_object(everyone, records if speaks else {})
            records = {i: record for part in everyone for i, record in part.items()}
        return [records[i] for i in range(count)] if state.rank == 0 else None


def write_records(path: Path, records: Sequence[Record]) -> None:
    """One JSON object a line; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    temporary.replace(path)
    logger.info(f"{len(records)} samples written to {path}")


def unconditional(generator: TextGenerator, samples: int, output: Path) -> None:
    """Start `samples` documents from nothing."""
    records = generator.complete([""] * samples, "generating samples")
    if records is not None:
        write_records(output, records)
        for record in records:
            result(record["text"])


def read_prompts(path: Path, prompt_end: str) -> list[str]:
    """The prompts of a file: separated by `prompt_end`, stripped, empty ones dropped. Raises UserError."""
    if not path.is_file():
        raise UserError(f"sample_input_file: {path} does not exist")
    if not prompt_end:
        raise UserError("prompt_end is empty: give the text that separates prompts, for instance '\\n'")
    prompts = [part.strip() for part in path.read_text(encoding="utf-8").split(prompt_end)]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UserError(f"sample_input_file: {path} holds no prompt")
    return prompts


def input_file(generator: TextGenerator, source: Path, prompt_end: str, output: Path | None) -> None:
    """Complete every prompt of a file."""
    records = generator.complete(read_prompts(source, prompt_end), "generating from prompts")
    if records is not None:
        write_records(output or source.with_name(source.name + ".output.jsonl"), records)
        for record in records:
            result(record["context"] + record["text"])


def interactive(generator: TextGenerator, prompt_end: str) -> None:
    """Ask rank 0's user for prompts until end of input. A prompt may span lines up to `prompt_end`."""
    state = generator.stage.state
    while True:
        box: list[str | None] = [_ask(prompt_end) if state.rank == 0 else None]
        if state.topology.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return
        # Every copy of the model completes the same prompt; only the first one's answer is shown.
        records = generator.complete([box[0]])
        if records is not None:
            result(records[0]["text"])
            if records[0]["message"]:
                logger.info(records[0]["message"])


def _ask(prompt_end: str) -> str | None:
    """One prompt from standard input, None at its end."""
    if sys.stdin.isatty():
        sys.stderr.write("Context prompt >>> ")
        sys.stderr.flush()
    text = ""
    while True:
        line = sys.stdin.readline()
        if not line:
            return text.strip() or None
        text += line
        if text.endswith(prompt_end) or prompt_end == "\n":
            prompt = text[: -len(prompt_end)] if text.endswith(prompt_end) else text
            if prompt.strip():
                return prompt.strip()
            text = ""
