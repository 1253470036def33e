"""What a completion is worth: functions by name, the library's and those of plugins, and services (json_service)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.inference.inputs import Prompt
from megatron.log import get_logger
from megatron.registry import Registry, import_entries

logger = get_logger(__name__)


@dataclass(frozen=True)
class Rollout:
    """A completion to be judged.

    Attributes:
        prompt: as it was given: a text, or the turns of a chat.
        completion: its text, without the token that ended it.
        finished: whether the model ended it; else it was cut off.
        fields: the other fields of the prompt's line, for instance its right answer.
    """

    prompt: Prompt
    completion: str
    finished: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


Reward = Callable[[Rollout], "float | None"]
Judge = Callable[[Sequence[Rollout]], "list[float | None]"]
"""The rewards of completions in their order; None of one that could not be judged."""

REWARDS: Registry[Reward] = Registry("reward", wants="a function of one Rollout", fits=callable, fields=("reads",))
"""Functions `reward(rollout) -> float`, the more the better. One that returns None or raises an error has failed for
this completion, which is counted and not trained on; the run goes on. They are called on one rank of each copy of the
model, in the training process. `reads`: the fields that every prompt's line must have."""


def judge_with(reward: Reward, what: str = "a reward") -> Judge:
    """Each completion by itself, whatever happens to the others; warnings of what happens speak of `what`."""

    def judge(rollouts: Sequence[Rollout]) -> list[float | None]:
        found: list[float | None] = []
        for rollout in rollouts:
            try:
                found.append(usable(reward(rollout), what))
            except Exception as error:  # of code that is not ours
                logger.warning(f"{what} failed: {type(error).__name__}: {error}")
                found.append(None)
        return found

    return judge


def usable(reward: Any, what: str = "a reward") -> float | None:
    """A reward as a number; None of what is none, or not finite, or larger than a float. A warning speaks of `what`."""
    if isinstance(reward, str) or reward is None:
        return None
    try:
        number = float(reward)
    except (OverflowError, TypeError, ValueError) as error:
        logger.warning(f"{what} is no number: {type(error).__name__}: {error}")
        return None
    return number if math.isfinite(number) else None


import_entries(__name__, __path__)
