"""Rewards by a reward model's checkpoint, which is in memory beside the model that is trained, at the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.find import Checkpoint
from megatron.inference.build import build_stage, experts_over_ranks
from megatron.inference.inputs import check_reward_model
from megatron.inference.rewards import usable
from megatron.inference.rollouts import Completed
from megatron.inference.stage import batches
from megatron.inference.team import Control, share_out
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.tokenizer import Tokenizer

_LAYOUT = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel")


class RewardModel:
    """The model of `reward_model`. Collective over all ranks.

    Args:
        checkpoint: that has it.
        args: of the run that asks for rewards.
        batch: texts that a copy of the model judges at a time; None: its part of a step's.

    Raises:
        UserError: it is no reward model's, or one of another tokenizer.
    """

    def __init__(
        self, checkpoint: Checkpoint, args: NeoXArgs, tokenizer: Tokenizer, control: Control, batch: int | None
    ) -> None:
        saved = checkpoint.manifest.config
        check_reward_model(checkpoint)
        given = {key: args.get(key) for key in _LAYOUT} | experts_over_ranks(saved, args)
        own = for_inference(NeoXArgs.from_saved(saved)).replace(**given)
        facts = Facts(vocab_size=tokenizer.vocab_size, num_devices=control.world_size)
        # Its head follows from a train_impl that asks for data, which is none of a judge's business.
        ready = derive(own, facts).replace(output_head="reward")
        self.stage = build_stage(ready, control.state, tokenizer, checkpoint)
        self.control = control
        self.batch = batch or -(-(args.training.train_batch_size or 1) // self.stage.copy[1])

    def judge(self, completed: Sequence[Completed]) -> list[float | None]:
        """The reward at the last token of each text; None of one that has no completion or too many tokens."""
        found = share_out(self.control, self.stage, self._judge, lambda: completed)
        assert found is not None, "a stage without a lockstep is not stopped"
        return found

    def _judge(self, completed: Sequence[Completed]) -> list[float | None]:
        """By one copy of the model, on its rank with the results."""
        texts = [[*one.prompt, *one.tokens] if one.tokens else [] for one in completed]
        fitting = [number for number, text in enumerate(texts) if 0 < len(text) <= self.stage.max_positions]
        found: list[float | None] = [None] * len(texts)
        device = self.stage.state.device
        for places in batches(self.stage, [len(texts[i]) for i in fitting], self.batch):
            chunk = [texts[fitting[place]] for place in places]
            width = len(chunk[0])
            tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in chunk], device=device)
            positions = torch.arange(width, device=device).expand_as(tokens).contiguous()
            ends = torch.tensor([row * width + len(text) - 1 for row, text in enumerate(chunk)], device=device)
            rewards = self.stage.run(tokens, positions, then=partial(_at, places=ends))
            for place, reward in zip(places, [] if rewards is None else rewards.tolist(), strict=rewards is not None):
                found[fitting[place]] = usable(reward)
        return found if self.stage.has_results else []


def _at(out: Any, places: Tensor) -> Tensor:
    """Of a `RewardOutput`."""
    rewards: Tensor = out.rewards(places)
    return rewards
