"""A stage of the model that is being trained: the engine's own layers, no second copy of a weight."""

from __future__ import annotations

from collections.abc import Callable

from megatron.inference.build import DTYPES, position_limit
from megatron.inference.lockstep import Lockstep
from megatron.inference.stage import Stage
from megatron.inference.team import Control
from megatron.layers.positions.rope_scaling import switch_length
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import Engine


def live_stage(
    engine: Engine, args: NeoXArgs, control: Control | None = None, stop: Callable[[], bool] = lambda: False
) -> Stage:
    """This rank's stage of the engine's model, for use inside `engine.evaluating()`.

    `control`: keeps ranks together that work on texts of their own; not needed where all make the same passes.
    `stop`: whether this rank was asked to stop; the first pass after any rank was raises `Stopped` on all.
    """
    model, state = args.model, engine.state
    lag = 0 if engine.joint_passes else state.pp_size
    return Stage(
        engine.stage_layers(),
        state,
        model.hidden_size,
        DTYPES[args.optimizer.precision or "fp32"],
        position_limit(model),
        switch_length(model.rope_scaling),
        forward=engine.run_stage,
        lockstep=None if control is None else Lockstep(control.group, lag, stop, engine.beat),
    )
