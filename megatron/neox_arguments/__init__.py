"""Configuration: flat GPT-NeoX keys in YAML, typed frozen groups in code. Torch-free.

>>> from megatron.neox_arguments.derive import derive
>>> from megatron.neox_arguments.load import load
>>> args = derive(load(["configs/pythia/70M.yml", "configs/local_setup.yml"], ["train_iters=100"]))
>>> args.model.hidden_size
512
"""

from megatron.neox_arguments.arguments import NeoXArgs

__all__ = ["NeoXArgs"]
