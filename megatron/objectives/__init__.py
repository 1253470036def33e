"""What is trained: one objective per `train_impl`.

An objective is an object with

* `batch_keys`: the fields of a `StepBatch` that make up its labels, in order;
* `loss(out: LMOutput, labels) -> scalar`: the micro-batch's share of the step's loss. The engine averages over
  accumulation and data-parallel ranks; the labels' weight undoes that, so that the step's loss is
  sum over trained tokens of the global batch / their number, whatever the split. `out.with_balance(loss)` adds the
  gradient of what mixtures of experts add.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from megatron.model.head import LMOutput
from megatron.registry import Registry, import_entries


class Objective(Protocol):
    """See the package's docstring."""

    batch_keys: tuple[str, ...]

    def loss(self, out: LMOutput, labels: Any) -> Tensor: ...


OBJECTIVES: Registry[Objective] = Registry(
    "train_impl",
    wants="an object with a method loss(out, labels)",
    fits=lambda entry: not isinstance(entry, type) and callable(getattr(entry, "loss", None)),
)
"""Objects as described in the text of the package. They are shared by all stages and have no parameters; the loss is a
0-dim fp32 tensor that reaches every parameter, is 0 and not NaN for a micro-batch without trained tokens, and takes
`weight` as a factor, so that it depends on no layout.
"""


import_entries(__name__, __path__)
