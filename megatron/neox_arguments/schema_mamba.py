"""The keys of Mamba layers (`attention_config` kinds `mamba` and `mamba2`): part of `args.model`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.neox_arguments.keys import key

_KERNELS = "used on GPUs where they are installed unless set to false; true without them, or on a CPU, is logged"


@dataclass(frozen=True)
class MambaConfig:
    """Widths, kernels and initialisation of Mamba layers."""

    mamba_d_state: int | None = key(
        None, "Numbers of state per channel of Mamba layers (default: 16 for mamba, 128 for mamba2).", new=True
    )
    mamba_d_conv: int = key(4, "Tokens that Mamba's convolution reaches.", new=True)
    mamba_expand: int = key(2, "Inner width of Mamba layers as a multiple of hidden_size.", new=True)
    mamba_dt_rank: int | None = key(
        None, "Rank of the step sizes of mamba layers (default: hidden_size / 16, rounded up).", new=True
    )
    mamba_head_dim: int = key(64, "Width of one head of mamba2 layers.", new=True)
    mamba_n_groups: int = key(1, "Groups of heads of mamba2 layers that share B and C.", new=True)
    mamba_chunk_size: int = key(
        256, "Tokens per chunk of mamba2 layers' fused kernel; bounds memory and time, not the result.", new=True
    )
    mamba_dt_min: float = key(0.001, "Smallest initial step size of Mamba layers.", new=True)
    mamba_dt_max: float = key(0.1, "Largest initial step size of Mamba layers.", new=True)
    mamba_dt_init_floor: float = key(1e-4, "Initial step sizes of Mamba layers are raised to this.", new=True)
    mamba_selective_scan_fusion: bool | None = key(
        None, "Fused scan kernels of mamba-ssm.", differs=f"{_KERNELS}; GPT-NeoX's default is false"
    )
    mamba_causal_conv_fusion: bool | None = key(
        None, "Fused convolution of causal-conv1d.", differs=f"{_KERNELS}; GPT-NeoX's default is false"
    )
    mamba_inner_func_fusion: bool = key(
        False,
        "Fused inner function of mamba-ssm: everything after the first projection in one kernel.",
        differs="only without tensor parallelism, where it sums x_proj over this rank's channels alone",
    )
    mamba_selective_fp32_params: bool = key(True, "Keep A_log and D in fp32 when the model is in bf16 or fp16.")
    mamba_use_bias_in_conv: bool = key(True, "Bias in Mamba's convolution.")
    mamba_use_bias_in_linears: bool = key(False, "Biases in Mamba's projections in_proj, x_proj and out_proj.")
    mamba_use_bias_in_x_proj: bool = key(
        True,
        "With mamba_use_bias_in_linears: a bias in x_proj too, as in GPT-NeoX (Hugging Face's Mamba has none).",
        new=True,
    )
