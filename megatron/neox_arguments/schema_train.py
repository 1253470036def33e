"""The keys about training, checkpoints and generation."""

# ruff: noqa: RUF009  (key() returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys import key

_BNB = "8-bit optimizers are not available; use optimizer.type Adam"

DTYPE_SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, precision and ZeRO."""

    optimizer: dict[str, Any] | None = key(None, "{type, params}: the optimizer and its constructor's arguments.")
    optimizer_type: str = key(
        "adam",
        "Optimizer, usually given as optimizer.type. Weight decay is decoupled.",
        registry="optimizer.type",
        spellings={
            "schedule_free": "schedule_free_adamw",
            "schedulefree": "schedule_free_adamw",
            "adamwschedulefree": "schedule_free_adamw",
            "sgdschedulefree": "schedule_free_sgd",
            "sophiag": "sophia",
            "fusedadam": "adam",
            "onebit_adam": "onebitadam",
            "cpuadam": "cpu_adam",
        },
        differs="AdamW is accepted",
    )
    lr: float | None = key(None, "Peak learning rate, usually given as optimizer.params.lr (default 0.001).")
    betas: tuple[float, float] | None = key(
        None, "Decay rates of the optimizer, if it has them: optimizer.params.betas.", derived="check", new=True
    )
    eps: float | None = key(
        None, "Epsilon of the optimizer, if it has one: optimizer.params.eps.", derived="check", new=True
    )
    momentum: float | None = key(
        None, "Momentum of the optimizer, if it has one: optimizer.params.momentum.", derived="check", new=True
    )
    weight_decay: float = key(0.1, "Decoupled weight decay of matrices and embeddings (never of norms and biases).")
    decay_embeddings: bool = key(
        True,
        "Whether weight_decay holds for the embedding layer too (and an output matrix tied to it).",
        new=True,
    )
    parameter_groups: tuple[dict[str, Any], ...] | None = key(
        None,
        "Other rules for parameters by name, a list of {match, weight_decay, lr_mult, freeze}: match is a pattern of "
        "names (2.*.bias) or a list; a later entry wins over an earlier one; see documentation/runs.md.",
        new=True,
    )
    gradient_clipping: float = key(
        1.0,
        "Clip the global gradient norm to this; 0 switches clipping off.",
        differs="the default 1.0 clips; in GPT-NeoX the value 1.0 never reaches the engine",
    )
    precision: Literal["fp32", "bfloat16", "fp16"] | None = key(
        None,
        "Compute type. Default: from the fp16 and bf16 dicts, else fp32. On the command line it wins over them.",
        spellings={"bf16": "bfloat16", "float16": "fp16", "half": "fp16", "float32": "fp32"},
    )
    fp16: dict[str, Any] | None = key(None, "fp16 with a loss scale: {enabled, loss_scale (0: dynamic), ...}.")
    bf16: dict[str, Any] | None = key(None, "{enabled: true} computes in bfloat16 with fp32 masters.")
    amp: dict[str, Any] | None = key(None, "Apex mixed precision.", unavailable="use precision: bfloat16")
    data_types: dict[str, Any] | None = key(
        None,
        "{grad_accum_dtype}: the type gradients are accumulated in. Default: fp32.",
        differs="fp32 unless set otherwise; in GPT-NeoX bf16 accumulates in bf16",
    )
    engine: Literal["deepspeed", "native"] = key(
        "deepspeed",
        "What takes the steps. native: plain torch for one pipeline stage in fp32 or bfloat16, optimizer state always "
        "divided over the data-parallel ranks; see documentation/scale.md.",
        new=True,
    )
    zero_optimization: dict[str, Any] | None = key(None, "DeepSpeed's ZeRO dict: {stage, ...}.")
    zero_stage: int | None = key(
        None,
        "ZeRO stage 0-3, usually given as zero_optimization.stage. At least 1 with bfloat16 and fp16.",
    )
    use_bnb_optimizer: bool = key(False, "bitsandbytes 8-bit Adam.", unavailable=_BNB)
    max_skipped_steps: int = key(
        50, "Stop (exit 4) after this many skipped updates in a row (gradients not finite); <= 0 never stops.", new=True
    )
    ema_decay: float | None = key(
        None,
        "Keep a moving average of the weights, m = d m + (1 - d) w after each update: d, in (0, 1). It is divided over "
        "the data-parallel ranks and part of checkpoints; conversions with --ema export it.",
        new=True,
    )
    ema_evaluate: bool = key(
        True,
        "Validation, test, tasks and samples of training, eval.py and generate.py use ema_decay's average (in training "
        "that of a schedule_free optimizer too).",
        new=True,
    )
    skip_outliers: bool | int | dict[str, Any] | None = key(
        None,
        "Skip the update of a step whose loss or gradient norm is more than sigma standard deviations above the mean "
        "of the steps before: {window: 128, sigma: 6}. true: these values; a number: the window.",
        new=True,
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over time."""

    lr_decay_style: str = key(
        "linear",
        "Shape of the decay from lr to min_lr after the warm-up, by the progress p (0 to 1) or the completed steps n.",
        registry="lr_decay_style",
        spellings={"inv_sqrt": "inverse_sqrt"},
        differs="holds its end value after lr_decay_iters (cosine rises in GPT-NeoX)",
    )
    lr_decay_iters: int | str | None = key(
        None, "Length of the schedule in steps, or as a text in tokens: 300B tokens. Default: train_iters."
    )
    lr_decay_fraction: float | None = key(None, "Length of the schedule as a fraction of train_iters.")
    min_lr: float = key(0.0, "The learning rate never falls below this after warm-up.")
    min_lr_ratio: float | None = key(None, "min_lr as a fraction of lr, instead of min_lr.", new=True)
    warmup: float | str = key(
        0.01, "How long to warm up linearly: a fraction of the schedule, or a text: 500 steps, 2B tokens."
    )
    lr_cooldown: float | str = key(
        0.1,
        "wsd, wsd_s: how long the rate falls at the end (of each cycle): a fraction of the schedule (of the cycle), or "
        "a text: 500 steps, 2B tokens.",
        new=True,
    )
    lr_cooldown_style: Literal["linear", "sqrt", "cosine", "inverse"] = key(
        "linear",
        "wsd, wsd_s: how the rate falls from lr to min_lr over the cooldown, by its progress p: linearly, by the square"
        " root of p, in half a cosine, or so that 1 / rate rises linearly (needs a min_lr).",
        new=True,
    )
    lr_cycles: int | tuple[float | str, ...] = key(
        1,
        "wsd_s: the number of equal cycles, or where the cycles before the last one end: fractions of the schedule, or "
        "texts: 500 steps, 2B tokens.",
        new=True,
    )
    lr_rewarmup: float | str = key(
        0.0,
        "wsd_s: how long the rate rises linearly at the start of each cycle but the first: a fraction of the cycle, or "
        "a text: 500 steps, 2B tokens.",
        new=True,
    )
    lr_decay_power: float | None = key(
        None, "The exponent k of lr_decay_style polynomial (default 1) and power (default 0.5).", new=True
    )
    override_lr_scheduler: bool = key(False, "On resume, the config's schedule wins over the checkpoint's.")
    use_checkpoint_lr_scheduler: bool = key(False, "On resume, the checkpoint's schedule wins over the config's.")

    @property
    def steps(self) -> int | None:
        """lr_decay_iters, once it is known in steps."""
        return self.lr_decay_iters if isinstance(self.lr_decay_iters, int) else None

    @property
    def warmup_share(self) -> float:
        """warmup as a share of `steps`, which are known."""
        assert not isinstance(self.warmup, str), "warmup is a share once the schedule's steps are known"
        return self.warmup


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length, evaluation and objective of a run."""

    train_batch_size: int | None = key(None, "Samples per optimizer step over all ranks.")
    train_micro_batch_size_per_gpu: int | None = key(None, "Samples per forward pass of one data-parallel rank.")
    gradient_accumulation_steps: int | None = key(
        None,
        "Forward passes per optimizer step.",
        differs="derived from the other two when unset, where GPT-NeoX assumes 1",
    )
    batch_size_schedule: tuple[tuple[int | float | str, int], ...] | None = key(
        None,
        "Batch sizes and where they begin: [[0, 32], [1000, 64]] takes 32 samples per step, and 64 from step 1000 on. "
        "Or 2B tokens in place of 1000, or 0.1: a fraction of the run. The last one is train_batch_size.",
        new=True,
    )
    rampup_batch_size: tuple[int, int, int] | None = key(
        None,
        "[first, increment, samples]: the batch grows from first to train_batch_size, by the increment each time an "
        "equal part of so many samples is consumed.",
        new=True,
    )
    batch_size_lr_scale: Literal["none", "sqrt", "linear"] = key(
        "none",
        "While the batch is another than train_batch_size, multiply the learning rate by their ratio (linear), or the "
        "square root of it.",
        new=True,
    )
    seq_length_ramp: dict[str, Any] | None = key(
        None,
        "Short rows first: {start: 128, steps: 2000 (or tokens: N), multiple: 1} cuts samples of seq_length into rows "
        "that grow from start on, by lengths that divide it.",
        new=True,
    )
    skip_steps: tuple[tuple[int, int], ...] | None = key(
        None,
        "Steps that consume their samples without an update: [[100, 110]] are the ten after step 100.",
        new=True,
    )
    train_iters: int | None = key(None, "Optimizer steps, counted from the start of training.", most=100_000_000)
    train_epochs: int | None = key(None, "Passes over the training data, instead of train_iters.")
    train_tokens: float | str | None = key(
        None,
        "Tokens to train on, instead of train_iters: 300B, 3e11. The last step reaches them.",
        new=True,
    )
    train_flops: float | str | None = key(
        None,
        "FLOPs to train with, instead of train_iters: 1e21. Those of a token are 6 per parameter in a matrix product "
        "and full attention, as --dry-run shows them.",
        new=True,
    )
    eval_interval: int = key(1000, "Steps between validations; <= 0 never validates during training.")
    eval_iters: int = key(100, "Batches per validation; 0 switches validation and testing off.")
    exit_interval: int | None = key(None, "Stop (exit 0) when the step is a multiple of this.")
    exit_duration_in_mins: float | None = key(
        None,
        "Stop, with a checkpoint (exit 3), so early that the processes of this start have run for no more than this "
        "many minutes; <= 0 never.",
        new=True,
    )
    seed: int = key(1234, "Seed of initialisation, data order and dropout.")
    deterministic: Literal[False, True, "layout"] = key(
        False,
        "true: a run repeated at the same layout, on the same kind of device, has the same bits. layout: weights with "
        "the same bits at any number of data-parallel ranks, micro-batch, accumulation and ZeRO stage, on one kind of "
        "machine: one sample per forward pass, gradients added up in fixed point; documentation/runs.md.",
        new=True,
    )
    do_train: bool | None = key(None, "Train. Default: when there are steps to do.")
    do_valid: bool | None = key(None, "Validate. Default: when eval_iters > 0 and there is validation data.")
    do_test: bool | None = key(None, "Test after training. Default: when eval_iters > 0 and there is test data.")
    train_impl: str = key(
        "normal",
        "Objective.",
        registry="train_impl",
    )
    replica_check_interval: int = key(
        1000, "Steps between checks that replicated weights still agree over ranks; <= 0 never.", new=True
    )
    on_spike: str | dict[str, Any] | None = key(
        None,
        "When the loss is far above that of the steps before: warn, or rewind to an earlier checkpoint and leave out "
        "the samples of the spike. {do: rewind, window: 128, sigma: 6, steps: 3 (in a row), before: 8 (steps left out "
        "with them), most: 3 (rewinds)}.",
        new=True,
    )

    gc_interval: int = key(
        100,
        "Steps between collections of Python's garbage, on all ranks together and not in between; <= 0 leaves it to "
        "Python.",
        new=True,
    )
    check_start: bool = key(
        True,
        "Warn when the first batch, the weights that a run starts with, or the first loss have unlikely values.",
        new=True,
    )

    # known, not available
    serve_model_weights: bool = key(
        False,
        "Serve the weights to an inference process.",
        unavailable="the ranks write completions themselves, with the weights of the moment: set rollout_prompts and "
        "reward",
    )
    curriculum_learning: dict[str, Any] | None = key(
        None,
        "DeepSpeed's sequence-length curriculum.",
        unavailable="use seq_length_ramp: samples are cut into short rows",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when to save, what to load."""

    save: str | None = key(
        None,
        "Folder of this run's checkpoints; the run resumes from a complete one in it. s3://bucket/path/NAME: "
        "the folder NAME, with s3_path: s3://bucket/path.",
        path=True,
    )
    load: str | None = key(
        None,
        "Folder to start from when `save` holds no checkpoint. s3://bucket/path/NAME (or its global_step<N>): the "
        "folder bucket-path-NAME.s3 next to `save`, with s3_load. A Hugging Face model, a folder or "
        "owner/name[@REVISION] of the Hub, is read as it is: weights alone, at step 0.",
        differs="a missing checkpoint is an error, never a silent fresh start",
        path=True,
    )
    iteration: int | None = key(
        None, "Step to load (of `load`, else of `save`), instead of the latest.", differs="training honours it"
    )
    checkpoint_scale: Literal["linear", "log"] = key("linear", "Checkpoints every factor steps, or at factor^k.")
    checkpoint_factor: float | int | None = key(None, "Steps between checkpoints (linear) or growth factor (log).")
    extra_save_iters: tuple[int, ...] | None = key(None, "Further steps to save at; 0 saves before training.")
    keep_last_n_checkpoints: int | None = key(
        None,
        "Delete older checkpoints once a new one is complete; extra_save_iters and the newest one that a good step"
        " followed are kept. <= 0 keeps all.",
    )
    async_save: bool = key(
        False,
        "Write checkpoints while training goes on: a step waits only for a copy of what this rank saves to the host's "
        "memory, which then holds it twice when it trains on a CPU.",
        new=True,
    )
    temporary_checkpoint_minutes: float | None = key(
        None,
        "Minutes after the last checkpoint after which one is saved that is deleted once a later one is complete. "
        "<= 0: never.",
        new=True,
    )
    hf_save_interval: int = key(
        0,
        "Export checkpoints to Hugging Face folders while training: those so many steps apart or more, and the last "
        "one; <= 0 exports none. A process beside the run converts and checks them; no step waits for it.",
        new=True,
    )
    hf_save_path: str | None = key(
        None, "Folder for hf_save_interval's global_step<N>. Default: hf in save.", path=True, new=True
    )
    hf_upload_repo: str | None = key(
        None,
        "Repository of the Hugging Face Hub, NAME or OWNER/NAME, that gets each export of hf_save_interval while "
        "training goes on: branch global_step<N>, the last one also main. A new one is private.",
        new=True,
    )
    s3_path: str | None = key(
        None,
        "Folder of an S3 bucket, s3://bucket/path, that gets a copy of each checkpoint, below the name of save; a run "
        "whose save holds none resumes from there.",
        differs="sent while training goes on, the manifest last; a failed upload ends no run; read at the start",
    )
    s3_load: str | None = key(
        None,
        "Place in an S3 bucket, s3://bucket/path/NAME or its global_step<N>, from which the folder `load` gets the "
        "checkpoint that a start needs.",
        new=True,
    )
    s3_chunk_size: int = key(104857600, "Bytes of the parts in which a large file is sent to s3_path.")
    finetune: bool = key(False, "Load weights only and start at step 0.")
    hf_model: dict[str, Any] | None = key(
        None,
        "The Hugging Face model that the run began with, and the keys that its files gave: written by the start, kept "
        "in checkpoints.",
        new=True,
    )
    init_from: dict[str, Any] | None = key(
        None,
        "Begin from another run's checkpoint when `save` holds none: {path, iteration (default: the latest), data:"
        " continue or restart, optimizer: keep or reset, step: continue or restart, vocab: keep or resize, layer_map:"
        " which of its blocks each block of a deeper model starts from}.",
        new=True,
    )
    no_save_optim: bool = key(
        False, "Leave optimizer state out of checkpoints.", differs="works; GPT-NeoX never reads it"
    )
    no_save_rng: bool = key(False, "Leave random-generator state out of checkpoints.")
    no_load_optim: bool = key(False, "Do not load optimizer and schedule.")
    no_load_rng: bool = key(False, "Do not load random-generator state.")
    checkpoint_checksums: bool = key(
        True,
        "Compare every file that is read of a checkpoint with the checksum in its manifest (the small state file is "
        "always compared).",
        new=True,
    )
    restart_if_damaged: bool = key(
        False, "Begin from zero in `save` although all checkpoints in it are damaged or incomplete.", new=True
    )
    allow_config_changes: bool = key(
        False,
        "Resume from a checkpoint although architecture, tokenizer or optimizer changed; start from one, generate or "
        "evaluate with another tokenizer.",
        new=True,
    )

    # known, not available
    checkpoint_validation_with_forward_pass: bool = key(
        False, "Compare logits after loading.", unavailable="the conversion tools compare logits themselves"
    )


@dataclass(frozen=True)
class GenerationConfig:
    """Text generation and evaluation."""

    text_gen_type: Literal["unconditional", "input-file", "interactive", "precompute"] | None = key(
        None,
        "Kind of generation. Default: input-file with sample_input_file or prompt, else unconditional. precompute: no "
        "texts, but log-probabilities of those of the data sets (precompute_model_name).",
    )
    temperature: float = key(0.0, "Sampling temperature; 0 is greedy.", differs="0 is greedy whatever top_k is")
    top_p: float = key(0.0, "Sample from the smallest set of tokens with this much probability; 0 is off.")
    top_k: int = key(0, "Sample from the k likeliest tokens; 0 is off.")
    maximum_tokens: int = key(64, "Most tokens generated per prompt.")
    stop_tokens: tuple[str | int, ...] | None = key(
        None,
        "More tokens that end a generated text, by text (<|im_end|>) or id. The end of document and the model's own "
        "ends always do.",
        new=True,
    )
    stop_strings: tuple[str, ...] | None = key(
        None,
        "Texts that end a generated text, wherever tokens begin and end; the text is written without them.",
        new=True,
    )
    prompt: tuple[str, ...] | None = key(
        None,
        "Prompts to complete, instead of a file's. Records go to sample_output_file only if that is set.",
        new=True,
    )
    chat: bool = key(
        False,
        "Prompts are what a user says to the model, written by the tokenizer's chat template; in interactive use the "
        "conversation goes on until /new.",
        new=True,
    )
    chat_system: str | None = key(None, "What the system says first in a chat.", new=True)
    prompt_end: str = key(
        "\n",
        "What ends a prompt in files and in interactive use.",
        differs="blanks around a prompt are dropped only where prompt_end is a line break: others keep them",
    )
    sample_input_file: str | None = key(
        None,
        "File of prompts. In a .jsonl file each line is an object with `prompt`, a text, or `messages`, a chat.",
        path=True,
        differs="the lines of a .jsonl file are objects with prompts",
    )
    sample_output_file: str | None = key(
        "samples.jsonl",
        "JSONL file for what was generated.",
        path=True,
        differs="its lines are JSON, which GPT-NeoX's samples.txt does not say",
    )
    sample_every: int = key(
        0,
        "Steps between texts that the model in training writes, with the keys of generation; <= 0 never.",
        new=True,
    )
    sample_prompts: str | None = key(None, "File of the prompts that sample_every continues.", path=True, new=True)
    num_samples: int = key(1, "Samples of unconditional generation.")
    recompute: bool = key(False, "Generate without the key/value cache.")
    return_logits: bool = key(False, "Add the logits to each record.")
    return_logprobs: bool = key(False, "Add the log-probability of each new token to each record.", new=True)
    serve_host: str = key(
        "127.0.0.1",
        "Where serve.py listens: an address of this machine (0.0.0.0: all of them; everybody who reaches it can use "
        "the model), or unix:FILE for a socket file.",
        new=True,
    )
    serve_port: int = key(8000, "The port on which serve.py listens; 0: any that is free.", new=True)
    serve_batch_size: int = key(
        16, "Texts that each copy of the model behind serve.py writes at a time; others wait.", new=True
    )
    eval_tasks: tuple[str, ...] | None = key(
        None,
        "Tasks of the lm-eval harness: names of tasks, groups and tags, YAML files, folders of them. Training runs "
        "them at the start, every eval_interval steps and at the end.",
    )
    eval_suite: tuple[str, ...] | None = key(
        None,
        "Suites of tasks, each with its examples, and their averages: core, core_mmlu, core_leaderboard, mmlu_0, "
        "mmlu_5, generation, base_generation, or YAML files. In addition to eval_tasks.",
        new=True,
    )
    eval_tasks_path: tuple[str, ...] | None = key(
        None,
        "Folders with YAML files of tasks and groups that eval_tasks may name. Default: lm_eval_tasks in the current "
        "folder, if there is one.",
        path=True,
        new=True,
    )
    eval_num_fewshot: int | dict[str, int] | None = key(
        None,
        "Examples before each question: one number for all tasks but those whose file says 0, or a mapping from tasks "
        "and groups to numbers. Default: as each task's file says, else 0.",
        new=True,
    )
    eval_task_limit: float | None = key(
        None, "Evaluate only the first documents of each task: so many, or this share of them when below 1.", new=True
    )
    eval_chat_template: bool = key(False, "Write the questions as chats, by the tokenizer's chat template.", new=True)
    eval_system_instruction: str | None = key(
        None, "Text before each question (the system's turn of a chat).", new=True
    )
    eval_batch_size: int | None = key(
        None, "Texts that a copy of the model scores at a time. Default: train_micro_batch_size_per_gpu.", new=True
    )
    eval_jobs: Literal["slurm", "local"] | None = key(
        None,
        "Evaluate eval_tasks on new checkpoints in jobs of their own, not in the run: slurm submits them with sbatch, "
        "local starts processes of this machine, one at a time. Checkpoints are eval_interval steps apart or more; the "
        "last one is always evaluated.",
        new=True,
    )
    eval_jobs_sbatch: tuple[str, ...] | None = key(
        None, "Flags of sbatch for eval_jobs: [--partition=low, --time=1:00:00].", new=True
    )
    eval_jobs_most: int = key(
        4, "Checkpoints whose eval_jobs wait or run at most: while there are so many, new ones are left out.", new=True
    )
    eval_results_prefix: str = key(
        "", "Start of the name of eval.py's result file; unset: the folder eval_results of the run.", path=True
    )

    # known, not available
    char_level_ppl: bool = key(False, "Perplexity per character.", unavailable="divide by characters per token")
