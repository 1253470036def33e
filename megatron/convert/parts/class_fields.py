"""Which fields of a config.json transformers' own class of that model reads: its source is asked, no list grows stale.

A field is read when the config class handles it, or when code that its causal language model can reach says
`config.field` or `getattr(config, "field")`. Heads for other tasks in the same file do not count, nor does code that
all models share, apart from masks and rotary positions.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from types import ModuleType
from typing import Any

_SHARED = ("transformers.masking_utils", "transformers.modeling_rope_utils")
# Read by the classes, without a change of what a model computes for a text.
_NO_EFFECT = {
    "pad_token_id",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "dtype",
    "torch_dtype",
}
# Handled by transformers for every class, before the class sees it.
_BY_LOADER = {"quantization_config", "per_layer_config"}


@dataclass(frozen=True)
class ClassFields:
    """What transformers knows of one `model_type`.

    Attributes:
        name: its class of a causal language model.
        read: the fields that change what it computes.
        declared: the fields that its config class, or that of all models, has or mentions.
        defaults: the values of a config that sets nothing.
    """

    name: str
    read: frozenset[str]
    declared: frozenset[str]
    defaults: dict[str, Any]

    def honours(self, name: str, value: Any) -> bool:
        """Whether the class would compute something else without this field."""
        return name in self.read and not (name in self.defaults and self.defaults[name] == value)


@functools.cache
def fields_of(model_type: str) -> ClassFields | None:
    """What the class of a `model_type` reads; None when transformers has no causal language model of it."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

    try:
        config = CONFIG_MAPPING[model_type]
        model = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    except KeyError:
        return None
    model = model[0] if isinstance(model, (list, tuple)) else model
    own = config.__mro__[: config.__mro__.index(PreTrainedConfig)]
    handled = set(config.attribute_map) | {name for each in own for name in _handled(each)}
    return ClassFields(
        name=model.__name__,
        read=frozenset((handled | _read_by(model) | _BY_LOADER) - _NO_EFFECT),
        declared=frozenset({*inspect.signature(config).parameters, *_handled(PreTrainedConfig)}),
        defaults=vars(config()),
    )


def _handled(config: type) -> Iterator[str]:
    """What a config class does more with than declare it: `self.field`, and names in texts (`kwargs.pop("field")`)."""
    body = _definitions(inspect.getmodule(config))[config.__name__]
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def _read_by(model: type) -> set[str]:
    """The fields that a model's class, and what it uses of its own package and of `_SHARED`, takes from a config."""
    package = model.__module__.rpartition(".")[0]
    todo, seen, found = [(model.__module__, model.__name__)], set[tuple[str, str]](), set[str]()
    while todo:
        if (place := todo.pop()) in seen:
            continue
        seen.add(place)
        module = importlib.import_module(place[0])
        body = _definitions(module).get(place[1])
        if body is None:
            todo += [_imports(module)[place[1]]] if place[1] in _imports(module) else []
            continue
        for node in ast.walk(body):
            if isinstance(node, ast.Name):
                there = _imports(module).get(node.id, (place[0], node.id))
                if there[0] in (place[0], *_SHARED) or (package and there[0].startswith(f"{package}.")):
                    todo.append(there)
            elif isinstance(node, ast.Attribute) and "config" in _last_name(node.value):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and _last_name(node.func) in ("getattr", "hasattr"):
                found.update(part.value for part in node.args[1:2] if isinstance(part, ast.Constant))
    return found


def _last_name(node: ast.expr) -> str:
    """`config` of `self.config` and of `config`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@functools.cache
def _definitions(module: ModuleType) -> dict[str, ast.AST]:
    """Classes, functions and values at the top of a module, by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    return found


@functools.cache
def _imports(module: ModuleType) -> dict[str, tuple[str, str]]:
    """name → (module, name there) of what a module imports from another."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom):
            there = resolve_name("." * node.level + (node.module or ""), module.__package__)
            found.update({alias.asname or alias.name: (there, alias.name) for alias in node.names})
    return found
