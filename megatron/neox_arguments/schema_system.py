"""The keys about ranks, launching, logging and the engine."""

# ruff: noqa: RUF009  (key() returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys import key

_TUNE = "autotuning is not available; try sizes with --dry-run and short runs"
_NOISE = "its buffers are divided like the gradients; use ZeRO"
_DS = "this DeepSpeed feature is not available"


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work: pipeline x data x tensor."""

    pipe_parallel_size: int = key(
        0, "Pipeline stages; 0 and 1 are one stage.", differs="1 runs as a plain module, like 0", most=1_000_000
    )
    model_parallel_size: int = key(1, "Tensor-parallel ranks that share each layer.", most=1_000_000)
    sequence_parallel: bool = key(False, "Split norms and dropout over the tensor-parallel ranks too (saves memory).")
    pipe_partition_method: str = key(
        "type:transformer|mlp", "How layers are assigned to stages: type:REGEX, uniform or parameters."
    )
    expert_parallel_size: int = key(
        1,
        "Consecutive data-parallel ranks that share the experts of mixture-of-experts layers.",
        new=True,
        most=1_000_000,
    )
    global_num_gpus: int | None = key(None, "All ranks of the job, over all nodes.", most=1_000_000)
    num_gpus: int | None = key(
        None, "Ranks per node (on a CPU too). Default: its GPUs, else what the layout needs.", most=1_000_000
    )
    distributed_backend: Literal["nccl", "gloo", "mpi"] = key(
        "nccl", "Communication library.", differs="falls back to gloo without a GPU"
    )
    distributed_timeout: float | None = key(
        None,
        "Seconds for which a rank waits on the host until all others have done what takes long (index, checkpoint)."
        " Default: DEEPSPEED_TIMEOUT of the environment, in whole minutes, else 7200.",
        new=True,
    )
    collective_timeout: float = key(
        600.0,
        "Seconds for which a collective operation of a step may take on the device after the first two steps; at least"
        " a minute longer than the watchdog waits. <= 0: as long as distributed_timeout.",
        new=True,
    )
    world_size: int | None = key(None, "All ranks: pipeline x data x tensor.", derived="recompute")
    data_parallel_size: int | None = key(
        None, "Copies of the model: world_size / (pipeline x tensor).", derived="recompute", new=True
    )


@dataclass(frozen=True)
class LauncherConfig:
    """How the ranks are started, and which code beyond the library they import."""

    plugins: tuple[str, ...] = key(
        (),
        "Python modules and files (path/to/file.py, next to the config file or in the working directory) that register"
        " norms, activations, mixers, model families, objectives, ... of your own; see documentation/plugins.md."
        " Several config files may each name some. A plugin is code and runs with your rights.",
        new=True,
    )
    plugin_sources: dict[str, Any] | None = key(
        None, "SHA-256 of the source of each plugin.", derived="recompute", new=True
    )
    hostfile: str | None = key(None, "File of `host slots=N` lines.", path=True)
    include: str | None = key(None, "Hosts and slots to use: `host[:slot,...]@host`.")
    exclude: str | None = key(None, "Hosts and slots not to use.")
    num_nodes: int = key(-1, "Use the first N hosts; -1 uses all.", most=1_000_000)
    master_port: int = key(29500, "Port of the rendezvous.")
    master_addr: str | None = key(None, "Host of the rendezvous.")
    launcher: Literal["pdsh", "openmpi", "mvapich", "mpich", "slurm"] = key("pdsh", "How other nodes are reached.")
    force_multi: bool = key(False, "Use the multi-node launcher for one node too.")
    no_ssh_check: bool = key(False, "Do not test ssh before launching.")
    comment: str | None = key(None, "Comment for the scheduler.")
    account: str | None = key(None, "Account for the scheduler.")
    watchdog_seconds: float = key(
        600.0,
        "Seconds without progress in a step after which a run ends with exit code 5, names the silent rank and prints"
        " the Python stacks of all. Three times the longest step of the run is waited for in any case, and an hour for"
        " what is not a step. <= 0: never.",
        new=True,
    )
    deepspeed_mpi: bool = key(False, "MPI's variables win over a RANK in the environment.")
    deepspeed_slurm: bool = key(False, "SLURM's variables win over a RANK in the environment.")
    autotuning_run: Literal["tune", "run"] | None = key(None, "DeepSpeed autotuning.", unavailable=_TUNE)


@dataclass(frozen=True)
class LoggingConfig:
    """Console, trackers and metrics."""

    log_interval: int = key(100, "Steps between log lines; <= 0 never.")
    callbacks: dict[str, Any] | tuple[str, ...] | None = key(
        None,
        "Callbacks by name: false switches one of Deepy's off; a plugin's is added by its name, with a mapping of its"
        " settings or true. A list of names adds them. See documentation/plugins.md.",
        registry="callbacks",
        new=True,
    )
    log_dir: str | None = key(None, "Folder for each rank's log.", path=True)
    tensorboard_dir: str | None = key(None, "Folder for TensorBoard.", path=True)
    use_wandb: bool | None = key(
        None, "Log to Weights & Biases.", differs="off unless true; GPT-NeoX turns it on when it finds a key"
    )
    wandb_group: str | None = key(None, "Group of the run.", differs="no random suffix is added")
    wandb_run_name: str | None = key(None, "Name of the run.")
    wandb_tags: tuple[str, ...] | None = key(None, "Tags of the run, of at most 64 letters each.", new=True)
    wandb_team: str | None = key(None, "Team (entity).")
    wandb_project: str = key("neox", "Project.")
    wandb_host: str = key("https://api.wandb.ai", "Server.")
    wandb_init_all_ranks: bool = key(False, "One tracker run per rank instead of rank 0 only.")
    git_hash: str | None = key(None, "Version of the code, recorded with the run. Default: from git.")
    peak_theoretical_tflops: float | None = key(None, "Peak of one device in TFLOP/s, for MFU. Default: from a table.")
    log_grad_norm: bool = key(False, "Log the norm of every gradient.", differs="works; of whole parameters")
    log_param_norm: bool = key(False, "Log the norm of every weight.", differs="of whole parameters, not one shard")
    log_grad_pct_zeros: bool = key(False, "Log the share of zero gradients.", unavailable="use log_grad_norm")
    log_optimizer_states: bool = key(False, "Log norms of the optimizer's state.", unavailable="use log_param_norm")
    log_gradient_noise_scale: bool = key(
        False, "Log the gradient noise scale, in samples.", differs="works, at every layout; there it raises an error"
    )
    gradient_noise_scale_n_batches: int = key(5, "Steps per estimate of the gradient noise scale.")
    gradient_noise_scale_cpu_offload: bool = key(False, "Keep the estimate's buffers on the CPU.", unavailable=_NOISE)
    straggler_interval: int = key(
        0,
        "Steps between reports of which rank the others wait for, and which computes slowest; <= 0 never.",
        new=True,
    )
    monitor_interval: int = key(
        0,
        "Steps between norms of gradients and weights and the ratio of update to weight, of each parameter that "
        "monitor_parameters matches; <= 0 never. They are part of the next log.",
        new=True,
    )
    monitor_parameters: tuple[str, ...] = key(
        ("*",), "Patterns of the names of parameters to monitor, as `2.*` or `*.mlp.*`.", new=True
    )
    monitor_attention: bool = key(
        False,
        "Every monitor_interval steps also the largest attention logit and the mean entropy of the attention of each"
        " block, by a forward pass of one row.",
        new=True,
    )
    use_comet: bool | None = key(None, "Log to Comet.")
    comet_workspace: str | None = key(None, "Comet's workspace. Default: that of the user's Comet configuration.")
    comet_project: str | None = key(None, "Comet's project. Default: Uncategorized Experiments.")
    comet_experiment_name: str | None = key(None, "Name of the experiment. Default: Comet chooses one.")
    comet_tags: tuple[str, ...] | None = key(None, "Tags of the experiment.")
    comet_others: dict[str, Any] | None = key(None, "Further facts to keep with the experiment.")
    use_trackio: bool = key(False, "Log to Trackio, a dashboard on this machine.", new=True)
    trackio_project: str = key("neox", "Trackio's project.", new=True)
    trackio_run_name: str | None = key(
        None, "Name of the run in Trackio, before its id. Default: that of the run's folder.", new=True
    )
    prometheus_file: str | None = key(
        None,
        "File that holds the newest metrics in Prometheus's text format, for node_exporter (*.prom).",
        path=True,
        new=True,
    )
    memory_profiling: bool = key(
        False,
        "Write a snapshot of each GPU's memory after the profiled steps, for pytorch.org/memory_viz.",
        differs="one file per rank, not of rank 0 alone; written when an error ends the run, too",
    )
    memory_profiling_path: str | None = key(
        None,
        "Folder of memory snapshots. Default: that of the traces.",
        differs="may be unset",
        path=True,
    )
    profile: bool = key(
        False,
        "Record steps with torch's profiler, a trace per rank in tensorboard_dir (else the run folder's profile/).",
        differs="on a CPU too; without tensorboard_dir and memory_profiling_path too",
    )
    profile_step_start: int = key(
        10, "Steps before the first profiled one.", differs="counts the run's steps, not those since the last start"
    )
    profile_step_stop: int = key(12, "The last profiled step.")


@dataclass(frozen=True)
class DeepSpeedConfig:
    """Keys that are passed to DeepSpeed as they are."""

    deepspeed: bool = key(True, "Run on DeepSpeed.", unavailable={False: "set engine: native, and leave it true"})
    fp32_allreduce: bool = key(
        True,
        "Reduce gradients over data-parallel ranks in fp32; false: in the model's type.",
        differs="true by default; GPT-NeoX reduces bf16 runs in bf16",
    )
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = key(
        None,
        "Type gradients are reduced in. Default: as fp32_allreduce says.",
        spellings={"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"},
        differs="takes the name of a type",
    )
    prescale_gradients: bool = key(False, "Divide gradients before reducing them.")
    gradient_predivide_factor: float = key(1.0, "Divisor of prescale_gradients.")
    steps_per_print: int = key(10, "Steps between DeepSpeed's own progress lines.")
    wall_clock_breakdown: bool = key(False, "DeepSpeed's timers.")
    dump_state: bool = key(False, "Print DeepSpeed's state at start.")
    flops_profiler: dict[str, Any] | None = key(None, "DeepSpeed's FLOP profiler: {enabled, profile_step, ...}.")
    comms_logger: dict[str, Any] | None = key(None, "DeepSpeed's communication log: {enabled, ...}.")
    activation_checkpointing: dict[str, Any] | None = key(
        None, "Passed to DeepSpeed; recomputation itself is set by checkpoint_activations and checkpoint_policy."
    )
    tensorboard: dict[str, Any] | None = key(None, "DeepSpeed's own TensorBoard log.")
    wandb: dict[str, Any] | None = key(None, "DeepSpeed's own W&B log.")
    csv_monitor: dict[str, Any] | None = key(None, "DeepSpeed's own CSV log.")
    deepspeed_extra_args: dict[str, Any] | None = key(
        None,
        "Further DeepSpeed keys, for what has no key here.",
        differs="a key that is also set elsewhere is an error",
    )

    # known, not available
    scheduler: dict[str, Any] | None = key(
        None, "DeepSpeed's LR scheduler.", unavailable="use lr_decay_style and warmup"
    )
    sparse_gradients: bool = key(False, "Sparse embedding gradients.", unavailable=_DS)
    autotuning: dict[str, Any] | None = key(None, "DeepSpeed's autotuning.", unavailable=_TUNE)
    sparse_attention: dict[str, Any] | None = key(None, "DeepSpeed's sparse attention.", unavailable=_DS)
    data_efficiency: dict[str, Any] | None = key(None, "DeepSpeed's data efficiency.", unavailable=_DS)
    elasticity: dict[str, Any] | None = key(
        None, "DeepSpeed's elasticity.", unavailable="a run can be continued at another number of ranks as it is"
    )
    compression_training: dict[str, Any] | None = key(None, "DeepSpeed's compression.", unavailable=_DS)
    checkpoint: dict[str, Any] | None = key(
        None, "DeepSpeed's checkpoint options.", unavailable="checkpoints have their own format and keys (save, load)"
    )
