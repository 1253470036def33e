"""What a model's folder holds, and how two differ, as lines of text. One parameter is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpoint.manifest import ParameterEntry
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.convert.published.reader import HuggingFaceReader
from megatron.log import progress


def describe(reader: CheckpointReader) -> Iterator[str]:
    """The manifest's facts, then name, shape, type, division over ranks and L2 norm of every parameter."""
    manifest = reader.manifest
    layout = ", ".join(f"{axis} {size}" for axis, size in manifest.layout.items())
    yield f"{reader.folder}: step {manifest.step}, {manifest.consumed} samples, saved at {layout}, {manifest.created}"
    yield f"git {manifest.git or 'unknown'}; " + ", ".join(f"{k} {v}" for k, v in manifest.versions.items())
    total = sum(torch.Size(entry.shape).numel() for entry in manifest.parameters.values())
    size = sum(file.bytes for file in manifest.files.values())
    optimizer = "with" if manifest.optimizer else "without"
    yield f"{total:,} parameters, {size:,} bytes in {len(manifest.files)} files, {optimizer} optimizer state"
    for name in progress(reader.names(), what="reading", unit="parameters"):
        entry = reader.entry(name)
        yield _line(name, entry.shape, entry.dtype, _division(entry), reader.weight(name))


def describe_folder(folder: HuggingFaceFolder) -> Iterator[str]:
    """The same of a Hugging Face folder, by its own names; its architecture need not be known here."""
    files = sorted({stored.file for stored in folder.tensors.values()})
    total = sum(torch.Size(stored.shape).numel() for stored in folder.tensors.values())
    size = sum((folder.path / name).stat().st_size for name in files)
    what = ", ".join(folder.config.get("architectures") or [str(folder.config.get("model_type"))])
    yield f"{folder.path}: {what}, of Hugging Face"
    yield f"{total:,} parameters, {size:,} bytes in {len(files)} files"
    for name in progress(sorted(folder.tensors), what="reading", unit="tensors"):
        stored = folder.tensors[name]
        kind = str(stored.dtype).removeprefix("torch.")
        yield _line(name, stored.shape, kind, stored.file, folder.tensor(name))


def _line(name: str, shape: tuple[int, ...], dtype: str, where: str, tensor: Tensor) -> str:
    norm = torch.linalg.vector_norm(tensor.float())
    return f"{name:48} {list(shape)!s:16} {dtype:9} {where:28} norm {norm:.6g}"


def _division(entry: ParameterEntry) -> str:
    if entry.split_dim is None:
        return "replicated"
    parts = f" in parts {'+'.join(map(str, entry.blocks))}" if entry.blocks else ""
    padded = f" padded to {entry.padded}" if entry.padded is not None else ""
    return f"split dim {entry.split_dim}{parts}{padded}"


@dataclass(frozen=True)
class Node:
    """A module of the tree: its own name, and what is below it. A leaf is a parameter, with `kind` its type."""

    name: str
    parameters: int
    kind: str
    inside: tuple[Node, ...]


def tree(shapes: dict[str, tuple[tuple[int, ...], str]]) -> Iterator[str]:
    """An indented tree of modules and parameters with sizes, from {name: (shape, type)}; equal layers once."""
    root = _node("", {tuple(name.split(".")): value for name, value in shapes.items()})
    yield from _branches(root.inside, 0)


def _node(name: str, below: dict[tuple[str, ...], tuple[tuple[int, ...], str]]) -> Node:
    if () in below:
        shape, dtype = below[()]
        return Node(name, torch.Size(shape).numel(), f"{list(shape)} {dtype}", ())
    groups: dict[str, dict[tuple[str, ...], tuple[tuple[int, ...], str]]] = {}
    for path, value in below.items():
        groups.setdefault(path[0], {})[path[1:]] = value
    inside = tuple(_node(first, group) for first, group in groups.items())
    return Node(name, sum(node.parameters for node in inside), "", inside)


def _branches(nodes: tuple[Node, ...], depth: int) -> Iterator[str]:
    """Lines of a level; a run of numbered nodes with equal content becomes one."""
    start = 0
    while start < len(nodes):
        end = start + 1
        while end < len(nodes) and nodes[start].name.isdigit() and _are_alike(nodes[start], nodes[end]):
            end += 1
        node = nodes[start]
        several = f"{node.name}..{nodes[end - 1].name}: {end - start} alike, each" if end - start > 1 else node.name
        line = f"{'  ' * depth}{several}"
        yield f"{line:56} {node.kind:28} {node.parameters:>16,}"
        yield from _branches(node.inside, depth + 1)
        start = end


def _are_alike(one: Node, other: Node) -> bool:
    return other.name.isdigit() and (one.parameters, one.kind, one.inside) == (
        other.parameters,
        other.kind,
        other.inside,
    )


def difference(one: CheckpointReader, other: CheckpointReader, only_differing: bool = True) -> Iterator[str]:
    """Parameters that only one has or that differ, with the largest absolute and the relative (L2) difference.

    `only_differing`: leave equal parameters out. The last line counts both kinds.
    """
    yield f"a: {_title(one)}"
    yield f"b: {_title(other)}"
    names, others = one.names(), other.names()
    alone = sorted(set(names) ^ set(others))
    for name in alone:
        yield f"{name:48} only in {'a' if name in names else 'b'}"
    both = [name for name in names if name in set(others)]
    differing = 0
    for name in progress(both, what="comparing", unit="parameters"):
        if (line := _compare_parameter(name, one, other)) is not None:
            differing += 1
            yield line
        elif not only_differing:
            yield f"{name:48} equal"
    if alone or differing:
        yield f"{len(both) - differing} parameters are equal, {differing} differ, {len(alone)} are in one alone"
    else:
        yield f"{len(both)} parameters are equal"


def _title(reader: CheckpointReader) -> str:
    if isinstance(reader, HuggingFaceReader):
        return f"{reader.folder}, of Hugging Face ({reader.family})"
    return f"{reader.folder}, step {reader.manifest.step}"


def _compare_parameter(name: str, one: CheckpointReader, other: CheckpointReader) -> str | None:
    """How a parameter differs; None when it does not. A type that differs is shown only when values do."""
    shapes = [reader.entry(name).shape for reader in (one, other)]
    if shapes[0] != shapes[1]:
        return f"{name:48} shape {list(shapes[0])} in a, {list(shapes[1])} in b"
    a, b = one.weight(name).float(), other.weight(name).float()
    if torch.equal(a, b):
        return None
    relative = torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a).clamp(min=1e-30)
    kinds = [reader.entry(name).dtype for reader in (one, other)]
    types = f", {kinds[0]} in a, {kinds[1]} in b" if kinds[0] != kinds[1] else ""
    return f"{name:48} largest difference {(a - b).abs().max():.3g}, relative {relative:.3g}{types}"
