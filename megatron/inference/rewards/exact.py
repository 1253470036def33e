"""Rewards of completions whose right answer is known."""

from __future__ import annotations

from megatron.inference.rewards import REWARDS, Rollout


@REWARDS.register("exact", reads=("answer",))
def exact(rollout: Rollout) -> float:
    """1 where the completion is the field `answer` of its prompt's line (blanks at both ends apart), else 0."""
    return float(rollout.completion.strip() == str(rollout.fields["answer"]).strip())
