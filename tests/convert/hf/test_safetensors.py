"""Our reader and writer of safetensors against the library."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.convert.hf.safetensors_writer import INDEX, Planned, shard_bytes, write_safetensors
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.convert.published.safetensors_reader import read_header, read_tensor
from megatron.errors import UserError

pytestmark = pytest.mark.cpu

TENSORS = {
    "matrix": torch.randn(37, 5),
    "wide": torch.randn(3, 4, dtype=torch.float64),
    "half": torch.randn(2049).bfloat16(),
    "odd": torch.randn(3).half(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "behind": torch.randn(5000, 3),
}


def test_every_tensor_of_the_library_s_files_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    header = read_header(path)
    assert header.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = read_tensor(path, header[name])
        assert (header[name].file, header[name].shape, header[name].dtype) == (path.name, tensor.shape, tensor.dtype)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def test_unaligned_bytes_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (-len(header) % 8 + 3)
    path.write_bytes(len(header).to_bytes(8, "little") + header + torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert read_tensor(path, read_header(path)["a"]).tolist() == [1.5, -2.0]


def test_a_tensor_takes_the_memory_of_its_own_pages_and_the_file_stays_as_it_is(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    before = path.read_bytes()
    found = read_tensor(path, read_header(path)["matrix"])
    assert found.untyped_storage().nbytes() == TENSORS["matrix"].nbytes
    found.zero_()
    assert path.read_bytes() == before


def test_tables_of_older_files_are_skipped_whatever_their_type(tmp_path):
    """Pythia's files have masks of bools next to the weights."""
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
    save_file({"gpt_neox.embed_in.weight": TENSORS["matrix"], **mask}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert list(HuggingFaceFolder(tmp_path).tensors) == ["gpt_neox.embed_in.weight"]
    with pytest.raises(UserError, match="BOOL"):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw[:-1], r"it has \d+ bytes, .*header .*\d+"),
        (lambda raw: raw + b"x", r"it has \d+ bytes, .*header .*\d+"),
        (lambda raw: raw[:20], "Unterminated string"),
        (lambda raw: b"", "Expecting value"),
        (lambda raw: b"\xff" * 8 + raw, "its header would have"),
        (lambda raw: raw.replace(b"[37,5]", b"[37,6]"), r"740 bytes for a tensor of \[37, 6\]"),
        (lambda raw: raw.replace(b'"F64"', b'"I64"'), "I64 tensors; quantised "),
        (lambda raw: raw.replace(b'"shape"', b'"shapo"'), "shape"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, spoil, message):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(UserError, match=f"{path}.*{message}"):
        read_header(path)


def test_the_library_reads_what_was_written_and_it_is_cut_where_asked(tmp_path):
    tensors = {f"layer {i}": torch.randn(40, 10) for i in range(5)}
    plan = [Planned(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(tmp_path, plan, tensors.values(), torch.float32, 3400)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [len(load_file(path)) for path in files] == [2, 2, 1]
    index = json.loads((tmp_path / INDEX).read_text())
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5gb", 15 * 10**8), ("9KB", 9000)]
)
def test_sizes_of_shards(text, size):
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5", "5G", "GB", "-1GB", "0GB", "1e3MB", "five GB"])
def test_no_sizes(text):
    with pytest.raises(UserError, match="--max-shard-size.*500MB or 5GB"):
        shard_bytes(text)
