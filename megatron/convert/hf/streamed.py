"""The outputs of transformers' own model, run on little memory.

The model is built without memory for its parameters. Each decoder layer, and each other module with parameters
(embedding, norm, head), is filled from the files just before it runs and emptied after it. The values come through
transformers' own loading code, so renamed and fused tensors (experts) are what `from_pretrained` makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.convert.outputs import EMBEDDING, LOGITS, NORM, block, keep_ends, random_tokens
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.errors import UserError


def folder_tokens(folder: HuggingFaceFolder) -> Tensor:
    """Random tokens [2, s] for a folder, from its config.json."""
    config = _config_of(folder)
    longest = getattr(config, "max_position_embeddings", None) or 2**31
    return random_tokens(config.vocab_size, longest, [getattr(config, "sliding_window", None)])


def _config_of(folder: HuggingFaceFolder) -> Any:
    """transformers' config of a folder. Raises `UserError` when a field is of a type that it does not take."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        lines = " ".join(str(error).split())
        kind = folder.config.get("model_type")
        if kind not in CONFIG_MAPPING and "auto_map" in folder.config:  # its text advises to trust the folder
            lines = f"model_type {kind!r} is not known to it, and the code that came with the folder is not run"
        raise UserError(f"{folder.path / 'config.json'}: transformers does not take it: {lines}") from error
    config._attn_implementation = None  # the one for this machine, not for that of whoever saved the file
    return config


def _build(folder: HuggingFaceFolder, config: Any) -> Any:
    """transformers' own model of a config. Raises `UserError` when it has none."""
    try:
        return (
            auto_class(folder.is_reward_model).from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
        )
    except ValueError as error:
        what, kind = "reward" if folder.is_reward_model else "causal language", folder.config.get("model_type")
        raise UserError(f"{folder.path}: transformers has no {what} model of model_type {kind!r}") from error


def auto_class(rewards: bool) -> Any:
    """The class of transformers that opens causal language models, or that of reward models."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if rewards else AutoModelForCausalLM


@torch.no_grad()
def folder_outputs(
    folder: HuggingFaceFolder, tokens: Tensor, dtype: torch.dtype | None = None
) -> list[tuple[str, Tensor]]:
    """Outputs [b, p, h] of transformers' model in fp32 after the embedding, each block and the final norm, then the
    logits [b, p, v].

    `dtype`: weights are rounded to it first. Raises `UserError` when weights are missing, left over or misshapen.
    """
    streamed = StreamedModel(folder, dtype)
    found: list[tuple[str, Tensor]] = []
    for index, layer in enumerate(streamed.layers):
        if index == 0:
            layer.register_forward_pre_hook(_note_input(found, EMBEDDING), with_kwargs=True)
        layer.register_forward_hook(_note_output(found, block(index)))
    streamed.head.register_forward_pre_hook(_note_input(found, NORM, cut=True), with_kwargs=True)
    with _quiet():
        if folder.is_reward_model:  # its own forward would keep one token of each text
            logits = streamed.head(streamed.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
        else:
            logits = streamed.model(input_ids=tokens, use_cache=False).logits
    return [*found, (LOGITS, logits.float())]


def _note_input(found: list[tuple[str, Tensor]], name: str, cut: bool = False) -> Callable[..., Any]:
    """A hook that keeps a module's input; `cut`: the module gets only the positions that are kept."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        short = keep_ends(given)
        found.append((name, short.clone()))
        return ((short, *args[1:]), kwargs) if cut else None

    return hook


def _note_output(found: list[tuple[str, Tensor]], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.append((name, keep_ends(output[0] if isinstance(output, tuple) else output).clone()))

    return hook


class StreamedModel:
    """transformers' model of a folder whose parameters are in memory only while they are used.

    * `model`: call it as usual, without gradients; `layers`: its decoder layers; `head`: its output matrix.

    Raises `UserError` when the folder lacks tensors of the model, has more, or, once it runs, has other shapes.
    """

    def __init__(self, folder: HuggingFaceFolder, dtype: torch.dtype | None) -> None:
        self._folder, self._dtype = folder, dtype
        with _quiet(), _parameters_on_meta():
            config = _config_of(folder)
            if hasattr(config, "rescale_every"):  # RWKV: it would scale weights that are not loaded, for fp16
                config.rescale_every = 0
            self.model = _build(folder, config)
        self.head: nn.Module = self.model.score if folder.is_reward_model else self.model.get_output_embeddings()
        self._empty = dict(self.model.named_parameters(remove_duplicate=False))
        self._tied = _tied_names(self._empty)
        self.layers, units = _units(self.model, config.num_hidden_layers)
        self._names = _Names(self.model)
        self._sources = self._assign(units)
        for name, module in units.items():
            module.register_forward_pre_hook(lambda *_, name=name: self._fill(name))
            module.register_forward_hook(lambda *_, name=name: self._clear(name))

    def _assign(self, units: Mapping[str, nn.Module]) -> dict[str, list[str]]:
        """The folder's tensors that each unit needs. Raises `UserError` when there are too few or too many."""
        targets = {key: self._names.targets(key) for key in self._folder.tensors}
        known = set(self.model.state_dict())
        there = {target for found in targets.values() for target in found}
        self._from = {name: first for name, first in self._tied.items() if name not in there}
        missing = {name for name in known - there if self._from.get(name) not in there}
        self._refuse("missing keys", self._names.without_ignored(missing, "missing"))
        self._refuse("unexpected keys", self._names.without_ignored(there - known, "unexpected"))
        sources: dict[str, list[str]] = {}
        for unit in units:
            wanted = {self._from.get(name, name) for name in self._in(unit)}
            buffers = {name for name in known - self._empty.keys() if name.startswith(f"{unit}.")}
            sources[unit] = [key for key, found in targets.items() if not (wanted | buffers).isdisjoint(found)]
        return sources

    def _in(self, unit: str) -> list[str]:
        return [name for name in self._empty if name.startswith(f"{unit}.")]

    def _refuse(self, what: str, names: set[str]) -> None:
        if names:
            raise UserError(f"transformers reports {what} in {self._folder.path}: {', '.join(sorted(names)[:8])}")

    def _fill(self, unit: str) -> None:
        tensors = {key: _Lazy(self._folder, key, self._dtype) for key in self._sources[unit]}
        mismatched, errors = self._names.load(tensors)
        self._refuse("mismatched keys", mismatched)
        self._refuse("conversion errors", errors)
        for name in self._in(unit):
            if name in self._from:
                _set(self.model, name, self.model.get_parameter(self._from[name]))

    def _clear(self, unit: str) -> None:
        for name in self._in(unit):
            for each in {name, self._from.get(name, name)}:
                _set(self.model, each, self._empty[each])


class _Lazy:
    """A tensor of the folder that is read when transformers' loader takes its content."""

    def __init__(self, folder: HuggingFaceFolder, name: str, dtype: torch.dtype | None) -> None:
        self._folder, self._name, self._dtype = folder, name, dtype

    def __getitem__(self, _: Any) -> Tensor:
        tensor = self._folder.tensor(self._name)
        return tensor if self._dtype is None else tensor.to(self._dtype)


class _Names:
    """transformers' loader, for a part of the tensors at a time: which of a model's tensors become which, and how."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._model = model
        self._mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in self._mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in self._mapping if isinstance(each, WeightConverter)]
        self._known = model.state_dict()

    def targets(self, key: str) -> set[str]:
        """Names in the model that a tensor of the files goes into, itself when there is none."""
        from transformers.core_model_loading import rename_source_key

        where = {"base_model_prefix": self._model.base_model_prefix, "meta_state_dict": self._known}
        name, pattern = rename_source_key(key, self._renamings, self._converters, **where)
        if name not in self._known and key in self._known:
            name, pattern = rename_source_key(key, [], [], **where)
        for converter in self._converters:
            if pattern in converter.source_patterns:
                first = converter.target_patterns[0]
                return {name.replace(first, target) for target in converter.target_patterns}
        return {name}

    def without_ignored(self, names: set[str], what: str) -> set[str]:
        """Without the names that the architecture allows to be missing, or unexpected."""
        keys = {"missing_keys": set(), "unexpected_keys": set(), f"{what}_keys": names}
        report = SimpleNamespace(**keys)
        self._model._adjust_missing_and_unexpected_keys(report)
        return getattr(report, f"{what}_keys")

    def load(self, tensors: Mapping[str, _Lazy]) -> tuple[set[str], set[str]]:
        """Put tensors into the model, in fp32. Returns names with other shapes, and names that cannot be converted."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        # Anything on "disk" makes the loader read one tensor after the other instead of all at once in threads.
        where = {"": "cpu", "nothing": "disk"}
        how = LoadStateDictConfig(device_map=where, dtype=torch.float32, weight_mapping=self._mapping)
        info, _ = convert_and_load_state_dict_in_model(self._model, dict(tensors), how)
        mismatched = {
            f"{name} (here {list(found)}, wanted {list(wanted)})" for name, found, wanted in info.mismatched_keys
        }
        return mismatched, set(info.conversion_errors)


def _units(model: nn.Module, num_layers: int) -> tuple[list[nn.Module], dict[str, nn.Module]]:
    """(decoder layers, modules that are filled as a whole by name): the layers, and all else with own parameters."""
    path, layers = next(
        (name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    )
    units = {f"{path}.{index}": layer for index, layer in enumerate(layers)}
    for name, module in model.named_modules():
        if not name.startswith(f"{path}.") and any(True for _ in module.parameters(recurse=False)):
            units[name] = module
    return layers, units


def _tied_names(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """{name: another name of the same parameter} of all that have two names."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        by_identity.setdefault(id(parameter), []).append(name)
    pairs = [names for names in by_identity.values() if len(names) > 1]
    return {name: next(other for other in names if other != name) for names in pairs for name in names}


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = parameter


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile have parameters without memory; their buffers are computed as always."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
