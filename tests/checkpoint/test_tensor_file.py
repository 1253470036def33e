"""Files written tensor by tensor are ordinary torch files, with their checksum, and hold one tensor at a time."""

import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint import stored_zip
from megatron.checkpoint.stored_zip import CheckedFile, StoredZip
from megatron.checkpoint.tensor_file import TensorFileWriter
from megatron.checksums import file_crc32, shift_crc

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_what_was_written(tmp_path, mmap):
    tensors = {
        "matrix": torch.randn(37, 5),
        "transposed": torch.randn(3, 4).t(),
        "half": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "ids": torch.arange(5),
        "flags": torch.tensor([True, False]),
    }
    path = tmp_path / "layer_00-model_00-model_states.pt"
    with TensorFileWriter(path) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.add("nested", torch.ones(2), "exp_avg")
        writer.add("nested", torch.zeros(2), "weight")
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert list(loaded) == [*tensors, "nested"]
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
        assert loaded[name].data_ptr() % 64 == 0 or loaded[name].numel() == 0
    assert torch.equal(loaded["nested"]["exp_avg"], torch.ones(2))


def test_size_and_checksum_are_those_of_the_file(tmp_path):
    path = tmp_path / "x.pt"
    with TensorFileWriter(path) as writer:
        writer.add("a", torch.randn(1000))
    assert writer.bytes == path.stat().st_size
    assert writer.crc32 == file_crc32(path)
    assert zipfile.ZipFile(path).testzip() is None


def test_a_failing_write_shows_and_closes(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), TensorFileWriter(tmp_path / "x.pt") as writer:
        writer.add("a", torch.randn(4))
        monkeypatch.setattr(CheckedFile, "write", full)
        writer.add("b", torch.randn(4))
    assert writer._file.closed


def test_on_a_full_disk_the_first_error_is_the_one_that_shows():
    """What is buffered fails once more when the file is closed; that must not hide why the file is given up."""
    with pytest.raises(ValueError, match="another rank failed"), TensorFileWriter(Path("/dev/full")) as writer:
        writer.add("a", torch.randn(4))
        raise ValueError("another rank failed")
    assert writer._file.closed
    with pytest.raises(OSError, match="No space left"), TensorFileWriter(Path("/dev/full")) as writer:
        writer.add("a", torch.randn(4))
    assert writer._file.closed


@given(st.binary(max_size=300), st.integers(0, 10**4))
def test_a_checksum_moves_over_what_follows(data, zeros):
    follows = zlib.crc32(bytes(zeros))
    assert shift_crc(zlib.crc32(data), zeros) ^ follows == zlib.crc32(data + bytes(zeros))


def test_every_byte_is_checked_once_and_every_record_has_its_own_checksum(tmp_path, monkeypatch):
    counted = []
    original = zlib.crc32

    def crc32(data, start=0):
        counted.append(len(data))
        return original(data, start)

    monkeypatch.setattr(stored_zip.zlib, "crc32", crc32)
    with TensorFileWriter(tmp_path / "x.pt") as writer:
        for i in range(3):
            writer.add(f"large {i}", torch.randn(600_000))  # beside the write, in a thread
            writer.add(f"small {i}", torch.randn(3))
    assert sum(counted) == writer.bytes == (tmp_path / "x.pt").stat().st_size
    monkeypatch.undo()
    assert writer.crc32 == file_crc32(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        for entry in archive.infolist():
            assert zlib.crc32(archive.read(entry)) == entry.CRC, entry.filename


def test_more_records_than_the_old_format_counts(tmp_path):
    file = CheckedFile(tmp_path / "x.zip")
    archive = StoredZip(file)
    for i in range(2**16 + 3):
        archive.record(f"{i}", (b"x",))
    archive.finish()
    file.close()
    with zipfile.ZipFile(tmp_path / "x.zip") as found:
        assert len(found.namelist()) == 2**16 + 3
        assert found.read("65538") == b"x" and zlib.crc32(b"x") == found.getinfo("7").CRC
