"""How long, in what batches and at which rates a model of some size is trained: published scaling rules.

Each function is one rule with its source; `plan_training` puts them together. What is a choice and no rule stands in
`CHOICES`. N: parameters, D: tokens of the run, both over all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

CHOICES: Mapping[str, Any] = MappingProxyType(
    {
        # Muon for hidden matrices, with updates as large as AdamW's, so that its rules for rate and decay hold: Liu et
        # al. 2025, arXiv 2502.16982 (up to 16B parameters and 5.7T tokens). AdamW for the rest, with the betas of GPT-3
        # (arXiv 2005.14165) and LLaMA (arXiv 2302.13971).
        "optimizer": {"type": "muon", "params": {"betas": [0.9, 0.95], "eps": 1.0e-8}},
        "gradient_clipping": 1.0,
        # To zero in a straight line: Bergsma et al. 2025, arXiv 2502.15938.
        "lr_decay_style": "linear",
        "min_lr": 0.0,
        # Further keys of the run, such as those of another network or optimizer.
        "more": {},
    }
)
WITHOUT_MUON: Mapping[str, Any] = MappingProxyType({"type": "AdamW", "params": CHOICES["optimizer"]["params"]})
"""Where ranks have no whole matrices (fp16, ZeRO 3), and for state spaces, of which nothing was measured."""
EMBEDDING_RATE, OUTPUT_RATE = 3.0, 0.5
"""Of the word embeddings and of an output matrix of its own, times the rate of the rest. Unlike that of hidden matrices
it should not fall with the width (Yang et al. 2022, arXiv 2203.03466, table 8); the factors are measured
(documentation/quality.md)."""
TOKENS_PER_PARAMETER = 20.0
"""Of a run that makes the most of its compute: Hoffmann et al. 2022, arXiv 2203.15556 (70B and 1.4T tokens)."""
MOST_EPOCHS = 4.0
"""Up to which text that is read again teaches nearly as much as new: Muennighoff et al. 2023, arXiv 2305.16264."""
LARGEST_RATE, LARGEST_DECAY, LEAST_BATCH = 5.0e-3, 0.1, 2048.0
"""Where the rules for rate, weight decay and tokens of a step are cut off: short runs of small models lie outside what
they were fitted to."""

FEWEST_STEPS = 50
"""That a run has, if samples are short enough for it: fewer updates teach nothing, whatever they are made of."""


def learning_rate(parameters: float, tokens: float) -> float:
    """Peak rate of AdamW, 1.79 N^-0.713 D^0.307, N without embeddings: Li et al. 2025, arXiv 2503.04715 (Step Law)."""
    return min(LARGEST_RATE, 1.79 * parameters**-0.713 * tokens**0.307)


def batch_tokens(tokens: float) -> float:
    """Tokens of a step, 0.58 D^0.571: Li et al. 2025, arXiv 2503.04715 (Step Law)."""
    return max(LEAST_BATCH, 0.58 * tokens**0.571)


def weight_decay(rate: float, steps: int, tokens_per_parameter: float) -> float:
    """AdamW's decay: its memory, 1 / (rate decay) steps, is 1.084 (D/N)^-0.527 of the run.

    Bergsma et al. 2025, arXiv 2505.13738 (Power Lines); the idea: Wang and Aitchison 2024, arXiv 2405.13698.
    """
    memory = 1.084 * tokens_per_parameter**-0.527
    return min(LARGEST_DECAY, 1 / (rate * memory * steps))


def warmup_steps(steps: int, beta2: float = 0.95) -> int:
    """2 / (1 - beta2) steps, the time that Adam's second moment needs: Ma and Yarats 2019, arXiv 1910.04209.

    Long runs take 2000 steps, as LLaMA's did (arXiv 2302.13971), up to 2 % of the run; short ones at most a tenth.
    """
    least = round(2 / (1 - beta2))
    return max(1, min(max(least, min(2000, steps // 50)), steps // 10))


def vocabulary(parameters: float, width: int) -> float:
    """Entries of the vocabulary for N parameters outside of it: N_v = 1.79 N^0.83 parameters of `width` for an entry.

    The exponent is that of Tao et al. 2024, arXiv 2407.13623; the factor gives their 216 thousand entries for Llama-2
    70B.
    """
    return 1.79 * parameters**0.83 / width


def vocabulary_size(parameters: float, width: int, text_bytes: float) -> int:
    """`vocabulary` as a power of two from 512 to 65,408 (ids of 16 bits), with 256 bytes of text or more for each."""
    wanted = min(vocabulary(parameters, width), text_bytes / 256)
    return min(65_408, 1 << max(9, round(math.log2(max(wanted, 1)))))


def context(relative_depth: float) -> int:
    """Tokens of a sample: the power of two nearest to 1024 for the depth of the family's 60M, and in proportion.

    From 128 to 4096. No rule is published; LLaMA-60M has 1024 tokens (8 layers), Llama-2 7B 4096 (32 layers).
    """
    return min(4096, max(128, 1 << max(0, round(math.log2(1024 * relative_depth)))))


def depth(width: float, base_layers: int, base_width: int) -> float:
    """Layers of a model of `width`: they grow with width^(2/3), as from LLaMA-60M (8 x 512; Lialin et al. 2023, arXiv
    2307.05695) to LLaMA-7B (32 x 4096; Touvron et al. 2023, arXiv 2302.13971).

    The loss hardly depends on it: Kaplan et al. 2020, arXiv 2001.08361, figure 5.
    """
    return base_layers * (width / base_width) ** (2 / 3)


def parameter_groups(network: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The value of this key for a network's keys: none where one matrix is both embedding and output."""
    if not network.get("no_weight_tying"):
        return []
    return [
        {"match": "0.word_embeddings.weight", "lr_mult": EMBEDDING_RATE},
        {"match": "*.final_linear.weight", "lr_mult": OUTPUT_RATE},
    ]


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        tokens: of the whole run; `epochs`: how often that reads the data.
        batch: samples of a step, a power of two.
        rate, decay: peak learning rate, and weight decay.
    """

    tokens: int
    epochs: float
    context: int
    batch: int
    steps: int
    warmup: int
    rate: float
    decay: float


def run_tokens(parameters: int, data_tokens: int, asked: float | None, limit: float | None) -> float:
    """Tokens of a run.

    Args:
        parameters: all of them.
        data_tokens: of the training data.
        asked: how many the user wants; None: 20 per parameter, in at most four epochs of the data.
        limit: how many the machine can do in the time given; None: any number.
    """
    wanted = asked or min(TOKENS_PER_PARAMETER * parameters, MOST_EPOCHS * data_tokens)
    return min(wanted, limit) if limit else wanted


def plan_training(parameters: int, outside_embeddings: int, context_tokens: int, tokens: float, data: int) -> Training:
    """The training of a model of so many parameters (all, and those outside of embeddings) for about `tokens`.

    Args:
        context_tokens: of a sample.
        data: tokens of the training data.
    """
    batch = 1 << max(0, round(math.log2(batch_tokens(tokens) / context_tokens)))
    while batch > 1 and tokens / (batch * context_tokens) < FEWEST_STEPS:
        batch //= 2
    steps = max(1, round(tokens / (batch * context_tokens)))
    rate = learning_rate(outside_embeddings, tokens)
    return Training(
        tokens=steps * batch * context_tokens,
        epochs=steps * batch * context_tokens / data,
        context=context_tokens,
        batch=batch,
        steps=steps,
        warmup=warmup_steps(steps, CHOICES["optimizer"]["params"]["betas"][1]),
        rate=rate,
        decay=weight_decay(rate, steps, tokens / parameters),
    )
