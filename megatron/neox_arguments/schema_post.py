"""The keys of training that begins with a trained model: `args.post`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.neox_arguments.keys import key

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class PostConfig:
    """Adapters: small matrices that are trained beside frozen weights."""

    lora_r: int | None = key(
        None,
        "Train adapters of this rank (LoRA) beside the linear layers and freeze everything else; parameter_groups with "
        "freeze: false trains more. Unset: all parameters are trained.",
        new=True,
    )
    lora_alpha: float = key(
        8.0,
        "What adapters add is scaled by lora_alpha / lora_r (with use_rslora by lora_alpha / sqrt(lora_r)).",
        new=True,
    )
    lora_dropout: float = key(0.0, "Dropout of the inputs of adapters.", new=True)
    lora_target_modules: tuple[str, ...] = key(
        (ALL_LINEAR,),
        "Which linear layers get adapters: names (query_key_value, mlp.linear1) or patterns of whole names "
        "([2-9].attention.*), numbered as in checkpoints; all-linear: every one in the blocks.",
        new=True,
    )
    use_rslora: bool = key(False, "Rank-stabilised scaling of adapters: lora_alpha / sqrt(lora_r).", new=True)
    use_dora: bool = key(
        False,
        "DoRA: adapters change the direction of a weight's rows, and a vector beside them their length.",
        new=True,
    )
    lora_base: str | None = key(
        None,
        "The checkpoint whose weights the adapters belong to, where it has moved. Default: what the run began from.",
        path=True,
        new=True,
    )
    lora_save_base: bool = key(
        False,
        "Checkpoints hold the frozen weights as well. By default they hold what is trained, and name the checkpoint "
        "that has the rest.",
        new=True,
    )
