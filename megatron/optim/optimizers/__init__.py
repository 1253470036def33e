"""Optimizers by `optimizer.type`. All decay decoupled from the gradient, as NeoX's FusedAdam does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from megatron.errors import UserError
from megatron.registry import Registry, import_entries

Groups = list[dict[str, Any]]
Builder = Callable[[Groups, float, dict[str, Any]], Optimizer]
OPTIMIZERS: Registry[Builder] = Registry(
    "optimizer.type",
    wants="a function (groups, lr, params) -> torch.optim.Optimizer",
    fits=callable,
    fields=("params", "moments", "block_moments", "decays", "matrices", "averages", "curvature"),
)
"""Builders of optimizers. An entry is a function `(groups, lr, params) -> torch.optim.Optimizer`:

* `groups` from `groups.parameter_groups`, each with its `weight_decay`, which is decoupled; `params` holds what
  `optimizer.params` sets, over the defaults of the row;
* the learning rate is read from each group at every step; gradients are clipped already;
* what it keeps of a parameter is tensors of the parameter's shape in `state[p]`, `step` if it counts, and numbers that
  are the same for all parameters, so that checkpoints carry it to any layout.

Its row:

* `params={"eps": 1e-8}`: keys of `optimizer.params` with their defaults, which give the types too (or the type alone,
  `float`, in an attribute `params` of a plugin's class);
* `moments=2`: how many fp32 tensors of a parameter's size it keeps; `{"always": 2, "momentum": 1}`: one more where that
  parameter of the optimizer is not 0. A plugin that leaves it out is estimated with 2;
* `block_moments=1`: the same of parameters in blocks, nearly all of which are matrices, where it is another number;
* `decays=False`: it takes no weight decay;
* `averages=True`: the weights in training are not those to be evaluated. Its method `average(values)` makes these, of
  some elements, from `weight` and what it keeps. Files of weights in checkpoints hold them;
* `curvature=True`: every `curvature_every` steps its gradients are those of targets drawn from the model, of
  `estimated_tokens` tokens, see `sophia.py`;
* `matrices=True`: it needs whole matrices: groups of them have a `WholeMatrices` under `matrices`, those of the rest
  None, and layouts that cut them otherwise are refused. `"all"`: all groups have it. What it keeps in another shape
  than the parameter's is in its attribute `kept`, by parameter.
"""


def build_optimizer(kind: str, groups: Groups, lr: float, params: Mapping[str, Any]) -> Optimizer:
    """The optimizer called `kind` in YAML (case as in NeoX) over parameter groups.

    `params`: the optimizer's own parameters, with defaults (`neox_arguments.optimizer_params`).

    Raises:
        UserError: unknown `kind`, or parameters without any group (a stage that trains nothing).
    """
    if not groups:
        raise UserError("this pipeline stage has no parameters to train; use fewer stages (pipe_parallel_size)")
    name = kind if kind in OPTIMIZERS else kind.lower()
    return OPTIMIZERS[name](groups, lr, dict(params))


import_entries(__name__, __path__)
