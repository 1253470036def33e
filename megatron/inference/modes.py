"""The ways to ask for text: unconditional, from a file of prompts, interactively.

Rank 0 asks, writes and shows; prompts are dealt to the data-parallel copies of the model.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron.checkpoint.find import Checkpoint
from megatron.errors import UserError
from megatron.files import write_atomically
from megatron.inference.build import build_stage
from megatron.inference.generate import Completion, Limits, generate
from megatron.inference.inputs import clean_prompt, inherit_tokens, output_path, read_prompts, requested_checkpoint
from megatron.inference.sampling import Draws, Sampling
from megatron.inference.stage import Stage, batches
from megatron.inference.team import Control, Team
from megatron.log import get_logger, result
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.model_tokens import ModelTokens, stop_ids
from megatron.training.setup import Process

logger = get_logger(__name__)

Record = dict[str, Any]


def write_texts(process: Process) -> int:
    """Generate as configured (`text_gen_type`) and return the exit code. The same call on every rank."""
    args, state, tokenizer = process.args, process.state, process.tokenizer
    options = args.generation

    def inputs() -> tuple[Checkpoint, list[str], frozenset[int]]:
        from_file = options.text_gen_type == "input-file"
        prompts = read_prompts(options.sample_input_file, options.prompt_end) if from_file else []
        checkpoint = requested_checkpoint(args)
        return checkpoint, prompts, find_ends(args, tokenizer, checkpoint)

    # Before the weights are read: they are what users get wrong.
    control = Control(state)
    checkpoint, prompts, ends = control.on_rank_zero(inputs)
    logger.info(f"generating with {checkpoint.path}; a text ends at {', '.join(map(str, sorted(ends)))}")
    generator = TextGenerator(control, build_stage(args, state, tokenizer, checkpoint), tokenizer, args, ends)
    output = output_path(options, args.is_set("sample_output_file"))

    def lead() -> None:
        if options.text_gen_type == "interactive":
            interactive(generator, options.prompt_end)
        elif options.text_gen_type == "input-file":
            from_prompts(generator, prompts, output)
        else:
            unconditional(generator, options.num_samples, output)

    generator.team.run(lead)
    return 0


def find_ends(args: NeoXArgs, tokenizer: Tokenizer, checkpoint: Checkpoint) -> frozenset[int]:
    """The tokens that end a text: the model's ends, those that training added, the end of document, `stop_tokens`.

    Raises `UserError` for a stop token that is none.
    """
    model = ModelTokens.of(tokenizer, inherit_tokens(args, checkpoint))
    return model.ends() | stop_ids(args.generation.stop_tokens or (), tokenizer)


class TextGenerator:
    """Completes texts with one model, spread over the ranks of a job. The n-th text it is given has draws of its own.

    `ends`: the tokens that end a text, see `find_ends`.

    Attributes:
        team: whose rank 0 may call `complete`.

    Raises:
        UserError: the tokenizer has no end-of-document token, or a sampling key is out of range.
    """

    def __init__(
        self, control: Control, stage: Stage, tokenizer: Tokenizer, args: NeoXArgs, ends: frozenset[int]
    ) -> None:
        self.stage = stage
        self.tokenizer = tokenizer
        self.options = args.generation
        self.batch = args.training.train_micro_batch_size_per_gpu or 1
        self.seed = args.training.seed
        self.sampling = Sampling(self.options.temperature, self.options.top_k, self.options.top_p)
        self.limits = Limits(self.options.maximum_tokens, tokenizer.require_eod("generation"), ends)
        self.team = Team(control, stage, {"complete": self._complete})
        self._completed = 0

    def complete(self, texts: Sequence[str], what: str = "") -> list[Record]:
        """One record per text, in order; progress is shown under the name `what`, if any. On rank 0 only."""
        items = [(self._completed + i, text) for i, text in enumerate(texts)]
        self._completed += len(texts)
        return self.team.ask("complete", items, {"what": what})

    def _complete(self, items: Sequence[tuple[int, str]], options: Mapping[str, Any]) -> list[Record]:
        """Records of numbered texts, by one copy of the model."""
        prompts = self.tokenizer.tokenize_openly([text for _, text in items])
        lengths = [len(prompt) for prompt in prompts]
        records: dict[int, Record] = {}
        for chunk in batches(self.stage, lengths, self.batch, options["what"]):
            start = time.perf_counter()
            completions = generate(
                self.stage,
                [prompts[i] for i in chunk],
                self.limits,
                self.sampling,
                Draws(self.seed, [items[i][0] for i in chunk]),
                use_cache=not self.options.recompute,
                return_logits=self.options.return_logits,
            )
            seconds = time.perf_counter() - start
            for i, completion in zip(chunk, completions, strict=True):
                records[i] = self._record(items[i][1], completion, seconds)
        return [records[i] for i in range(len(items))]

    def _record(self, context: str, completion: Completion, seconds: float) -> Record:
        record = {
            "context": context,
            "text": self.tokenizer.detokenize(completion.tokens),
            "length": len(completion.tokens),
            "finished": completion.finished,
            "message": completion.message,
            "duration_seconds": seconds,
        }
        if self.options.return_logits:
            record["logits"] = [row.tolist() for row in completion.logits]
        return record


def unconditional(generator: TextGenerator, samples: int, output: Path) -> None:
    """Start `samples` documents from nothing; records go to `output`, texts to stdout."""
    records = generator.complete([""] * samples, "generating samples")
    write_records(output, records)
    for record in records:
        result(record["text"])


def from_prompts(generator: TextGenerator, prompts: Sequence[str], output: Path) -> None:
    """Complete every prompt; records go to `output`, prompts with their texts to stdout."""
    records = generator.complete(prompts, "generating from prompts")
    write_records(output, records)
    for record in records:
        result(record["context"] + record["text"])
        if record["message"]:
            logger.warning(f"{_short(record['context'])}: {record['message']}")


def interactive(generator: TextGenerator, prompt_end: str, source: TextIO | None = None) -> None:
    """Ask the user for prompts until the end of input; texts go to stdout."""
    for prompt in prompts_from(source or sys.stdin, prompt_end):
        record = generator.complete([prompt])[0]
        result(record["text"])
        if record["message"]:
            logger.info(record["message"])


def prompts_from(source: TextIO, prompt_end: str) -> Iterator[str]:
    """Prompts as they come in, each up to `prompt_end` (they may span lines), blank ones left out."""
    rest, first = "", True
    while line := _read_line(source):
        *complete, rest = (rest + line).split(prompt_end)
        for part in complete:
            prompt, first = clean_prompt(part, prompt_end, first=first), False
            if prompt.strip():
                yield prompt
    if rest.strip():
        yield clean_prompt(rest, prompt_end, first=first)


def _read_line(source: TextIO) -> str:
    if source.isatty():
        sys.stderr.write("Context prompt >>> ")
        sys.stderr.flush()
    return source.readline()


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


def write_records(path: Path, records: Sequence[Record]) -> None:
    """One JSON object a line; the file appears complete or not at all. Raises `UserError` when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    except OSError as error:
        raise UserError(f"sample_output_file: {path} cannot be written: {error}") from error
    logger.info(f"samples written to {path}: {len(records)}")
