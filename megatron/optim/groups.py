"""Parameter groups: which parameters are trained, which decay, and whose learning rate is scaled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Parameter

from megatron.errors import UserError
from megatron.mpu.sharding import ParamSpec, spec_of
from megatron.neox_arguments.parameter_rules import ParameterRule, parse_rules
from megatron.optim.matrices import WholeMatrices, is_matrix

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_post import PostConfig
    from megatron.neox_arguments.schema_train import OptimizerConfig

# A head of rewards is trained, too: it is not the base model's.
_ADAPTERS_ALONE = (ParameterRule(("*",), freeze=True), ParameterRule(("*.lora.*", "*.rm_linear.*"), freeze=False))

_EMBEDDING_LAYER = "0."  # how the canonical names of its parameters begin


def trained_rules(optimizer: OptimizerConfig, post: PostConfig) -> tuple[ParameterRule, ...]:
    """Those of `parameter_groups` behind: with adapters (layers/lora.py) nothing else is trained, with ga_rmu_layers
    nothing outside of these blocks."""
    found = () if post.lora_r is None else _ADAPTERS_ALONE
    if post.ga_rmu_layers:
        inside = "*" if post.lora_r is None else "*.lora.*"
        blocks = tuple(f"{block + 2}.{inside}" for block in post.ga_rmu_layers)
        found = (ParameterRule(("*",), freeze=True), ParameterRule(blocks, freeze=False))
    return (*found, *parse_rules(optimizer.parameter_groups))


def is_frozen(spec: ParamSpec, rules: Sequence[ParameterRule]) -> bool:
    """Whether the last rule that speaks of the parameter freezes it."""
    return bool(_last(rules, spec, "freeze"))


def check_stages(idle: Sequence[int]) -> None:
    """Raise `UserError` when there are pipeline stages without anything to train (`idle`)."""
    if idle:
        raise UserError(
            f"nothing is trained on pipeline stage {min(idle)}, which engines cannot run: let lora_target_modules, "
            "ga_rmu_layers or parameter_groups leave something to train on every stage, or use fewer stages "
            "(pipe_parallel_size)"
        )


def freeze_parameters(params: Iterable[Parameter], rules: Sequence[ParameterRule]) -> None:
    """No gradient, no optimizer state and no update for what the last rule that speaks of it freezes.

    Before an engine is built around the model. `frozen` marks them among those that are without gradients by nature.
    """
    for p in params:
        if p.requires_grad and is_frozen(spec_of(p), rules):
            p.requires_grad_(False)
            p.frozen = True  # type: ignore[attr-defined]


def parameter_groups(
    params: Iterable[Parameter],
    *,
    weight_decay: float,
    matrix_lr_mult: float = 1.0,
    decay_embeddings: bool = True,
    rules: Sequence[ParameterRule] = (),
    matrices: WholeMatrices | None = None,
) -> list[dict[str, Any]]:
    """Split parameters by their declaration (`ParamSpec`) and the rules for their names. Empty groups are left out.

    As in GPT-NeoX, weights and embeddings decay, norms and biases do not. `matrix_lr_mult` scales the learning
    rate of hidden matrices (muP: 1 / width multiplier); `lr_mult` is applied by the engine at each step. What stays in
    fp32 in a half-precision model has a group of its own, as DeepSpeed flattens each.

    Args:
        decay_embeddings: whether the parameters of the embedding layer decay (a tied output matrix with them).
        rules: of `parameter_groups`; their `lr_mult` comes on top of `matrix_lr_mult`.
        matrices: for an optimizer that needs whole ones, which have groups of their own then.
    """
    groups: dict[tuple[bool, float, float, bool, bool], list[Parameter]] = {}
    for p in params:
        if not p.requires_grad:
            continue  # frozen, or moved by other means (biases that balance experts)
        spec = spec_of(p)
        decays = bool(spec.decay) and (decay_embeddings or not _is_embedding(spec))
        decay, mult = (_last(rules, spec, field) for field in ("weight_decay", "lr_mult"))
        decay = (weight_decay if decays else 0.0) if decay is None else decay
        mult = (matrix_lr_mult if spec.kind == "matrix" else 1.0) * (1.0 if mult is None else mult)
        whole = matrices is not None and (matrices.every or is_matrix(spec))
        if matrices is not None:
            matrices.parameters.append(p)
        groups.setdefault((decays, decay, mult, spec.keep_fp32, whole), []).append(p)
    return [
        {
            "params": members,
            "weight_decay": decay,
            "lr_mult": mult,
            **({} if matrices is None else {"matrices": matrices if whole else None}),
        }
        for (_, decay, mult, _, whole), members in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def _is_embedding(spec: ParamSpec) -> bool:
    return spec.kind == "embedding" and spec.key.startswith(_EMBEDDING_LAYER)


def _last(rules: Sequence[ParameterRule], spec: ParamSpec, field: str) -> Any:
    """What the last rule that says it of this parameter says; None when none does."""
    found = [value for rule in rules if (value := getattr(rule, field)) is not None and rule.fits(spec.key)]
    return found[-1] if found else None
