"""Every deliberate difference from GPT-NeoX, as one table: it makes DIFFERENCES.md and the lines printed at start."""

from __future__ import annotations

from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.block_sizes import is_gated
from megatron.neox_arguments.difference import Difference, never
from megatron.neox_arguments.differences_data import DATA, untrained_tokens
from megatron.neox_arguments.differences_post import POST
from megatron.rows import row


def _two_meanings(args: NeoXArgs) -> bool:
    return is_gated(args.model.activation) and args.model.intermediate_size is not None


def _final_width(args: NeoXArgs) -> bool:
    return _two_meanings(args) and args.model.gated_width_rule == "final"


def _tensor(args: NeoXArgs) -> bool:
    return args.parallel.model_parallel_size > 1


def _trains(args: NeoXArgs) -> bool:
    return bool(args.training.do_train)


def _mamba(args: NeoXArgs) -> bool:
    return "mamba" in args.model.attention_config


def _transformer_engine(args: NeoXArgs) -> bool:
    return args.model.te_mha or args.model.te_layernorm_mlp or args.model.te_rowparallel


def _learns_texts(args: NeoXArgs) -> bool:
    """Whether the loss is a mean over tokens of texts, not over pairs, answers or completions."""
    return row("train_impl", args.training.train_impl).get("data") is None


DIFFERENCES: tuple[Difference, ...] = (
    # what changes the numbers of a run
    Difference(
        "gradient_clipping 1.0",
        "the value 1.0 never reaches the engine, so nothing is clipped; other values clip",
        "clips at 1.0; set gradient_clipping: 0 for GPT-NeoX's behaviour",
        lambda args: args.optimizer.gradient_clipping == 1.0,
    ),
    Difference(
        "gpt_j_residual with biases and tensor parallel",
        "every rank adds and updates a copy of the row-parallel biases, which move that many times as fast",
        "one bias, the same at every layout (a checkpoint's copies are summed)",
        lambda args: bool(args.model.gpt_j_residual) and _tensor(args),
    ),
    Difference(
        "gradient_clipping in fp32 with pipeline stages and ZeRO 0",
        "each stage clips by the norm of its own gradients",
        "all clip by the norm of the whole model's",
        lambda args: (
            args.parallel.pipe_parallel_size > 1
            and args.optimizer.precision == "fp32"
            and bool(args.optimizer.gradient_clipping)
        ),
    ),
    Difference(
        "intermediate_size with gated activations",
        "a third of it, rounded by mlp_multiple_of, is the width built",
        "it is the width built, unless the checkpoint or the ratio to hidden_size (about 8) shows GPT-NeoX's reading; "
        "gated_width_rule: final or two_thirds sets it",
        _final_width,
    ),
    Difference(
        "end of the cosine schedule",
        "the learning rate rises again after lr_decay_iters",
        "it stays at min_lr",
        lambda args: (
            args.schedule.lr_decay_style == "cosine" and (args.schedule.steps or 0) < (args.training.train_iters or 0)
        ),
        keys=("lr_decay_style",),
    ),
    Difference(
        "exponential schedule",
        "ends at half of lr, min_lr is only a floor",
        "ends at min_lr (half of lr when min_lr is 0) and stays there",
        lambda args: args.schedule.lr_decay_style == "exponential" and args.schedule.min_lr > 0,
        keys=("lr_decay_style",),
    ),
    Difference(
        "loss normalisation",
        "mean over ranks and micro-batches of each one's mean",
        "sum over all trained tokens of the global batch divided by their number",
        lambda args: untrained_tokens(args) and _learns_texts(args),
    ),
    Difference(
        "train_impl: reinforce",
        "fails at HEAD (an undefined name); a mean over tokens is divided by the rows, too; each rank has baselines",
        "works at every layout: a mean over all tokens of the global batch; baselines of all ranks",
        lambda args: args.training.train_impl == "reinforce",
    ),
    Difference(
        "vocabulary padding",
        "padded rows take part in the training softmax",
        "padded rows exist in memory only: not in the loss, norms, samples, counts or exports",
        lambda args: args.tokenizer.padded_vocab_size is not None and args.model.output_head == "vocabulary",
    ),
    Difference(
        "gradient accumulation type",
        "bf16 accumulates in bf16 unless data_types.grad_accum_dtype is fp32",
        "fp32 unless data_types.grad_accum_dtype is set",
        lambda args: args.optimizer.precision == "bfloat16" and args.training.gradient_accumulation_steps != 1,
    ),
    Difference(
        "type in which data-parallel ranks add up gradients",
        "the model's: bf16 sums lose 0.4 % at 8 ranks, 1.6 % at 256, unless fp32_allreduce is true",
        "fp32; fp32_allreduce: false is GPT-NeoX's rule",
        lambda args: (
            args.optimizer.precision != "fp32"
            and args.parallel.data_parallel_size > 1
            and args.deepspeed.communication_data_type == "fp32"
            and not args.is_set("fp32_allreduce")
        ),
    ),
    Difference(
        "bfloat16 or fp16 with ZeRO stage 0",
        "bfloat16 runs without fp32 masters, fp16 with all of them on every rank",
        "stage 1 is used, which is noted at the start: fp32 masters, divided over the data-parallel ranks",
        lambda args: args.optimizer.precision in ("bfloat16", "fp16"),
    ),
    Difference(
        "output biases under tensor parallel",
        "with gpt_j_residual every rank adds its bias: TP times the bias",
        "added once",
        lambda args: _tensor(args) and args.model.gpt_j_residual,
    ),
    Difference(
        "initial weights",
        "depend on the layout",
        "depend on the seed and the parameter's name only",
        _trains,
    ),
    Difference(
        "rotary tables",
        "computed in the parameters' type, bf16 loses positions",
        "fp32",
        lambda args: args.model.pos_emb == "rotary" and args.optimizer.precision != "fp32",
    ),
    Difference(
        "Transformer Engine with gpt_j_residual over tensor-parallel ranks",
        "sums the feed-forward's and the attention's outputs twice over the ranks",
        "sums once, the same at every model_parallel_size",
        lambda args: args.model.gpt_j_residual and _tensor(args) and _transformer_engine(args),
    ),
    Difference(
        "te_layernorm_mlp in layers of experts",
        "experts get their input without a norm",
        "with the norm that other blocks have",
        lambda args: args.model.te_layernorm_mlp and "moe" in args.model.layer_mlps,
    ),
    Difference(
        "te_fp8_mha",
        "stops with an AttributeError; the other keys te_fp8_* are never read",
        "trains in FP8 where Transformer Engine and a GPU with FP8 are there, else in the run's precision",
        lambda args: args.model.te_fp8_mha,
    ),
    Difference(
        "use_qk_layernorm",
        "normalises [heads per rank, head dimension] together",
        "normalises each head",
        lambda args: args.model.use_qk_layernorm and not args.model.use_separate_qk_norms,
    ),
    Difference(
        "use_bias_in_mlp: false",
        "fails, or drops the attention output with gpt_j_residual",
        "works",
        lambda args: not args.model.use_bias_in_mlp,
    ),
    Difference(
        "mixture of experts",
        "experts of a plain activation; the fork's sinkhorn ends after one round and its jitter raises an error",
        "experts of the activation, gated too; three rounds of sinkhorn; jitter works",
        lambda args: "moe" in args.model.layer_mlps,
    ),
    Difference(
        "parallel blocks with experts",
        "gpt_j_residual with experts drops the attention output from the residual stream",
        "attention and experts are added",
        lambda args: "moe" in args.model.layer_mlps and args.model.gpt_j_residual,
    ),
    Difference(
        "mlp_multiple_of with plain activations",
        "layers that do not fit when it does not divide the width",
        "the width is rounded up",
        lambda args: args.model.mlp_multiple_of > 1 and not is_gated(args.model.activation),
    ),
    Difference(
        "sliding window without a pipeline",
        "ignored by 'global' layers when pipe_parallel_size is 0",
        "honoured",
        lambda args: args.model.sliding_window_width is not None and args.parallel.pipe_parallel_size == 0,
    ),
    Difference(
        "attention in packed samples",
        "crosses document boundaries",
        "with intra_document_masking: true it stops at them, and positions restart",
        lambda args: args.model.intra_document_masking,
    ),
    Difference(
        "optimizer.params.weight_decay",
        "overridden by weight_decay's default 0.1",
        "used",
        lambda args: args.source("weight_decay") == "derived: optimizer.params.weight_decay",
    ),
    Difference(
        "dropout in the parallel residual",
        "one mask for attention, one for the feed-forward layer",
        "one mask on their sum",
        lambda args: args.model.gpt_j_residual and args.model.hidden_dropout > 0,
    ),
    Difference(
        "RMSNorm epsilon",
        "added to the root",
        "inside the root, as LLaMA computes it",
        lambda args: args.model.norm == "rmsnorm",
        keys=("rms_norm_epsilon",),
    ),
    Difference(
        "use_separate_qk_norms",
        "normalises each rank's part of the width",
        "normalises the whole width, the same at every model_parallel_size",
        lambda args: args.model.use_separate_qk_norms,
    ),
    Difference(
        "OneBitAdam",
        "sends the signs of momenta after freeze_step steps; needs a schedule of DeepSpeed's",
        "the same update with gradients that are reduced as they are; schedules as usual",
        lambda args: args.optimizer.optimizer_type == "onebitadam",
    ),
    Difference(
        "pos_emb: rpe",
        "acts in 'global' layers only; each pipeline stage trains a table of its own",
        "acts in every layer of attention; one table for all layers at every layout",
        lambda args: args.model.pos_emb == "rpe",
    ),
    Difference(
        "gmlp and amlp layers",
        "run only where the micro-batch has as many rows as tokens; each tensor-parallel rank normalises its part",
        "run, and are the same model at every model_parallel_size",
        lambda args: bool({"gmlp", "amlp"} & set(args.model.attention_config)),
    ),
    Difference(
        "attention softmax",
        "in fp32 only with attention_softmax_in_fp32 or apply_query_key_layer_scaling",
        "always in fp32",
        lambda args: args.optimizer.precision != "fp32",
    ),
    Difference(
        "muP embedding multipliers",
        "multiplied in without a gradient; mup_rp_embedding_mult acts without use_mup",
        "with their gradient, under use_mup only",
        lambda args: args.model.use_mup,
    ),
    Difference(
        "log_gradient_noise_scale",
        "raises an error",
        "works at every layout; the squares of the norms of all steps of an estimate count",
        lambda args: args.logging.log_gradient_noise_scale,
    ),
    Difference(
        "skipped steps (overflow, NaN)",
        "the schedule waits",
        "the schedule advances with the iteration, whose samples count as consumed; NaN is skipped in every precision",
        lambda args: args.optimizer.precision == "fp16",
    ),
    *DATA,
    *POST,
    # runs and checkpoints
    Difference(
        "load without a checkpoint",
        "a warning, then random weights",
        "an error, unless load equals save: then a fresh start, which is logged",
        lambda args: args.checkpoint.load is not None,
        "Runs and checkpoints",
    ),
    Difference(
        "load and save in a run that already saved",
        "load decides",
        "the run resumes from `save`; load, iteration and finetune apply to the first start only",
        lambda args: args.checkpoint.save is not None and args.checkpoint.load not in (None, args.checkpoint.save),
        "Runs and checkpoints",
    ),
    Difference(
        "iteration",
        "training ignores it and takes the latest",
        "training honours it",
        lambda args: args.checkpoint.iteration is not None,
        "Runs and checkpoints",
    ),
    Difference(
        "no_save_optim",
        "never read, the optimizer is always saved",
        "leaves it out: such a checkpoint cannot be continued exactly",
        lambda args: args.checkpoint.no_save_optim,
        "Runs and checkpoints",
    ),
    Difference(
        "saving",
        "files appear one by one",
        "a checkpoint is complete or invisible; the resolved config is in it",
        never,
        "Runs and checkpoints",
    ),
    Difference(
        "layout of checkpoints",
        "must be loaded at the layout they were saved at",
        "optimizer state is stored by parameter name, for any layout",
        never,
        "Runs and checkpoints",
    ),
    Difference(
        "save without checkpoint_factor",
        "an error",
        "saves at the end",
        lambda args: args.checkpoint.save is not None and args.checkpoint.checkpoint_factor is None,
        "Runs and checkpoints",
    ),
    Difference(
        "async_save, temporary_checkpoint_minutes",
        "do not exist: training stands still while a checkpoint is written, and saves by steps alone",
        "a step waits for a copy in memory; a checkpoint by time is deleted once a later one is complete",
        lambda args: args.checkpoint.async_save or args.checkpoint.temporary_checkpoint_minutes is not None,
        "Runs and checkpoints",
    ),
    Difference(
        "Mamba with tensor parallel",
        "each rank has step sizes, B and C from its own channels: another model at every model_parallel_size",
        "x_proj is summed over ranks: one model on any layout; GPT-NeoX's checkpoints of several ranks are refused",
        lambda args: _mamba(args) and _tensor(args),
        "Runs and checkpoints",
    ),
    Difference(
        "Mamba in bfloat16, packed documents and generation with Mamba",
        "bfloat16 and generation fail, states go from document to document",
        "work; intra_document_masking keeps states and convolutions apart",
        _mamba,
        "Runs and checkpoints",
    ),
    Difference(
        "attention_config: rwkv (RWKV-6)",
        "time runs over the texts of a batch, not their tokens; bfloat16 and GPUs only, no tensor parallelism",
        "time runs over the tokens; any device, precision and layout; dim_att, head_size and ffn_dim may be left out",
        lambda args: "rwkv" in args.model.attention_config,
        "Runs and checkpoints",
    ),
    Difference(
        "validation with a pipeline",
        "fails",
        "works, the same loss on every layout",
        lambda args: args.parallel.pipe_parallel_size > 0 and bool(args.training.do_valid),
        "Runs and checkpoints",
    ),
    # configuration
    Difference(
        "pipe_parallel_size: 1",
        "runs the pipeline engine with one stage, with another checkpoint layout than 0",
        "the same as 0",
        lambda args: args.parallel.pipe_parallel_size == 1,
        "Configuration",
    ),
    Difference(
        "gradient_accumulation_steps unset",
        "1",
        "derived from train_batch_size and the micro batch",
        lambda args: (
            args.training.gradient_accumulation_steps != 1
            and args.source("gradient_accumulation_steps").startswith("derived")
        ),
        "Configuration",
    ),
    Difference(
        "ranks",
        "GPUs found, else nothing works",
        "num_gpus also on CPUs, else what one copy of the model needs",
        never,
        "Configuration",
    ),
    Difference(
        "a hostfile that does not exist",
        "one machine is used",
        "the same where a config file names it, with a warning that names the line; an error where the command line or "
        "DLTS_HOSTFILE names it, or where the config asks for more machines",
        never,
        "Configuration",
    ),
    Difference(
        "duplicate keys",
        "the last one wins inside a file, and across files when one is spelt with dashes",
        "an error naming both lines, unless the values are equal",
        never,
        "Configuration",
    ),
    Difference("choices", "matched without case but not normalised", "normalised", never, "Configuration"),
    Difference("numbers", "1e-4 and 10.0 are refused where they are text or whole", "accepted", never, "Configuration"),
    Difference("AdamW", "refused", "accepted, the same as Adam", never, "Configuration"),
    Difference(
        "deepspeed_extra_args",
        "override other keys silently",
        "a key that is set elsewhere with another value is an error",
        never,
        "Configuration",
    ),
    Difference(
        "how ranks get the config",
        "base64 in the command line",
        "a file or the rendezvous store",
        never,
        "Configuration",
    ),
    Difference(
        "NeoXArgs in Python",
        "a mutable object; consume_deepy_args, consume_neox_args, validate_keys and others are its methods",
        "from_ymls, from_dict and args.KEY as there, but it never changes; python_api.md has the rest",
        never,
        "Configuration",
    ),
    # generation, logging
    Difference(
        "temperature 0",
        "greedy only when top_k and top_p are 0 too",
        "greedy",
        lambda args: args.generation.temperature == 0 and (args.generation.top_k > 0 or args.generation.top_p > 0),
        "Generation and logging",
    ),
    Difference(
        "more than one prompt with the key/value cache",
        "the cache is not cleared between prompts, so later texts are wrong",
        "every prompt has its own; a batch of prompts gives the texts of each alone",
        never,
        "Generation and logging",
    ),
    Difference(
        "sampled texts",
        "depend on the ranks and on the prompts before",
        "depend on the seed and the prompt's number alone, on any layout and with or without the cache",
        never,
        "Generation and logging",
    ),
    Difference(
        "-i PROMPTS with text_gen_type: unconditional in a file",
        "the prompts are ignored",
        "the prompts are completed",
        never,
        "Generation and logging",
    ),
    Difference(
        "blanks around a prompt in a file",
        "are dropped",
        "are dropped where prompt_end is a line break; another prompt_end leaves a prompt as it is, without the line "
        "break right after the prompt_end before it",
        never,
        "Generation and logging",
    ),
    Difference(
        "where a generated text ends",
        "at the end of document",
        "there, at the ends that the model's own files name, at those of chats it was trained on, and at stop_tokens",
        never,
        "Generation and logging",
    ),
    Difference(
        "sample_output_file unset",
        "samples.txt, whose lines are JSON",
        "samples.jsonl",
        never,
        "Generation and logging",
    ),
    Difference(
        "eval_results_prefix unset",
        "the results of eval.py are a file in the current folder",
        "they are a file in eval_results/ of the run that is evaluated",
        never,
        "Generation and logging",
    ),
    Difference(
        "eval.py, generate.py with bfloat16",
        "fails while the config is derived",
        "works; keys that only training needs are ignored",
        never,
        "Generation and logging",
    ),
    Difference(
        "examples before the questions of lm-eval tasks",
        "0, whatever the task's file says",
        "as the task's file says, in a suite (eval_suite) as that says; eval_num_fewshot: 0 is GPT-NeoX's rule",
        lambda args: bool(args.generation.eval_tasks) and args.generation.eval_num_fewshot is None,
    ),
    Difference(
        "eval_tasks while training",
        "run with the validation (the SLURM fork: also without, and before the first step); names of metrics end in "
        "the filter's, `,none`",
        "run before the first step, every eval_interval steps and at the end; `,none` is left out of the names, a "
        "group's score is what its file says; one task that fails does not end the run",
        lambda args: bool(args.generation.eval_tasks or args.generation.eval_suite) and _trains(args),
    ),
    Difference(
        "evaluation on several data-parallel ranks",
        "every rank evaluates every document",
        "the documents are dealt out, none is counted twice",
        never,
        "Generation and logging",
    ),
    Difference(
        "use_wandb unset",
        "on when a key is found; random suffixes on the group",
        "off",
        never,
        "Generation and logging",
    ),
    Difference(
        "s3_path",
        "training waits for the upload, whose failure ends the run; never read",
        "sent while training goes on, a failure is reported and tried again; a run whose save lacks the newest "
        "checkpoint downloads it",
        lambda args: args.checkpoint.s3_path is not None,
        "Runs and checkpoints",
    ),
    Difference(
        "save and load in a bucket (s3://bucket/path/NAME)",
        "folders with such names",
        "save: the folder NAME with s3_path; load: fetched into bucket-path-NAME.s3 where a start needs it (s3_load)",
        lambda args: args.checkpoint.s3_load is not None,
        "Runs and checkpoints",
    ),
    Difference(
        "uploads to the Hugging Face Hub",
        "public repositories, a commit per file (the SLURM fork: success is that the tokenizer loads)",
        "private unless --public is given, few commits; what arrived is not sent again; success is that the Hub's "
        "hashes are those of the files",
        never,
        "Runs and checkpoints",
    ),
    Difference(
        "profile, memory_profiling",
        "need a GPU, tensorboard_dir and memory_profiling_path; steps are counted from the last start; rank 0's memory",
        "a trace of every rank, on a CPU too; steps are those of the run; a snapshot of every rank's memory, also when "
        "an error ends the run",
        lambda args: args.logging.profile or args.logging.memory_profiling,
        "Generation and logging",
    ),
    Difference(
        "reported TFLOPS and MFU",
        "24 c B s L h^2 (1 + s/6h + V/16Lh): ignores grouped queries and feed-forward widths, counts recomputation",
        "6 per parameter in a matrix product plus full attention 12 L h s, recomputation not counted",
        _trains,
        "Generation and logging",
    ),
    Difference(
        "training line on a terminal",
        "printed at each log",
        "one live line instead; it is printed where stdout or stderr is no terminal, and goes into the log files",
        never,
        "Generation and logging",
    ),
    Difference("exit status of config errors", "often 0", "2", never, "Generation and logging"),
)


def find_differences(args: NeoXArgs) -> list[Difference]:
    """The differences that matter for a derived config."""
    return [difference for difference in DIFFERENCES if difference.applies(args)]


def differences_for(args: NeoXArgs) -> list[str]:
    """The same, one line each."""
    return [difference.line for difference in find_differences(args)]


def differences_markdown() -> str:
    """The text of documentation/DIFFERENCES.md."""
    lines = [
        "# Differences from GPT-NeoX",
        "",
        "Deliberate ones, each for a reason. `--dry-run` and `resolved.yml` list those that matter for a config. A run",
        "says at its start how many they are; before its first checkpoint it lists them when its config sets a key",
        "that means something else in GPT-NeoX. Made from `megatron/neox_arguments/differences.py` by `make docs`.",
    ]
    for section in dict.fromkeys(difference.section for difference in DIFFERENCES):
        lines += ["", f"## {section}", "", "| what | GPT-NeoX | here |", "|---|---|---|"]
        lines += [
            f"| {_cell(row.topic)} | {_cell(row.neox)} | {_cell(row.here)} |"
            for row in DIFFERENCES
            if row.section == section
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
