"""The sections of the dry run's text, each a list of lines."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megatron.checkpoint.start import Start
from megatron.cluster.launch import Placement
from megatron.data.order.data_plan import DataPlan
from megatron.data.order.table import SourceRow
from megatron.data.reference import row_bytes
from megatron.model.partition import StageRow
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs, plugin_key
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.block_sizes import GMLP, HEADLESS, MAMBA, RWKV, without_flops
from megatron.neox_arguments.callback_key import by_name, choose_callbacks, keys_of
from megatron.neox_arguments.coerce import thaw
from megatron.neox_arguments.differences import differences_for
from megatron.neox_arguments.forget_steps import FORGET, TRAIN
from megatron.neox_arguments.formulas import flops_per_token, neox_flops_per_token, parameter_count
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.rules_post import has_teacher
from megatron.neox_arguments.rules_reference import exchanges, reads_reference
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.plan.memory import Memory
from megatron.plan.saves import Saves
from megatron.plan.stages import Held, freezes, trained_parameters
from megatron.run.data import reference_folder
from megatron.run.data_table import HEAD, data_cells, phase_lines
from megatron.tables import count, shorten, size, table

_MOST_RANKS = 32


def with_title(title: str, lines: Sequence[str]) -> list[str]:
    """A section: its title, its lines indented."""
    return [f"== {title}", *(f"  {line}".rstrip() for line in lines)]


def config(args: NeoXArgs) -> list[str]:
    """Every key that is not at its default, with where its value came from."""
    rows = []
    for name, info in all_keys().items():
        value, source = args.get(name), args.source(name)
        if source != "default" and (args.is_set(name) or value != info.default):
            rows.append((name, _short(value), source))
    return with_title("config (keys that were set or derived)", table(("key", "value", "source"), rows))


def _short(value: object) -> str:
    text = json.dumps(thaw(value), ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def differences(args: NeoXArgs) -> list[str]:
    """What is not as in GPT-NeoX for this config, and what reading it brought up."""
    lines = with_title("differences from GPT-NeoX for this config", differences_for(args))
    return lines + (["", *with_title("notes", args.notes)] if args.notes else [])


def plugins(args: NeoXArgs) -> list[str]:
    """Each plugin with what it registered; no section without any."""
    rows = plugin_key.describe(args.launcher.plugins)
    return with_title("plugins", table(("plugin", "sha256", "registers"), rows)) if rows else []


def callbacks(args: NeoXArgs) -> list[str]:
    """The callbacks of the run in the order of their hooks, with the settings and keys that they read."""
    rows = []
    for one in choose_callbacks(args):
        values = {**one.settings, **{key: args.get(key) for key in keys_of(one.row)}}
        shown = [f"{key}={_short(value)}" for key, value in values.items() if value is not None]
        rows.append((one.name, one.phase, ", ".join(shown)))
    off = [name for name, value in by_name(args.logging.callbacks).items() if value is False]
    lines = table(("callback", "phase", "settings"), rows)
    return with_title("callbacks", lines + ([f"off: {', '.join(off)}"] if off else []))


def ranks(topology: Topology, placement: Placement) -> list[str]:
    """Every rank with its host and coordinates; of a large job the first and the last."""
    hosts = [host for host, slots in placement.resources.items() for _ in slots]
    world = topology.world_size
    shown = [*range(world)] if world <= _MOST_RANKS else [*range(_MOST_RANKS // 2), *range(world - 4, world)]
    rows: list[tuple[object, ...]] = []
    for rank in shown:
        if rows and rank != int(str(rows[-1][0])) + 1:
            rows.append(("...", *[""] * (len(topology.axes) + 1)))
            rows.append((rank, hosts[rank] if hosts else "(allocation)", *topology.coord(rank).values()))
            continue
        rows.append((rank, hosts[rank] if hosts else "(allocation)", *topology.coord(rank).values()))
    shape = " x ".join(f"{name} {width}" for name, width in topology.axes.items())
    lines = [placement.describe(), shape, *table(("rank", "host", *topology.axes), rows)]
    return with_title("ranks", lines)


def model(args: NeoXArgs, tokenizer: str, vocab_size: int) -> list[str]:
    """Shape, vocabulary and parameters."""
    m, total = args.model, parameter_count(args.model, vocab_size)
    kinds = {kind: m.attention_config.count(kind) for kind in dict.fromkeys(m.attention_config)}
    heads = f"{m.num_attention_heads} heads of {m.head_dim} ({m.num_kv_heads} key/value)"
    parts = [heads, f"feed-forward {m.ffn_width} {m.activation}"] if set(m.attention_config) - set(HEADLESS) else []
    if set(m.attention_config) & set(MAMBA):
        parts.append(f"state {m.mamba_d_state} in {m.mamba_expand * m.hidden_size} channels")
    if set(m.attention_config) & set(GMLP):
        parts.append(f"gating units of {4 * m.hidden_size} channels over {m.seq_length} positions")
    if set(m.attention_config) & set(RWKV):
        parts.append(f"time mixing {m.dim_att}, channel mixing {m.ffn_dim}")
    rows = [
        f"{m.num_layers} layers, width {m.hidden_size}, {', '.join(parts)}, sequence {m.seq_length}",
        f"norm {m.norm}, positions {m.pos_emb}, attention "
        + ", ".join(f"{kind} x{times}" for kind, times in kinds.items()),
        f"tokenizer {tokenizer}: {vocab_size} tokens, {args.tokenizer.padded_vocab_size} rows in memory",
        f"parameters {total.total:,} ({count(total.total)}): blocks {total.layers:,}, embedding {total.embedding:,}, "
        f"head {total.head:,}{' (tied)' if m.ties_head else ''}, final norm {total.final_norm:,}",
    ]
    if "moe" in m.layer_mlps:
        rows.insert(2, _experts(m))
        rows.append(f"of which a token uses {total.active:,} ({count(total.active)})")
    if freezes(args):
        trained, whole = trained_parameters(args, vocab_size)
        beside = " with adapters" if args.post.lora_r is not None else ""
        rows.append(f"of {whole:,}{beside}, {trained:,} ({count(trained)}, {trained / whole:.2%}) are trained")
    return with_title("model", rows)


def _experts(m: ModelConfig) -> str:
    """Mixtures of experts in a line."""
    shared = f" and a shared one of {m.moe_shared_expert_size}" if m.moe_shared_expert_size else ""
    full = "none dropped" if m.moe_capacity_factor is None else f"capacity factor {m.moe_capacity_factor:g}"
    return (
        f"mixtures of experts in {m.layer_mlps.count('moe')} of {m.num_layers} layers: {m.moe_num_experts} experts of "
        f"width {m.moe_intermediate_size}{shared}, {m.moe_top_k} per token ({m.moe_router_type}, {full})"
    )


def stages(rows: Sequence[StageRow], held: Sequence[Held]) -> list[str]:
    """Layers and parameters of each pipeline stage."""
    body = []
    for row, one in zip(rows, held, strict=True):
        names = [layer.name for layer in row.layers]
        blocks = [layer.index - 2 for layer in row.layers if layer.is_block]
        parts = [f"blocks {blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"]
        parts = (["embedding"] if "Embedding" in names else []) + parts + (["norm", "head"] if "Head" in names else [])
        body.append((row.stage, len(blocks), f"{row.parameters:,}", f"{one.parameters:,}", " + ".join(parts)))
    return with_title("stages", table(("stage", "blocks", "parameters", "held per rank", "layers"), body))


def memory(args: NeoXArgs, estimates: Sequence[Memory]) -> list[str]:
    """The estimate per rank of each stage."""
    body = [
        (stage, size(m.weights), size(m.gradients), size(m.optimizer), size(m.activations), size(m.total))
        for stage, m in enumerate(estimates)
    ]
    lines = table(("stage", "weights", "gradients", "optimizer", "activations", "sum"), body)
    kind = f"{args.optimizer.precision}, ZeRO {args.optimizer.zero_stage}, {args.optimizer.optimizer_type}"
    return with_title(f"memory per rank, estimated ({kind}; formula: megatron/plan/memory.py)", lines)


def steps(args: NeoXArgs, vocab_size: int) -> list[str]:
    """Batch arithmetic, tokens, FLOPs, schedule."""
    t, dp = args.training, args.parallel.data_parallel_size
    iters = t.train_iters or 0
    plan = BatchPlan.of(args)
    tokens = t.train_batch_size * plan.tokens_per_sample
    total = plan.tokens(iters)
    flops = flops_per_token(args.model, vocab_size) * tokens
    neox = neox_flops_per_token(args.model, vocab_size, recompute=False) * tokens
    silent = without_flops(args.model)
    besides = f"; work of {', '.join(silent)} outside matrix products is not counted" if silent else ""
    recompute = args.model.checkpoint_policy == "full" or args.model.checkpoint_activations
    s = args.schedule
    return with_title(
        "steps",
        [
            f"train_batch_size {t.train_batch_size} = micro {t.train_micro_batch_size_per_gpu} x accumulation "
            f"{t.gradient_accumulation_steps} x data parallel {dp}{plan.describe()}",
            f"{tokens:,} tokens per step, {iters:,} steps, {count(total)} tokens in all",
            *plan.describe_forgetting(iters),
            f"{flops:.3e} FLOPs per step (6 per parameter in a matrix product + full attention; by GPT-NeoX's formula "
            f"{neox:.3e}{'; recomputation adds a third' if recompute else ''}{besides}), "
            f"{flops / tokens * total:.3e} in all",
            f"learning rate {args.optimizer.lr:g} {s.lr_decay_style} to {s.min_lr:g} over {s.lr_decay_iters} steps, "
            f"warm-up {s.warmup_share * s.steps if s.steps else 0:g} steps",
        ],
    )


def data(found: Sequence[SourceRow], notes: Sequence[str] = ()) -> list[str]:
    """What each source has, what the run takes of it, and what its packing leaves out, cuts or pads."""
    return with_title("data", [*table(HEAD, data_cells(found)), *phase_lines(found), *notes])


def read_ahead(args: NeoXArgs, plan: DataPlan, begun: int) -> list[str]:
    """What the pass of the reference model, or of a teacher, reads and writes, where the run has `begun` samples of its
    training data behind it; no section where there is none."""
    title, kept, values = "reference model", "reference", args.model.seq_length
    if has_teacher(args.get) and args.post.distill_precompute:
        title, kept, values = "teacher", "teacher", 2 * args.post.distill_top_k * values
    elif not reads_reference(args.get) or args.data.precompute_model_name is not None:
        return []
    taken = {TRAIN: begun} if plan.counts is None else plan.counts.taken
    found, rows = [], 0
    for name, role in plan.roles.items():
        samples = role.samples - taken.get(name, 0)
        if samples <= 0 or (plan.counts is not None and name != FORGET):
            continue
        found.append(f"{name} {samples:,}")
        # A text by itself is the same row in every epoch.
        alone = args.data.pack_impl == "unpacked"
        distinct = sum(one.packing.samples_per_epoch() for one in role.sources) if alone else samples
        rows += min(samples, distinct) * role.rows
        rows += samples if exchanges(args.get) else 0
    exchanged = ", each with the answer to another as well" if exchanges(args.get) else ""
    folder = reference_folder(args, plan) / f"{kept}-KEY"
    lines = [
        f"before the first step it reads the samples that it has not read yet: of {', '.join(found)}{exchanged}",
        f"at most {size(rows * row_bytes(values))} in {folder} (KEY stands for the weights)",
    ]
    return with_title(title, lines)


def completions(args: NeoXArgs, prompts: int) -> list[str]:
    """What a run that trains on completions asks for, of so many prompts, and what rewards them; no section for
    others."""
    if not trains_on_rollouts(args.get):
        return []
    post, samples, data = args.post, args.training.train_batch_size, args.data
    turns = -(-(args.training.train_iters or 0) // post.rollout_steps)
    steps = "every step" if post.rollout_steps == 1 else f"every {post.rollout_steps} steps"
    if data.dataset_impl == "online":
        servers = f"{_short(data.online_dataserver_ips)}, ports {_short(data.online_dataserver_ports)}"
        return with_title("completions", [f"{samples:,} for {steps}, with their rewards, of data servers at {servers}"])
    each = post.rollouts_per_prompt
    passes = turns * samples / each / prompts if prompts else 0
    rewards = {"reward": post.reward, "reward_url": post.reward_url, "reward_model": post.reward_model}
    lines = [
        f"{samples:,} for {steps}: {each} of each of {samples // each:,} prompts, at most {post.rollout_tokens} tokens",
        f"{prompts:,} prompts in {', '.join(post.rollout_prompts or ())}, asked {passes:.3g} times each",
        *(f"rewards: {key} {value}" for key, value in rewards.items() if value is not None),
    ]
    if post.kl_div_beta > 0:
        lines.append(f"compared with the weights that the run begins with (kl_div_beta {post.kl_div_beta:g})")
    return with_title("completions", lines)


def checkpoints(start: Start, saves: Saves | None, folder: str | None) -> list[str]:
    """Where the run starts and which steps it saves."""
    lines = [start.message]
    if start.resumes and saves is not None and saves.steps and start.step >= saves.steps[-1]:
        lines.append(f"no step is left: the run ends at step {saves.steps[-1]} (train_iters)")
    if saves is None:
        lines.append("nothing is saved: `save` is not set")
    else:
        lines.append(f"saves to {folder} after steps {shorten(saves.steps)} ({len(saves.steps)} checkpoints)")
        needed = saves.kept * saves.bytes_each
        free = f"; {size(saves.free)} are free" if saves.free is not None else ""
        lines.append(f"about {size(saves.bytes_each)} each, {saves.kept} kept: {size(needed)}{free}")
        if saves.free is not None and saves.free < needed:
            lines.append("WARNING: the disk is too small for that: set keep_last_n_checkpoints, or save elsewhere")
    return with_title("checkpoints", lines)
