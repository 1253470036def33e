"""The native engine (`engine: native`): one stage, plain torch, optimizer state divided over the data-parallel ranks.

Weights and the fp32 sums of their gradients lie in flat buckets. Of each bucket every data-parallel rank owns a part:
it alone has the masters and the optimizer's moments of it. During the last backward pass of a step each bucket that is
complete is added up into its owners' parts; they are updated; and the weights are gathered while the next step begins.
"""
