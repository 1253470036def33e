"""FLOPs of a training step and the peak they are measured against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.callbacks.context import RunContext
from megatron.neox_arguments.formulas import flops_per_token

# Dense bf16/fp16 peak without sparsity, FLOP/s, from the vendors' data sheets.
PEAKS = {
    "H200": 989e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,
}


@dataclass(frozen=True)
class Flops:
    """What a step costs.

    Attributes:
        per_step: model FLOPs of one optimizer step of the whole job (forward and backward, nothing recomputed).
        world_size: ranks that share it.
        peak: FLOP/s of one device, None when unknown (no MFU is shown then).
        recompute_factor: hardware FLOPs over model FLOPs: 4/3 with full activation checkpointing, else 1.
    """

    per_step: float
    world_size: int
    peak: float | None
    recompute_factor: float = 1.0


def device_peak(device: torch.device, configured_tflops: float | None) -> float | None:
    """`peak_theoretical_tflops` if set, else the data sheet's number for this device, else None."""
    if configured_tflops:
        return configured_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    matches = [key for key in PEAKS if key in name]
    return PEAKS[max(matches, key=len)] if matches else None


def step_flops(context: RunContext) -> Flops:
    """FLOPs of one optimizer step of a run, and the peak of this device."""
    args, state = context.args, context.state
    tokens = args.training.train_batch_size * args.model.seq_length
    return Flops(
        per_step=flops_per_token(args.model, context.vocab_size) * tokens,
        world_size=state.topology.world_size,
        peak=device_peak(state.device, args.logging.peak_theoretical_tflops),
        recompute_factor=4 / 3 if args.model.checkpoint_policy == "full" else 1.0,
    )
