"""The keys of training that begins with a trained model: `args.post`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.keys import key

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class PostConfig:
    """What objectives do (their data are keys of `data`), and adapters: small matrices that are trained beside frozen
    weights."""

    # adapters: documentation/adapters.md
    lora_r: int | None = key(
        None,
        "Train adapters of this rank (LoRA) beside the linear layers and freeze everything else; parameter_groups with "
        "freeze: false trains more. Unset: all parameters are trained.",
        new=True,
    )
    lora_alpha: float = key(
        8.0,
        "What adapters add is scaled by lora_alpha / lora_r (with use_rslora by lora_alpha / sqrt(lora_r)).",
        new=True,
    )
    lora_dropout: float = key(0.0, "Dropout of the inputs of adapters.", new=True)
    lora_target_modules: tuple[str, ...] = key(
        (ALL_LINEAR,),
        "Which linear layers get adapters: names (query_key_value, mlp.linear1) or patterns of whole names "
        "([2-9].attention.*), numbered as in checkpoints; all-linear: every one in the blocks.",
        new=True,
    )
    use_rslora: bool = key(False, "Rank-stabilised scaling of adapters: lora_alpha / sqrt(lora_r).", new=True)
    use_dora: bool = key(
        False,
        "DoRA: adapters change the direction of a weight's rows, and a vector beside them their length.",
        new=True,
    )
    lora_base: str | None = key(
        None,
        "The checkpoint whose weights the adapters belong to, where it has moved. Default: what the run began from.",
        path=True,
        new=True,
    )
    lora_save_base: bool = key(
        False,
        "Checkpoints hold the frozen weights as well. By default they hold what is trained, and name the checkpoint "
        "that has the rest.",
        new=True,
    )

    # the reference model of DPO, KTO and negative preference optimisation
    reference_path: str | None = key(
        None,
        "Folder for the log-probabilities of the reference model, which runs that begin with the same weights share, "
        "and for what a teacher says (distill_precompute); default: `save`.",
        new=True,
        path=True,
    )

    # preference pairs
    dpo_loss_type: Literal[
        "sigmoid", "cdpo", "robust", "sigmoid_norm", "hinge", "ipo", "apo_zero", "apo_down", "simpo", "orpo"
    ] = key(
        "sigmoid",
        "Loss of a preference pair. sigmoid: DPO; cdpo, robust: with dpo_label_smoothing; sigmoid_norm, ipo: of means "
        "over tokens; simpo, orpo: without a reference model.",
        new=True,
    )
    dpo_beta: float = key(0.1, "How far log-probability ratios count; of orpo, the weight of the ratio of odds.")
    dpo_reference_free: bool = key(False, "No reference model: its log-probabilities are taken to be 0.")
    dpo_fp32: bool = key(True, "Log-probabilities in fp32, which they always are; false changes nothing.")
    dpo_label_smoothing: float = key(
        0.0, "The share of pairs whose preference is taken to be the other way round, below 0.5.", new=True
    )
    dpo_simpo_gamma: float = key(0.5, "The margin that simpo aims at.", new=True)
    dpo_sft_loss_weight: float | None = key(
        None,
        "Adds this times the mean loss of the tokens of chosen answers (default: 0, of orpo 1).",
        new=True,
    )

    # reward models
    rm_center_coefficient: float = key(
        0.0,
        "train_impl rm: add this times the square of the sum of both rewards of a pair, which holds rewards near 0 "
        "(TRL's center_rewards_coefficient).",
        new=True,
    )
    z_loss: float = key(
        0.0, "train_impl rm: add this times the squared rewards of both answers. Language models have z_loss_weight."
    )

    # KTO
    kto_beta: float = key(0.1, "train_impl kto: how dear it is to move away from the reference model.")
    kto_desirable_weight: float = key(1.0, "train_impl kto: weight of answers with a reward above 0.")
    kto_undesirable_weight: float = key(1.0, "train_impl kto: weight of answers with a reward below 0.")
    kto_loss_type: Literal["kto", "apo_zero_unpaired"] = key(
        "kto",
        "train_impl kto: what an answer is compared with. kto: z0, how far the model is from the reference on prompts "
        "with the answers to others, one more forward pass a step. apo_zero_unpaired: 0.",
        new=True,
    )
    kto_fp32: bool = key(True, "Log-probabilities in fp32, which they always are; false changes nothing.")

    # completions of the model's own: reinforce, rloo, grpo
    rollout_prompts: tuple[str, ...] | None = key(
        None,
        "JSON lines files of prompts: {prompt: text} or {messages: [turns]}; other fields reach the reward.",
        path=True,
        new=True,
    )
    rollout_valid_prompts: tuple[str, ...] | None = key(
        None,
        "Prompts as in rollout_prompts, held out: before the first step, every eval_interval steps and at the end each "
        "is completed once, always with the same draws, for the validation's means of reward, length and finished.",
        path=True,
        new=True,
    )
    reward: str | None = key(
        None, "What a completion is worth: exact, or a function of a plugin.", registry="reward", new=True
    )
    reward_url: str | None = key(
        None, "A service that gives the rewards: JSON over HTTP, documentation/post_training.md.", new=True
    )
    reward_model: str | None = key(
        None,
        "A reward model (train_impl: rm), as a folder of checkpoints: its weights are in memory at the run's layout.",
        path=True,
        new=True,
    )
    reward_timeout: float = key(
        60.0, "Seconds without an answer after which a reward, or a data server's completions, have failed.", new=True
    )
    rollouts_per_prompt: int = key(8, "Completions of each prompt; train_batch_size is a multiple.", new=True)
    rollout_tokens: int = key(256, "Most tokens of a completion.", new=True)
    rollout_temperature: float = key(
        1.0, "Temperature of the draws; log-probabilities are those of that distribution.", new=True
    )
    rollout_steps: int = key(1, "Optimizer steps that train on the same completions.", new=True)
    rollout_batch_size: int | None = key(
        None, "Completions that a copy of the model writes at a time; default: all of a step.", new=True
    )
    rollout_log: int = key(
        4, "Completions of each batch that are appended to rollouts.jsonl of the run folder.", new=True
    )
    grpo_loss: Literal["dapo", "grpo", "dr_grpo"] = key(
        "dapo",
        "grpo: the loss is a mean over all tokens of the global batch (dapo), over completions of the mean over their "
        "tokens (grpo), or over completions of the sum over their tokens / rollout_tokens (dr_grpo).",
        new=True,
    )
    grpo_scale_rewards: Literal["group", "batch", "none"] = key(
        "group",
        "grpo: advantages are divided by the standard deviation of the prompt's rewards, of the batch's, or not.",
        new=True,
    )
    grpo_epsilon: float = key(
        0.2, "grpo, rloo: the ratio to the probability of the draw counts no lower than 1 - this.", new=True
    )
    grpo_epsilon_high: float | None = key(None, "And no higher than 1 + this; default: grpo_epsilon.", new=True)
    kl_impl: Literal["abs", "mse", "kl", "k3", "full"] = key(
        "mse",
        "Estimate of the divergence from the reference, the weights that the run begins with, by d = log p - log p of "
        "the reference of a token: |d|, d^2/2, d, exp(-d) - 1 + d; or all of the vocabulary, which needs 4 bytes for "
        "each token and entry of it.",
    )
    kl_div_beta: float = key(0.1, "Weight of that divergence; 0: no reference is kept.")
    reinforce_leave_one_out: bool = key(
        False,
        "reinforce: the baseline of a reward is the mean of the prompt's other completions; else of the last 100 "
        "prompts.",
        differs="the last 100 prompts of all data-parallel ranks",
    )
    fp32_reinforce: bool = key(True, "Log-probabilities in fp32, which they always are; false changes nothing.")

    # unlearning
    ga_mode: Literal["interval", "interleaved"] = key(
        "interval",
        "Which steps forget: interleaved, every ga_interleave_ratio + 1 steps one; interval, ga_iters steps after "
        "every ga_interval others.",
        differs="a step that forgets is a step of train_iters and of the schedule in both modes",
    )
    ga_interleave_ratio: int = key(
        1, "ga_mode interleaved: ordinary steps per step that forgets; 0: every step forgets."
    )
    ga_interval: int | None = key(None, "ga_mode interval: ordinary steps between bursts.")
    ga_iters: int | None = key(None, "ga_mode interval: steps of a burst.")
    ga_lr_scale: float = key(
        1.0, "The learning rate of a step that forgets is multiplied by this.", differs="holds for all steps of a burst"
    )
    ga_loss: Literal["ascent", "npo", "simnpo", "rmu"] = key(
        "ascent",
        "What a step that forgets lowers: ascent, the loss times -1; npo, negative preference optimisation against "
        "the model that the run started from; simnpo, the same by length and without that model; rmu, representation "
        "misdirection: the distance of hidden states to a random vector, and with gd_retain_weight that of what is "
        "retained to those of the model that the run started from.",
        new=True,
    )
    ga_beta: float = key(0.1, "beta of npo and simnpo.", new=True)
    ga_gamma: float = key(0.0, "gamma of simnpo: how much likelier than forgotten still counts.", new=True)
    ga_rmu_layer: int | None = key(None, "rmu: the block, from 0, whose output is steered.", new=True)
    ga_rmu_coefficient: float = key(20.0, "rmu: the length of the vector that it is steered to.", new=True)
    ga_rmu_seed: int = key(0, "rmu: draws the direction of that vector.", new=True)
    ga_rmu_layers: tuple[int, ...] | None = key(
        None,
        "rmu: the blocks that are trained, from 0, and nothing else (default: ga_rmu_layer and the two before). An "
        "empty list: all of the model.",
        new=True,
    )
    ga_loss_threshold: float | None = key(
        None,
        "Forget no further while the loss on ga_dataset is above this.",
        differs="compared before the step, and in this sense: a loss that is high enough ends the ascent",
    )
    ga_threshold_check_mode: Literal["per_step", "per_burst", "ema"] = key(
        "per_step",
        "What is compared with ga_loss_threshold: the loss of each step's samples, that of a burst's first ones (for "
        "the whole burst), or the moving average (0.1) of those before.",
        differs="all three stop steps",
    )
    ga_threshold_skip_forward: bool = key(
        False,
        "With ema: once above ga_loss_threshold, do not look at the loss again; else steps that are left out measure "
        "it, and forgetting resumes when it falls.",
    )
    gd_mode: bool = key(
        False,
        "Gradient difference: a step that forgets also takes a batch of gd_retain_dataset, whose loss it lowers.",
        differs="works, at every layout",
    )
    gd_retain_weight: float = key(40.0, "Weight of the loss on gd_retain_dataset, against that on ga_dataset.")
    gd_log_separate_losses: bool = key(True, "Log both losses of gradient difference besides what it lowers.")

    # distillation: documentation/distillation.md
    distill_teacher: str | None = key(
        None,
        "train_impl distill: checkpoint of the teacher, of any layout, with the same vocabulary. It is in memory, cut "
        "like the model.",
        path=True,
        new=True,
    )
    distill_loss: Literal["forward_kl", "reverse_kl", "jsd"] = key(
        "forward_kl",
        "The divergence from the teacher's distributions p to the model's q: KL(p||q), KL(q||p), or the generalised "
        "Jensen-Shannon divergence.",
        new=True,
    )
    distill_jsd_beta: float = key(0.5, "Weight of p in the mixture of jsd, in (0, 1).", new=True)
    distill_temperature: float = key(
        1.0, "Both distributions are taken at this temperature T; the loss times T².", new=True
    )
    distill_weight: float = key(
        1.0, "Share of the divergence in the loss; the rest is cross entropy with the data.", new=True
    )
    distill_top_k: int = key(
        64, "How many of the teacher's likeliest tokens are told apart; all others count as one. 0: all are.", new=True
    )
    distill_precompute: bool = key(
        False,
        "The teacher reads what the run will read before its first step, and its likeliest tokens are kept in files "
        "(`reference_path`, default: `save`): it is not in memory while the model is trained.",
        new=True,
    )
    distill_layers: tuple[int, int] | None = key(
        None,
        "For objectives of plugins that compare hidden states: a block of the model and one of the teacher, from 0.",
        new=True,
    )
