"""What every rank does for an evaluation: score and complete texts. Needs nothing of the harness, which rank 0 runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.inference.exported_text import ExportedText
from megatron.inference.generate import Limits, generate
from megatron.inference.sampling import Draws, Sampling
from megatron.inference.scoring import score
from megatron.inference.stage import Stage, batches
from megatron.inference.stop_strings import StopStrings
from megatron.inference.team import Control, Team, Worker


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
    stops = StopStrings(options["until"], text.decode)
    limits = Limits(options["new_tokens"], text.prefix, text.ends, stops.ended)
    sampling = Sampling(options["temperature"], options["top_k"], options["top_p"])
    texts: dict[int, str] = {}
    for chunk in batches(stage, [len(prompt) for _, prompt in items], batch, options["what"]):
        draws = Draws(seed, [items[i][0] for i in chunk])
        completions = generate(stage, [items[i][1] for i in chunk], limits, sampling, draws)
        for i, completion in zip(chunk, completions, strict=True):
            # An end that is no special token is part of the text.
            texts[i] = stops.cut(
                text.decode([*completion.tokens, *([] if completion.end is None else [completion.end])])
            )
    return [texts[i] for i in range(len(items))]
