"""Rows of the library's own entries, read from their source without importing it (and torch).

Each kind has a folder; each entry in it is registered with literal keywords, its row:

    @NORMS.register("rmsnorm", vectors=1)
    class RMSNorm(Norm): ...

The schema takes its choices from these rows, the planner sizes, the rules defaults, the documentation the first
paragraph of the docstring (or the keyword `doc`). A file put into the folder is all that a new entry needs.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron.errors import UserError, nearest
from megatron.registry import ADDITIONS

FOLDERS: dict[str, str] = {
    "norm": "layers/norms",
    "activation": "layers/activations",
    "pos_emb": "layers/positions",
    "init_method": "layers/init",
    "optimizer.type": "optim/optimizers",
    "lr_decay_style": "optim/schedules",
    "train_impl": "objectives",
    "callbacks": "callbacks",
    "pack_impl": "data/packing",
    "reward": "inference/rewards",
}
"""Kind (the YAML key, as the registry has it) -> folder of its entries, in this package."""


@dataclass(frozen=True)
class Row:
    """One name of one registration: its keywords, what it is in words, and where it is written (`file:line`)."""

    values: Mapping[str, Any]
    doc: str
    place: str


@cache
def rows(kind: str) -> dict[str, Row]:
    """The library's entries of a kind by name, in the order of files and lines.

    Raises `UserError` naming file and line for a registration that is not literal, or a name that is taken.
    """
    found: dict[str, Row] = {}
    for path in sorted((Path(__file__).parent / FOLDERS[kind]).glob("*.py")):
        for name, row in read_rows(str(path), path.read_text(encoding="utf-8")):
            if name in found:
                raise UserError(f"{row.place}: {kind}: {name!r} is registered at {found[name].place} too")
            found[name] = row
    return found


def row(kind: str, name: str) -> Mapping[str, Any]:
    """The keywords with which `name` was registered, by the library or by a plugin."""
    for addition in ADDITIONS:
        if addition.registry.kind == kind and addition.name == name:
            return addition.registry.row(name)
    ours = rows(kind)
    if name not in ours:
        raise UserError(f"{kind}: {name!r} is not known.{nearest(name, list(ours))} Choices: {', '.join(ours)}")
    return ours[name].values


def read_rows(path: str, source: str) -> Iterator[tuple[str, Row]]:
    """(name, row) for each name in each `REGISTRY.register("name", ..., keyword=literal)` of a file."""
    tree = ast.parse(source, path)
    docs = {
        id(decorator): ast.get_docstring(node) or ""
        for node in ast.walk(tree)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        for decorator in node.decorator_list
    }
    for call in sorted(filter(_registers, ast.walk(tree)), key=lambda call: call.lineno):
        place = f"{path}:{call.lineno}"
        try:
            names = [ast.literal_eval(argument) for argument in call.args]
            values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        except ValueError as error:
            raise UserError(
                f"{place}: {ast.unparse(call)}: names and keywords must be literals, because they are read "
                "without running the file"
            ) from error
        doc = inspect.cleandoc(values.get("doc") or docs.get(id(call), "")).partition("\n\n")[0]
        for name in names:
            yield name, Row(values, " ".join(doc.split()), place)


def _registers(node: ast.AST) -> bool:
    """Whether this is a call of the method `register` of a constant (`NORMS.register(...)`)."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register"):
        return False
    return isinstance(node.func.value, ast.Name) and node.func.value.id.isupper()
