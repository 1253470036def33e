"""Configuration: flat GPT-NeoX keys in YAML, typed frozen groups in code. Torch-free.

>>> args = NeoXArgs.from_ymls(["configs/pythia/70M.yml", "configs/local_setup.yml"], ["train_iters=100"])
>>> args.model.hidden_size
512
"""

from megatron.neox_arguments.arguments import NeoXArgs

__all__ = ["NeoXArgs"]
