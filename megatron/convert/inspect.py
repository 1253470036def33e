"""What a checkpoint holds, and how two differ, as lines for people. One parameter is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.checkpoint.manifest import ParameterEntry
from megatron.checkpoint.reader import CheckpointReader


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
    for name in reader.names():
        entry = reader.entry(name)
        norm = torch.linalg.vector_norm(reader.weight(name).float())
        yield f"{name:48} {list(entry.shape)!s:16} {entry.dtype:9} {_division(entry):28} norm {norm:.6g}"


def _division(entry: ParameterEntry) -> str:
    if entry.split_dim is None:
        return "replicated"
    parts = f" in parts {'+'.join(map(str, entry.blocks))}" if entry.blocks else ""
    padded = f" padded to {entry.padded}" if entry.padded is not None else ""
    return f"split dim {entry.split_dim}{parts}{padded}"


def difference(one: CheckpointReader, other: CheckpointReader) -> Iterator[str]:
    """Parameters that only one has or that differ, with the largest and the relative difference."""
    yield f"a: {one.folder}, step {one.manifest.step}"
    yield f"b: {other.folder}, step {other.manifest.step}"
    names = one.names()
    for name in sorted(set(names) ^ set(other.names())):
        yield f"{name:48} only in {'a' if name in names else 'b'}"
    equal = 0
    for name in names:
        if name not in other.manifest.parameters:
            continue
        a, b = one.weight(name).float(), other.weight(name).float()
        if a.shape != b.shape:
            yield f"{name:48} shape {list(a.shape)} in a, {list(b.shape)} in b"
        elif torch.equal(a, b):
            equal += 1
        else:
            relative = torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a).clamp(min=1e-30)
            yield f"{name:48} largest difference {(a - b).abs().max():.3g}, relative {relative:.3g}"
    yield f"{equal} parameters are equal"
