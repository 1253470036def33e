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
from megatron.inference.chats import Chats, Written, tokenize
from megatron.inference.exported_text import as_exported
from megatron.inference.generate import Completion, Limits, generate
from megatron.inference.inputs import (
    clean_prompt,
    inherit_tokens,
    output_path,
    prompts_of,
    requested_checkpoint,
)
from megatron.inference.precompute import precompute
from megatron.inference.sampling import Draws, Sampling
from megatron.inference.stage import Stage, batches
from megatron.inference.stop_strings import GrowingText, StopStrings
from megatron.inference.team import Control, Team
from megatron.log import get_logger, part_of_result, result
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.model_tokens import ModelTokens, stop_ids
from megatron.training.setup import Process

logger = get_logger(__name__)

Record = dict[str, Any]
NEW_CHAT = "/new"


def write_texts(process: Process) -> int:
    """Generate as configured (`text_gen_type`) and return the exit code. The same call on every rank."""
    args, state, tokenizer = process.args, process.state, process.tokenizer
    options = args.generation
    if options.text_gen_type == "precompute":
        return precompute(process)
    chats: list[Chats] = []  # on rank 0, if there are any

    def inputs() -> tuple[Checkpoint, list[Written], frozenset[int]]:
        prompts = prompts_of(options) if options.text_gen_type == "input-file" else []
        checkpoint = requested_checkpoint(args)
        if options.chat or not all(isinstance(prompt, str) for prompt in prompts):
            exported = as_exported(tokenizer, inherit_tokens(args, checkpoint))
            chats.append(Chats(exported, options.chat, options.chat_system))
        written = [chats[0].write(prompt) if chats else Written(str(prompt)) for prompt in prompts]
        return checkpoint, written, find_ends(args, tokenizer, checkpoint)

    # Before the weights are read: they are what users get wrong.
    control = Control(state)
    checkpoint, prompts, ends = control.on_rank_zero(inputs)
    logger.info(f"generating with {checkpoint.path}; a text ends at token {', '.join(map(str, sorted(ends)))}")
    generator = TextGenerator(control, build_stage(args, state, tokenizer, checkpoint), tokenizer, args, ends)
    output = output_path(options, args.is_set("sample_output_file"))

    def lead() -> None:
        if options.text_gen_type == "interactive":
            interactive(generator, options.prompt_end, chats=chats[0] if options.chat else None)
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
        self.stops = StopStrings(self.options.stop_strings or (), tokenizer.detokenize)
        self.limits = Limits(self.options.maximum_tokens, tokenizer.require_eod("generation"), ends, self.stops.ended)
        self.team = Team(control, stage, {"complete": self._complete})
        self._completed = 0
        self._growing: GrowingText | None = None

    def complete(self, texts: Sequence[str | Written], what: str = "") -> list[Record]:
        """One record per text, in order; progress is shown under the name `what`, if any. On rank 0 only."""
        written = [Written(text) if isinstance(text, str) else text for text in texts]
        items = [(self._completed + i, text) for i, text in enumerate(written)]
        self._completed += len(texts)
        return self.team.ask("complete", items, {"what": what})

    def show(self, prompt: str | Written, before: str = "") -> Record:
        """Complete one text, shown on stdout behind `before` as it grows. On rank 0 only."""
        part_of_result(before)
        self._growing = GrowingText(self.stops, part_of_result)
        try:
            (record,) = self.complete([prompt])
        finally:
            shown, self._growing = self._growing.shown, None
        part_of_result(record["text"][len(shown) :] + "\n")
        result(before + record["text"], show=False)
        return record

    def _complete(self, items: Sequence[tuple[int, Written]], options: Mapping[str, Any]) -> list[Record]:
        """Records of numbered texts, by one copy of the model."""
        prompts = tokenize([written for _, written in items], self.tokenizer)
        lengths, growing = [len(prompt) for prompt in prompts], self._growing
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
                return_logprobs=self.options.return_logprobs,
                grew=None if growing is None else lambda row, tokens: growing.grew(tokens),
            )
            seconds = time.perf_counter() - start
            for i, completion in zip(chunk, completions, strict=True):
                records[i] = self._record(items[i][1].text, completion, seconds)
        return [records[i] for i in range(len(items))]

    def _record(self, context: str, completion: Completion, seconds: float) -> Record:
        record = {
            "context": context,
            "text": self.stops.cut(self.tokenizer.detokenize(completion.tokens)),
            "length": len(completion.tokens),
            "finished": completion.finished,
            "message": completion.message,
            "duration_seconds": seconds,
        }
        if self.options.return_logits:
            record["logits"] = [row.tolist() for row in completion.logits]
        if self.options.return_logprobs:
            record["logprobs"] = [
                {"id": token, "token": self.tokenizer.detokenize([token]), "logprob": logprob}
                for token, logprob in zip(completion.tokens, completion.logprobs, strict=False)
            ]
        return record


def unconditional(generator: TextGenerator, samples: int, output: Path | None) -> None:
    """Start `samples` documents from nothing; records go to `output`, texts to stdout, each below a border."""
    records = generator.complete([""] * samples, "generating samples")
    write_records(output, records)
    for number, record in enumerate(records, 1):
        result(f"{f'--- sample {number} of {samples} ':-<79}")
        result(record["text"])


def from_prompts(generator: TextGenerator, prompts: Sequence[Written], output: Path | None) -> None:
    """Complete every prompt; records go to `output`, if that is given, prompts (not those that a template wrote) with
    their texts to stdout."""
    before = ["" if prompt.templated else prompt.text for prompt in prompts]
    if len(prompts) == 1:
        records = [generator.show(prompts[0], before[0])]
    else:
        records = generator.complete(prompts, "generating from prompts")
        for shown, record in zip(before, records, strict=True):
            result(shown + record["text"])
    write_records(output, records)
    for record in records:
        if record["message"]:
            logger.warning(f"{_short(record['context'])}: {record['message']}")


def interactive(
    generator: TextGenerator, prompt_end: str, source: TextIO | None = None, chats: Chats | None = None
) -> None:
    """Ask the user for prompts until the end of input; texts go to stdout, as they grow.

    `chats`: prompts and texts are the turns of a conversation, until a prompt is `NEW_CHAT`.
    """
    turns = [] if chats is None else chats.begin()
    for prompt in prompts_from(source or sys.stdin, prompt_end):
        if chats is None:
            record = generator.show(prompt)
        elif prompt.strip() == NEW_CHAT:
            turns = chats.begin()
            continue
        else:
            turns.append({"role": "user", "content": prompt})
            record = generator.show(chats.write_turns(turns))
            turns.append({"role": "assistant", "content": record["text"]})
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


def write_records(path: Path | None, records: Sequence[Record]) -> None:
    """One JSON object a line; the file, if one is wanted, appears complete or not at all. Raises `UserError` when it
    cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    except OSError as error:
        raise UserError(f"sample_output_file: {path} cannot be written: {error}") from error
    logger.info(f"samples written to {path}: {len(records)}")
