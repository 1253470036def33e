"""What every rank does for an evaluation: score and complete texts. Needs nothing of the harness, which rank 0 runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.inference.exported_text import ExportedText
from megatron.inference.generate import Limits, generate
from megatron.inference.sampling import Draws, Sampling
from megatron.inference.scoring import score
from megatron.inference.stage import Stage, batches
from megatron.inference.team import Control, Team, Worker

# A token more than a stop sequence has bytes, and some for tokens of which several make one character.
_LOOK_BACK = 4


def evaluation_team(control: Control, stage: Stage, text: ExportedText, *, batch: int, seed: int) -> Team:
    """The ranks, able to do what `HarnessModel` asks for. Collective over all ranks."""
    workers: dict[str, Worker] = {
        "score": lambda items, options: score(stage, items, batch, options["what"]),
        "complete": lambda items, options: _complete(stage, text, batch, seed, items, options),
    }
    return Team(control, stage, workers)


def _complete(
    stage: Stage,
    text: ExportedText,
    batch: int,
    seed: int,
    items: Sequence[tuple[int, list[int]]],
    options: Mapping[str, Any],
) -> list[str]:
    """Texts after numbered prompts, each cut before the first stop sequence in it."""
    until: list[str] = options["until"]
    tail = max((len(stop.encode()) for stop in until), default=0) + _LOOK_BACK

    def ends_with_stop(tokens: list[int]) -> bool:
        return any(stop in text.decode(tokens[-tail:]) for stop in until)

    limits = Limits(options["new_tokens"], text.prefix, text.ends, ends_with_stop if until else None)
    sampling = Sampling(options["temperature"], options["top_k"], options["top_p"])
    texts: dict[int, str] = {}
    for chunk in batches(stage, [len(prompt) for _, prompt in items], batch, options["what"]):
        draws = Draws(seed, [items[i][0] for i in chunk])
        completions = generate(stage, [items[i][1] for i in chunk], limits, sampling, draws)
        for i, completion in zip(chunk, completions, strict=True):
            # An end that is no special token is part of the text.
            written = text.decode([*completion.tokens, *([] if completion.end is None else [completion.end])])
            for stop in until:
                written = written.split(stop)[0]
            texts[i] = written
    return [texts[i] for i in range(len(items))]
