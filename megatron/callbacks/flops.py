"""FLOPs of a training step and the peak they are measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from megatron.callbacks.context import RunContext
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.formulas import flops_per_token

# Dense bf16/fp16 peak, FLOP/s, from the vendors' data sheets: half of what they give with sparsity. The longest name
# that is part of the device's counts. H100: nvidia.com/data-center/h100 (SXM 1,979, NVL 1,671), the data sheet of its
# PCIe card (1,513); H20: its data sheet (148 dense); B200, B300: those of HGX, 36 PFLOP/s of 8 GPUs; GB200, GB300:
# those of NVL72, 360 PFLOP/s of 72.
PEAKS = {
    "H200": 989e12,
    "H200 NVL": 835.5e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "GB300": 2500e12,
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
        per_step: model FLOPs of train_batch_size samples, over all ranks (forward and backward, nothing recomputed).
        world_size: ranks that share it.
        peak: FLOP/s of one device, None when unknown (no MFU is shown then).
        recompute_factor: hardware FLOPs over model FLOPs: 4/3 with full activation checkpointing, else 1.
        by_length: `per_step` where rows are shorter than samples, by their length (`seq_length_ramp`).
    """

    per_step: float
    world_size: int
    peak: float | None
    recompute_factor: float = 1.0
    by_length: Mapping[int, float] = field(default_factory=dict)

    def of_rows(self, length: int) -> float:
        """`per_step` with rows of this length."""
        return self.by_length.get(length, self.per_step)


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
    tokens = args.training.train_batch_size * BatchPlan.of(args).tokens_per_sample

    def with_rows(length: int) -> float:
        return flops_per_token(replace(args.model, seq_length=length), context.vocab_size) * tokens

    return Flops(
        per_step=with_rows(args.model.seq_length),
        world_size=state.topology.world_size,
        peak=device_peak(state.device, args.logging.peak_theoretical_tflops),
        recompute_factor=4 / 3 if args.model.checkpoint_policy == "full" else 1.0,
        by_length={length: with_rows(length) for _, length in BatchPlan.of(args).lengths},
    )
