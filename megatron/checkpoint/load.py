"""Load a checkpoint at this run's layout, whatever layout wrote it.

Everything is stored by canonical parameter name, and each rank reads the elements that it answers for
(`Engine.share`), whatever layout cut the files; the engine brings to a rank what it needs of the others'. So data
ranks share the reading, and data-parallel size, ZeRO stage and pipeline split play no role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from megatron.checkpoint import layout
from megatron.checkpoint.agreement import gather, gather_over_stages, together
from megatron.checkpoint.base import Opening, Published, WithNewAdapters, open_reader
from megatron.checkpoint.damage import find_damage
from megatron.checkpoint.find import Checkpoint, advise_others
from megatron.checkpoint.grown import GrownReader, Growth
from megatron.checkpoint.init_from import NEW_REWARD_MODEL, advise_new_run
from megatron.checkpoint.neox_folder import FRESH_MOMENTS
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.reader import WEIGHT, CheckpointReader
from megatron.checkpoint.rng import reseed_after, restore_random_state
from megatron.errors import UserError
from megatron.layers.lora import PARTS
from megatron.log import get_logger
from megatron.model.head import REWARD, TIED_NAME
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.schema_model import ModelConfig

logger = get_logger(__name__)


class LoadingEngine(Protocol):
    """What loading needs of the engine (`training.engine.Engine`)."""

    def params(self) -> Mapping[str, Parameter]: ...
    def moments(self) -> set[str]: ...
    def share(self, name: str) -> range: ...
    def write_share(self, name: str, values: dict[str, Tensor]) -> None: ...
    def finish_writing(self) -> None: ...
    def load_scalars(self, values: dict[str, Any]) -> None: ...
    def beat(self) -> None: ...


def load_checkpoint(
    checkpoint: Checkpoint,
    engine: LoadingEngine,
    state: ParallelState,
    *,
    heads: Heads,
    model: ModelConfig | None = None,
    load_optim: bool = True,
    load_rng: bool = True,
    checksums: bool = True,
    growth: Growth | None = None,
    lora_base: str | None = None,
    seed: int = 0,
    published: Published | None = None,
) -> dict[str, Any]:
    """Fill the engine from a checkpoint (`Start.checkpoint`); returns what `save_checkpoint` was given as `client`.
    Collective over all ranks.

    Args:
        heads: `Heads.of(args.model)` of this run.
        model: the config group; needed for a checkpoint of GPT-NeoX only, which has no random states for this run.
        load_optim: also optimizer state, update count and loss scale (False for finetune and `no_load_optim`).
        load_rng: also random states (False for finetune and `no_load_rng`).
        checksums: compare the files with their checksums first (`find_damage`).
        growth: how the model is larger than the checkpoint; with `load_optim` False only.
        lora_base: where the frozen weights are now, if the checkpoint names others that have them.
        seed: of the run, which draws adapters that the checkpoint has not; with `load_optim` False only.
        published: `Opening.published`.

    Raises `UserError` on all ranks when the checkpoint does not fit or is damaged, before anything is changed.
    """
    if checksums and (problem := find_damage(checkpoint, state, load_optim=load_optim)):
        raise UserError(f"{checkpoint.path} is damaged: {problem}. {advise_others(checkpoint.path)}")
    params = engine.params()
    wanted = gather_over_stages({name: _spec(p).shape for name, p in params.items()}, state)
    with together(f"loading {checkpoint.path}", state):
        shapes = {name: shape for stage in wanted for name, shape in stage.items()}
        shares = {name: share for name in sorted(params, key=layout.parameter_order) if (share := engine.share(name))}
        new_head = growth is not None and growth.new_head
        opening = Opening(model, shapes[TIED_NAME][0], lora_base, new_head, published)
        reader = open_reader(checkpoint, opening, checksums=False)
        grown = None if growth is None else GrownReader(reader, growth, shapes)
        _check_files(checkpoint, shares if grown is None else grown.stored_names(shares), state)
        reader = grown or reader
        if not load_optim and any(name.endswith(PARTS) for name in shapes):
            reader = WithNewAdapters(reader, shapes, seed)  # type: ignore[assignment]
        _check_names(reader, shapes, begins=not (load_optim or load_rng))
        _check_heads(reader, heads)
        if load_optim:
            moments = _check_optimizer(reader, list(shares or params))
            if checkpoint.by_neox:
                _check_moments(reader, next(iter(params)), engine.moments())
        saved = reader.state()
        if grown is not None and state.rank == 0:
            logger.info(grown.describe())
    # Some ranks have more to read than others: these wait at the end of this, where they may wait long.
    with together(f"reading {checkpoint.path}", state):
        if load_optim and moments:
            engine.moments()  # on ranks without a share as well: all have the same state
        thawed = []
        for name, share in shares.items():
            state.doing.detail = name
            place = (name, _spec(params[name]), state.tp_rank, state.tp_size, share)
            values = reader.local_optimizer(*place) if load_optim else {WEIGHT: reader.local_weight(*place)}
            engine.write_share(name, values)
            if load_optim and moments and params[name].requires_grad and set(values) == {WEIGHT}:
                thawed.append(name)
            engine.beat()
    engine.finish_writing()
    if load_optim:
        _tell_thawed(thawed, state)
    if load_optim:
        engine.load_scalars(saved["scalars"])
    with together(f"restoring random states from {checkpoint.path}", state):
        if load_rng:
            _restore_rng(reader, checkpoint.by_neox, state)
    return saved["client"]


def _tell_thawed(names: list[str], state: ParallelState) -> None:
    """Say which parameters are trained from here on that were not before. Collective."""
    everybody = {name for some in gather(names, state) for name in some}
    if everybody and state.rank == 0:
        found = _some(sorted(everybody, key=layout.parameter_order))
        logger.info("thawed: %s had no optimizer state in the checkpoint and start with zeros", found)


def _check_files(checkpoint: Checkpoint, names: Iterable[str], state: ParallelState) -> None:
    """The files of these parameters are there with their sizes: rank 0 has seen all, but another node may not."""
    manifest = checkpoint.manifest
    if checkpoint.foreign:
        return
    files_tp = manifest.layout["tp"]
    ranks = [state.tp_rank] if files_tp == state.tp_size else range(files_tp)
    layers = sorted({layout.split_name(name)[0] for name in names if name in manifest.parameters})
    files = [layout.weights_file(layer, rank) for layer in layers for rank in ranks]
    files += [layout.optimizer_file(layer, rank) for layer in layers for rank in ranks] if manifest.optimizer else []
    for file in files:
        if problem := manifest.wrong_file(checkpoint.path, file, checksum=False):
            raise UserError(f"{checkpoint.path} is not a complete checkpoint: {problem}")


def _spec(parameter: Parameter) -> ParamSpec:
    return parameter.spec  # type: ignore[attr-defined]


def _check_names(reader: CheckpointReader, wanted: Mapping[str, tuple[int, ...]], *, begins: bool) -> None:
    """The checkpoint has every parameter of the model with its shape, and no other. `begins`: only weights are asked
    for, as of a run that begins at step 0."""
    stored = reader.manifest.parameters
    problems = []
    if missing := sorted(set(wanted) - set(stored), key=layout.parameter_order):
        problems.append(f"not in the checkpoint: {_some(missing)}")
    if unexpected := sorted(set(stored) - set(wanted), key=layout.parameter_order):
        problems.append(f"not in this model: {_some(unexpected)}")
    shapes = [
        f"{name} is {list(stored[name].shape)}, this model wants {list(shape)}"
        for name, shape in sorted(wanted.items(), key=lambda item: layout.parameter_order(item[0]))
        if name in stored and tuple(stored[name].shape) != tuple(shape)
    ]
    if shapes:
        problems.append(_some(shapes, "; "))
    if problems:
        # Only a vocabulary is padded.
        other = [name for name in wanted if name in stored and tuple(stored[name].shape) != tuple(wanted[name])]
        resizable = len(problems) == 1 and other and all(stored[name].padded is not None for name in other)
        keys = ["vocab: resize", "optimizer: reset", *(["step: restart", "data: restart"] if begins else [])]
        resize = (
            f"For a vocabulary of another size, {advise_new_run(reader.folder, keys, None)} (no `load`, no `finetune`)"
        )
        advice = resize if resizable else "Check the model's config keys"
        if missing and all(name.endswith(PARTS) for name in missing):
            advice = "To train new adapters (lora_r) beside its weights, start a new run: set finetune=true"
        elif unexpected and all(name.endswith(PARTS) for name in unexpected):
            advice = "It has adapters: set the keys lora_* as in its config, or merge them by converting it"
        elif len(missing) == 1 and missing[0].endswith(REWARD):
            advice = f"For {NEW_REWARD_MODEL}"
        raise UserError(f"{reader.folder} does not fit this model: {'; '.join(problems)}. {advice}.")


def _some(names: list[str], joint: str = ", ") -> str:
    shown = joint.join(names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_heads(reader: CheckpointReader, heads: Heads) -> None:
    if reader.heads != heads:
        raise UserError(
            f"{reader.folder} was trained with num_attention_heads {reader.heads.num_attention_heads} and num_kv_heads "
            f"{reader.heads.num_kv_heads}; this config has {heads.num_attention_heads} and {heads.num_kv_heads}"
        )


def _check_optimizer(reader: CheckpointReader, names: list[str]) -> bool:
    """The optimizer state of these parameters can be read; returns whether it has moments."""
    if not reader.manifest.optimizer:
        raise UserError(
            f"{reader.folder} was saved without optimizer state (no_save_optim), so the run cannot be resumed exactly; "
            "set no_load_optim: true (init_from.optimizer=reset) for a new optimizer"
        )
    moments = False
    for name in names:
        if WEIGHT not in (keys := reader.optimizer_keys(name)):
            raise UserError(f"{reader.folder}: the optimizer state of {name} lacks its master weight")
        moments = moments or len(keys) > 1
    return moments


def _check_moments(reader: CheckpointReader, name: str, wanted: set[str]) -> None:
    """GPT-NeoX's files do not say which optimizer wrote them, only what it kept."""
    if (stored := set(reader.optimizer_keys(name)) - {WEIGHT}) != wanted:
        raise UserError(
            f"{reader.folder} has the optimizer state {sorted(stored)}, the optimizer of this config (optimizer.type) "
            f"keeps {sorted(wanted)}. Set the type it was trained with. {FRESH_MOMENTS}"
        )


def _restore_rng(reader: CheckpointReader, by_neox: bool, state: ParallelState) -> None:
    manifest = reader.manifest
    if by_neox:
        reseed_after(manifest.step)
        return
    if not any(name.startswith("rng_rank_") for name in manifest.files):
        raise UserError(f"{reader.folder} was saved without random states (no_save_rng); set no_load_rng: true")
    if manifest.layout != {"tp": state.tp_size, "pp": state.pp_size, "dp": state.dp_size}:
        reseed_after(manifest.step)
        if state.rank == 0:
            logger.info("the layout changed since the checkpoint: random states (dropout) are seeded again")
        return
    restore_random_state(reader.load_file(layout.rng_file(state.rank)))
