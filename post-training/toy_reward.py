"""A plugin with the reward of toy-grpo.yml: the answer to `repeat c:` is the letter c, again and again."""

from __future__ import annotations

from megatron.inference.rewards import REWARDS, Rollout


@REWARDS.register("repeats")
def repeats(rollout: Rollout) -> float:
    """The share of the completion that is the letter asked for; a tenth of that for other letters of the prompts."""
    wanted, text = str(rollout.fields["letter"]), rollout.completion
    return sum(1.0 if letter == wanted else 0.1 * (letter in "abcd") for letter in text) / max(1, len(text))
