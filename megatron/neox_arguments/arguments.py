"""`NeoXArgs`: the whole configuration as frozen, typed groups, each value knowing where it came from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from megatron.errors import UserError, nearest
from megatron.neox_arguments import plugin_key
from megatron.neox_arguments.coerce import WrongValue, coerce, thaw
from megatron.neox_arguments.derive import derive
from megatron.neox_arguments.describe import describe
from megatron.neox_arguments.draft import SET_BY_PROGRAM, Facts
from megatron.neox_arguments.groups import GROUPS, all_keys, describe_unknown
from megatron.neox_arguments.keys import Entry, KeyInfo, group_keys
from megatron.neox_arguments.merge import merge, merge_values
from megatron.neox_arguments.optimizer_params import KIND, PARAMS, explain_param
from megatron.neox_arguments.overrides import Overrides
from megatron.neox_arguments.problems import Problems, collector
from megatron.neox_arguments.retired import RETIRED
from megatron.neox_arguments.schema_data import DataConfig, TokenizerConfig
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.neox_arguments.schema_post import PostConfig
from megatron.neox_arguments.schema_system import DeepSpeedConfig, LauncherConfig, LoggingConfig, ParallelConfig
from megatron.neox_arguments.schema_train import (
    CheckpointConfig,
    GenerationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)
from megatron.neox_arguments.yaml_files import normalise


@dataclass(frozen=True)
class NeoXArgs:
    """One resolved configuration: `from_files` reads, `derive` completes, `from_ymls` does both. Never changed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    post: PostConfig = field(default_factory=PostConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Logged once at the start: what was translated, raised, ignored."""

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], sources: Mapping[str, str] | None = None, notes: tuple[str, ...] = ()
    ) -> NeoXArgs:
        """Groups from flat, already typed values; keys that are absent take their defaults."""
        groups = {}
        for group, group_class in GROUPS.items():
            names = group_keys(group_class, group)
            groups[group] = group_class(**{name: values[name] for name in names if name in values})
        return cls(**groups, sources=dict(sources or {}), notes=notes)

    @classmethod
    def from_files(
        cls,
        paths: Sequence[str],
        overrides: Overrides = (),
        conf_dir: str | None = None,
        *,
        stored: bool = False,
        problems: Problems | None = None,
    ) -> NeoXArgs:
        """Config files, merged left to right, and overrides; the result still has to go through `derive`.

        `stored`: the files came with a checkpoint and nobody else named them: no code is imported and no other file
        read because they say so. Raises one `UserError` for everything that is wrong with files, keys or types of
        values; with `problems` it is added to those, which `derive` must be given too.
        """
        return cls.from_values(*merge(paths, overrides, conf_dir, stored=stored, problems=problems))

    @classmethod
    def from_ymls(
        cls, paths: Sequence[str], overwrite_values: Overrides = (), *, facts: Facts | None = None
    ) -> NeoXArgs:
        """Config files, merged left to right, and values over them; derived and checked.

        `overwrite_values`: `{"train_iters": 100, "optimizer.params.lr": 1e-3}`, or texts as on a command line. What is
        computed assumes the ranks that the config names (`global_num_gpus`, `num_gpus`), else those that one copy of
        the model needs; `facts` says more. Raises one `UserError` for all that is wrong, by file and line, or key.
        """
        with collector() as found:
            return derive(cls.from_files(paths, overwrite_values, problems=found), facts, found)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, facts: Facts | None = None) -> NeoXArgs:
        """The same from a dictionary of what a config file would hold."""
        with collector() as found:
            return derive(cls.from_values(*merge_values(values, found)), facts, found)

    @classmethod
    def from_saved(cls, values: Mapping[str, Any], source: str = "resolved config") -> NeoXArgs:
        """The inverse of `to_dict`. Raises `UserError` for an unknown key or a wrong type.

        Values at their defaults count as not set, and computed values as computed, so that `derive` can run again.
        Plugins that it names must have been imported: a stored config is data, and no reason to run code.
        """
        if (named := values.get(plugin_key.KEY)) is not None:
            values = {**values, plugin_key.KEY: plugin_key.take_loaded(Entry(named, source)).value}
        typed, sources = {}, {}
        for name, value in values.items():
            info = _info(name, f"{source}: ")
            try:
                typed[name] = coerce(value, info)
            except WrongValue as error:
                raise UserError(f"{source}: {name}: {error}") from error
            if typed[name] != info.default:
                sources[name] = f"derived: {source}" if info.derived else source
        return cls.from_values(typed, sources)

    def to_resolved(self) -> str:
        """Everything as JSON text, sources and notes included: how the launcher passes the config to rank 0."""
        return json.dumps({"values": self.to_dict(), "sources": dict(self.sources), "notes": list(self.notes)})

    @classmethod
    def from_resolved(cls, text: str) -> NeoXArgs:
        """The inverse of `to_resolved`. Raises `UserError` for a text that `to_resolved` did not write."""
        try:
            stored = json.loads(text)
            plugin_key.import_plugins(stored["values"].get(plugin_key.KEY), lambda name: "resolved config")
            args = cls.from_saved(stored["values"])
            plugin_key.check_sources(args.launcher.plugins, args.launcher.plugin_sources)
            return dataclasses.replace(args, sources=dict(stored["sources"]), notes=tuple(stored["notes"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"this is not a resolved config as deepy.py writes it ({error})") from error

    def get(self, name: str) -> Any:
        """The value of a flat key, also inside a mapping: `get("optimizer.params.lr")`. Raises `UserError`."""
        first, *inner = name.split(".")
        info = _info(first)
        value = getattr(getattr(self, info.group), first)
        for part in inner:
            if not isinstance(value, dict) or part not in value:
                raise UserError(f"{name} is not set")
            value = value[part]
        return value

    if not TYPE_CHECKING:  # the library reads groups, and a misspelt group stays an error of types

        def __getattr__(self, name: str) -> Any:
            """`args.hidden_size`: a value without its group, also by an alias, for tools written against GPT-NeoX."""
            info = all_keys().get(normalise(name))
            if info is None or name in GROUPS:
                raise AttributeError(f"NeoXArgs has no {name!r}.{nearest(name, list(all_keys()))}")
            return getattr(getattr(self, info.group), info.name)

    def source(self, name: str) -> str:
        """Where the value of a key came from: `file:line`, `command line`, `derived: ...` or `default`."""
        return self.sources.get(name) or self.sources.get(name.split(".")[0]) or "default"

    def is_set(self, name: str) -> bool:
        """True when the key was given by the user (not left at its default, not only derived)."""
        return name in self.sources and not self.sources[name].startswith("derived")

    def to_dict(self) -> dict[str, Any]:
        """Every key with its resolved value, as plain YAML/JSON data."""
        return {name: thaw(getattr(getattr(self, info.group), name)) for name, info in all_keys().items()}

    def hash(self) -> str:
        """A fingerprint of all values (hexadecimal SHA-256), equal on every rank of a healthy job."""
        text = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def replace(self, source: str = SET_BY_PROGRAM, **changes: Any) -> NeoXArgs:
        """A copy with some flat keys changed: `args.replace(load="ckpt", no_load_optim=True)`."""
        values = self.values() | changes
        for name in changes:
            _info(name)
        return NeoXArgs.from_values(values, {**self.sources, **dict.fromkeys(changes, source)}, self.notes)

    def values(self) -> dict[str, Any]:
        """Every key with its typed value."""
        return {name: getattr(getattr(self, info.group), name) for name, info in all_keys().items()}

    def explain(self, name: str) -> str:
        """What `--explain KEY` prints: value, source, default, meaning, and what differs from GPT-NeoX."""
        name = name.replace("-", "_")
        retired = RETIRED.get(name)
        if retired is not None:
            return f"{name}: has no effect; {retired.instead}"
        if name == KIND:
            name = "optimizer_type"
        if name.startswith(PARAMS):
            return explain_param(self, name)
        info = _info(name.split(".")[0])
        lines = [
            f"{name} = {json.dumps(thaw(self.get(name)), ensure_ascii=False)}",
            f"  source:  {self.source(name)}",
            f"  default: {json.dumps(thaw(info.default), ensure_ascii=False)}",
            f"  meaning: {info.doc}",
        ]
        if info.choices:
            lines.append(f"  choices: {', '.join(str(choice) for choice in info.choices)}")
        if isinstance(info.unavailable, str):
            lines.append(f"  not available: {info.unavailable}")
        elif info.unavailable:
            lines += [f"  not available: {value}: {advice}" for value, advice in info.unavailable.items()]
        if info.differs:
            lines.append(f"  differs from GPT-NeoX: {info.differs}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """In a notebook: a table of what was set, and where."""
        rows = ((name, json.dumps(thaw(self.get(name))), self.source(name)) for name in all_keys() if self.is_set(name))
        cells = ("".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<table><thead><tr><th>key</th><th>value</th><th>set in</th></tr></thead><tbody>{body}</tbody></table>"

    def describe(self, vocab_size: int | None = None) -> list[str]:
        """Lines of arithmetic about a derived config: ranks, batch, length, schedule and, with a vocabulary, size."""
        return describe(self, vocab_size)


def _info(name: str, where: str = "") -> KeyInfo:
    keys = all_keys()
    if name not in keys:
        raise UserError(f"{where}{describe_unknown(name)[0]}")
    return keys[name]
