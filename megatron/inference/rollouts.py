"""Completions of prompts by the model that is being trained, for training: drawn, judged, compared with a reference.

Draws depend on the seed and the number of the completion alone: the same at any layout, after any stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.errors import UserError
from megatron.inference.chats import Chats, Written, tokenize
from megatron.inference.exported_text import as_exported
from megatron.inference.generate import Limits, generate
from megatron.inference.inputs import Prompt, rollout_prompts
from megatron.inference.rewards import Judge, Rollout
from megatron.inference.sampling import Draws, Sampling
from megatron.inference.scoring import token_logprobs
from megatron.inference.stage import Stage, batches
from megatron.inference.stop_strings import StopStrings
from megatron.inference.team import Control, share_out
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.model_tokens import ModelTokens, stop_ids

logger = get_logger(__name__)


@dataclass(frozen=True)
class Asked:
    """A prompt: its tokens, what it was written as, and the other fields of its line."""

    tokens: list[int]
    prompt: Prompt
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Completed:
    """A completion of a prompt.

    Attributes:
        prompt, tokens: ids; those of the completion with the one that ended it.
        reward: None where it could not be judged, or nothing was written.
        logprobs: of `tokens`, as they were drawn; None where somebody else wrote them.
        reference: their log-probabilities by the reference model; None without one.
        text, finished: see `Rollout`.
    """

    prompt: list[int]
    tokens: list[int]
    reward: float | None
    logprobs: list[float] | None = None
    reference: list[float] | None = None
    text: str = ""
    finished: bool = True


def read_asked(args: NeoXArgs, tokenizer: Tokenizer, key: str = "rollout_prompts") -> list[Asked]:
    """The prompts that `key` names that leave room for a completion. Raises `UserError`."""
    options, length = args.post, args.model.seq_length
    assert length is not None, "a derived configuration has it"
    room = length + 1 - options.rollout_tokens
    read = rollout_prompts(options, key)
    if args.generation.chat or not all(isinstance(prompt, str) for prompt, _ in read):
        exported = as_exported(tokenizer, args.tokenizer.model_tokens)
        chats = Chats(exported, args.generation.chat, args.generation.chat_system)
        written = [chats.write(prompt) for prompt, _ in read]
    else:
        written = [Written(str(prompt)) for prompt, _ in read]
    tokens = tokenize(written, tokenizer)
    found = [Asked(ids, *one) for ids, one in zip(tokens, read, strict=True) if 0 < len(ids) <= room]
    if len(found) < len(read):
        logger.warning(
            f"{key}: {len(read) - len(found)} of {len(read)} prompts are left out: they have more than "
            f"{room} tokens (seq_length + 1 - rollout_tokens), or none"
        )
    if not found:
        raise UserError(f"{key}: no prompt has between 1 and {room} tokens (seq_length + 1 - rollout_tokens)")
    return found


class Sampler:
    """Draws completions, and compares models by them. Its methods are collective over all ranks.

    Raises `UserError`: the tokenizer has no end of document, or a stop token is none.
    """

    def __init__(self, args: NeoXArgs, tokenizer: Tokenizer, control: Control, judge: Judge) -> None:
        self.control, self.judge = control, judge
        options, generation = args.post, args.generation
        self.tokenizer, self.seed, self.temperature = tokenizer, args.training.seed, options.rollout_temperature
        self.batch, self.step = options.rollout_batch_size, args.training.train_batch_size or 1
        ends = ModelTokens.of(tokenizer, args.tokenizer.model_tokens).ends()
        ends |= stop_ids(generation.stop_tokens or (), tokenizer)
        self.stops = StopStrings(generation.stop_strings or (), tokenizer.detokenize)
        start = tokenizer.require_eod("rollouts")
        self.limits = Limits(options.rollout_tokens, start, ends, self.stops.ended)

    def write(self, stage: Stage, asked: Callable[[], Sequence[tuple[int, Asked]]]) -> list[Completed] | None:
        """Judged completions of the numbered prompts that `asked` gives on rank 0; None when asked to stop."""
        return share_out(self.control, stage, lambda mine: self._write(stage, mine), asked)

    def compare(self, stage: Stage, completed: Sequence[Completed]) -> list[list[float]] | None:
        """The log-probabilities of the completions' tokens by the stage's weights, at the temperature of the draws;
        None when asked to stop."""

        def work(mine: Sequence[Completed]) -> list[list[float]]:
            pairs = [(one.prompt, one.tokens) for one in mine]
            return token_logprobs(stage, pairs, self._at_a_time(stage), self.temperature)

        return share_out(self.control, stage, work, lambda: completed)

    def _at_a_time(self, stage: Stage) -> int:
        """Completions: those of a step that a copy of the model has, also where others are asked for (validation)."""
        return self.batch or -(-self.step // stage.copy[1])

    def _write(self, stage: Stage, asked: Sequence[tuple[int, Asked]]) -> list[Completed]:
        """Of one copy of the model, on its rank with the results."""
        found: dict[int, Completed] = {}
        lengths = [len(one.tokens) for _, one in asked]
        for chunk in batches(stage, lengths, self._at_a_time(stage)):
            completions = generate(
                stage,
                [asked[i][1].tokens for i in chunk],
                self.limits,
                Sampling(self.temperature),
                Draws(self.seed, [asked[i][0] for i in chunk]),
                return_logprobs=self.temperature,
            )
            for i, done in zip(chunk, completions, strict=True):
                tokens = done.tokens if done.end is None else [*done.tokens, done.end]
                text = self.stops.cut(self.tokenizer.detokenize(done.tokens))
                found[i] = Completed(asked[i][1].tokens, tokens, None, done.logprobs, None, text, done.finished)
        if not stage.has_results:
            return []
        ordered = [found[i] for i in range(len(asked))]
        rollouts = [
            Rollout(one.prompt, done.text, done.finished, one.fields)
            for (_, one), done in zip(asked, ordered, strict=True)
        ]
        return [replace(done, reward=reward) for done, reward in zip(ordered, self.judge(rollouts), strict=True)]
