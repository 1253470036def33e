"""What is trained: one objective per `train_impl`.

An objective is an object with

* `batch_keys`: the fields of a `StepBatch` that make up its labels, in order;
* `loss(out: LMOutput, labels) -> scalar`: the micro-batch's share of the step's loss. The engine averages over
  accumulation and data-parallel ranks; the labels' weight undoes that, so that the step's loss is
  sum over trained tokens of the global batch / their number, whatever the split. `out.with_balance(loss)` adds the
  gradient of what mixtures of experts add.
"""

from megatron.objectives.normal import NormalObjective
from megatron.objectives.registry import OBJECTIVES

__all__ = ["OBJECTIVES", "NormalObjective"]
