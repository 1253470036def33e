"""Mixture of experts: a feed-forward whose tokens go to a few of many small networks.

| file              | what is in it                                                                         |
|-------------------|---------------------------------------------------------------------------------------|
| layer.py          | `MixtureOfExperts`, the entry "moe" of MLPS: router, dispatch, experts, shared expert |
| router.py         | which experts a token goes to and with which weights; sinkhorn.py GPT-NeoX's balancing |
| capacity.py       | which of these assignments are dropped                                                |
| dispatch.py       | bringing tokens to the rank and the rows of their experts, and back                   |
| permute.py        | the gathers by which one rank does that, with their gradients                         |
| experts.py        | the experts' weights and what they compute                                            |
| grouped_linear.py | one matrix product with a matrix per group of rows                                    |
| losses.py         | balance loss and z-loss                                                               |
| expert_load.py    | what is counted for metrics and bias balancing                                        |
"""

from megatron.layers.moe.layer import MixtureOfExperts

__all__ = ["MixtureOfExperts"]
