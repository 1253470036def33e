"""Random Hugging Face models as the reference, and checkpoints made from their weights through a family's table."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.weights import save_weights
from megatron.convert.families import FAMILIES
from megatron.convert.parts.family import Constant, TokenIds
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive

VOCAB = 67  # pads to another size at every tensor-parallel size
BASE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 48,
    "max_position_embeddings": 64,
    "pos_emb": "rotary",
    "make_vocab_size_divisible_by": 8,
    "no_weight_tying": True,
    "train_micro_batch_size_per_gpu": 1,
    "init_method_std": 0.1,
}
NEOX = {**BASE, "norm": "layernorm", "activation": "gelu", "rotary_pct": 0.25, "intermediate_size": 96}
LLAMA = {
    **BASE,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "activation": "swiglu",
    "intermediate_size": 80,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "rotary_emb_base": 500,
}


def resolved(**keys) -> NeoXArgs:
    """A resolved configuration from flat keys."""
    return derive(NeoXArgs.from_saved(keys), Facts(vocab_size=VOCAB))


def hugging_face(args: NeoXArgs, architecture: str, seed: int = 0):
    """(random model of that architecture, its tensors as transformers itself saves them).

    No tensor is left at a trivial value, biases and norms included.
    """
    fields = FAMILIES[architecture].config(args.model, VOCAB, TokenIds())
    torch.manual_seed(seed)
    if args.model.output_head == "reward":
        config = AutoConfig.for_model(**fields, num_labels=1)
        model = AutoModelForSequenceClassification.from_config(config).float().eval()
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).float().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            # Of small weights a state space makes little that could be seen.
            tensor.normal_(std=0.4 if ".mixer." in name or "rwkv.blocks" in name else 0.1)
            if ("norm" in name or ".ln" in name or "pre_ln" in name) and name.endswith("weight"):
                tensor.add_(1.0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, load_file(f"{folder}/model.safetensors")


def random_tensors(args: NeoXArgs, architecture: str) -> dict[str, torch.Tensor]:
    """Our full parameters of a random model."""
    return full_tensors(args, architecture, hugging_face(args, architecture)[1])


def specs_of(args: NeoXArgs, tp: int):
    """Declarations of our model by canonical name, for `tp` ranks, in layer order."""
    unit = 8 * tp
    state = ParallelState(Topology({"pipe": 1, "data": 1, "model": tp}), 0, "cpu")
    layers = gpt_layers(args.model, vocab_size=VOCAB, padded_vocab_size=-(-VOCAB // unit) * unit, state=state)
    specs = {}
    for layer in layers:
        for name, parameter in named_parameters(build_layer(layer, None, state)):
            specs.setdefault(name, parameter.spec)
    return specs


def full_tensors(args: NeoXArgs, architecture: str, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our full parameters from Hugging Face's tensors, by the family's table read backwards."""
    rules = [rule for rule in FAMILIES[architecture].rules(args.model) if not isinstance(rule, Constant)]
    ways = [rule.among(theirs) for rule in rules]
    return {way.ours: way.transform.load([theirs[name] for name in way.theirs]) for way in ways}


def write_checkpoint(
    root: Path, args: NeoXArgs, tensors: dict[str, torch.Tensor], tp: int = 1, dtype: torch.dtype = torch.float32
) -> Path:
    specs = specs_of(args, tp)
    pairs = [(specs[name], tensors[name]) for name in specs]
    return save_weights(root, 7, pairs, tp_size=tp, heads=Heads.of(args.model), config=args.to_dict(), dtype=dtype)
