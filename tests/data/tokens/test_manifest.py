"""Manifests: written with the data, verified against it, and the rule that decides whose tokens a run accepts."""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens import manifest as manifests
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.partial import WriteError
from megatron.errors import UserError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fingerprint import Fingerprint
from tests.data.corpus import write

pytestmark = pytest.mark.cpu

BASE = {0: "<eod>", 1: "a", 2: "b", 3: "c"}


class MapTokenizer(Tokenizer):
    """A tokenizer that is nothing but its id map."""

    name = "map"

    def __init__(self, ids: dict[int, str]) -> None:
        self.ids = ids

    def tokenize(self, text: str) -> list[int]:
        return [next(i for i, token in self.ids.items() if token == letter) for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(self.ids[i] for i in ids)

    def id_map(self) -> dict[int, str]:
        return self.ids

    def files(self) -> dict[str, Path]:
        return {}


def made(prefix: Path, ids: dict[int, str] = BASE) -> str:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([1, 2, 0])
        builder.add_document([3, 0])
        manifests.finalize_with_manifest(builder, tokenizer=Fingerprint.of(ids), source=["a.jsonl"])
    return str(prefix)


def test_manifest_describes_the_data(tmp_path: Path) -> None:
    prefix = made(tmp_path / "x")
    raw = json.loads((tmp_path / "x.manifest.json").read_text())
    assert raw["format_version"] == 2
    assert (raw["items"], raw["documents"], raw["tokens"], raw["dtype"]) == (2, 2, 5, "uint16")
    assert raw["index_sha256"] == hashlib.sha256((tmp_path / "x.idx").read_bytes()).hexdigest()
    assert raw["bin_crc32"] == zlib.crc32((tmp_path / "x.bin").read_bytes())
    assert raw["source"] == ["a.jsonl"]
    assert manifests.verify(prefix) == manifests.read_manifest(prefix)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.manifest.json"]


def test_verify_finds_a_changed_dataset(tmp_path: Path) -> None:
    prefix = made(tmp_path / "x")
    write(prefix, [[1, 2, 0], [3, 0], [1]])
    with pytest.raises(UserError, match="items is 3.*2"):
        manifests.verify(prefix)
    write(prefix, [[1, 2], [0, 3, 0]])
    with pytest.raises(UserError, match="index_sha256"):
        manifests.verify(prefix)
    assert manifests.verify(write(tmp_path / "bare", [[1]])) is None


def write_with_manifest(prefix: Path, tokens: np.ndarray, length: int) -> Path:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(tokens, [length] * (len(tokens) // length))
        manifests.finalize_with_manifest(builder, tokenizer=None, source=None)
    return Path(f"{prefix}.bin")


@pytest.mark.parametrize("documents", [100, 3000])  # below and beyond what a sample holds
def test_every_bit_of_the_tokens_counts(tmp_path: Path, documents: int) -> None:
    rng = np.random.default_rng(5)
    file = write_with_manifest(tmp_path / "x", rng.integers(0, 9, 50 * documents), 50)
    whole = file.read_bytes()
    assert manifests.verify(tmp_path / "x", full=lambda nbytes: None) is not None
    for at in (0, len(whole) // 3, len(whole) - 1):
        changed = bytearray(whole)
        changed[at] ^= 4
        file.write_bytes(changed)
        said = rf"x\.bin: bin_crc32 is {zlib.crc32(changed)}, but .*x\.manifest\.json says {zlib.crc32(whole)}\b"
        with pytest.raises(UserError, match=said):
            manifests.verify(tmp_path / "x", full=lambda nbytes: None)
    # Other tokens of the same shape have the same index; a few places of the file are enough to find them.
    write_with_manifest(tmp_path / "y", rng.integers(0, 9, 50 * documents), 50)
    assert (tmp_path / "y.idx").read_bytes() == (tmp_path / "x.idx").read_bytes()
    file.write_bytes((tmp_path / "y.bin").read_bytes())
    places = [(len(whole) - 4096) * k // 15 for k in range(16)]
    sample = b"".join(whole[at : at + 4096] for at in places) if len(whole) > 1 << 16 else whole
    with pytest.raises(UserError, match=rf"x\.bin: bin_sample_crc32 is \d+, but .* says {zlib.crc32(sample)}\b"):
        manifests.verify(tmp_path / "x")


def test_a_manifest_of_version_1_has_no_checksum_of_the_tokens(tmp_path: Path) -> None:
    prefix = made(tmp_path / "x")
    path = tmp_path / "x.manifest.json"
    raw = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("bin_")}
    path.write_text(json.dumps(raw | {"format_version": 1}))
    assert manifests.verify(prefix) is not None


def test_unreadable_manifest(tmp_path: Path) -> None:
    prefix = made(tmp_path / "x")
    path = tmp_path / "x.manifest.json"
    whole = path.read_text()
    path.write_text("{")
    with pytest.raises(UserError, match=r"x\.manifest\.json"):
        manifests.read_manifest(prefix)
    path.write_text(whole.replace('"format_version": 2', '"format_version": 7'))
    with pytest.raises(UserError, match="version 7"):
        manifests.read_manifest(prefix)


def test_same_and_extended_vocabularies_are_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = IndexedDataset(made(tmp_path / "x"))
    manifests.check_tokenizer(data, MapTokenizer(BASE))
    manifests.check_tokenizer(data, MapTokenizer(BASE | {4: "<|user|>"}))
    assert not caplog.records


@pytest.mark.parametrize("ids", [{0: "<eod>", 1: "a", 2: "b"}, BASE | {3: "z"}])
def test_another_vocabulary_is_refused(tmp_path: Path, ids: dict[int, str]) -> None:
    data = IndexedDataset(made(tmp_path / "x"))
    with pytest.raises(UserError, match=rf"{data.prefix} .*tokenizer_type/vocab_file"):
        manifests.check_tokenizer(data, MapTokenizer(ids))


def test_without_manifest_one_warning_and_the_range(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from megatron.log import Once, get_logger

    data = IndexedDataset(write(tmp_path / "x", [[1, 2], [3, 0]]))
    once = Once(get_logger("megatron.data.test"))
    with caplog.at_level(logging.WARNING):
        manifests.check_tokenizer(data, MapTokenizer(BASE), once)
        manifests.check_tokenizer(data, MapTokenizer(BASE), once)
    assert len(caplog.records) == 1
    with pytest.raises(UserError, match=r"x: token 2\b.*\b3\b.*\bvocabulary\b.*\b3\b"):
        manifests.check_tokenizer(data, MapTokenizer({0: "<eod>", 1: "a", 2: "b"}), once)


def test_id_range_is_sampled_over_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.zeros(5 << 20, np.uint16)
    tokens[-1] = 9
    write(tmp_path / "x", [tokens.tolist()])
    monkeypatch.setattr(manifests, "SCAN_BYTES", 1 << 21)
    with pytest.raises(UserError, match="has id 9"):
        manifests.check_id_range(IndexedDataset(tmp_path / "x"), 9)
    manifests.check_id_range(IndexedDataset(tmp_path / "x"), 10)


def test_old_data_stays_when_the_manifest_of_the_new_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = made(tmp_path / "x")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = Path.write_text

    def full(path: Path, text: str, **options: str) -> int:
        real(path, text[:100], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(WriteError, match=r"x\.manifest\.json\.partial: No space left on device"):
        made(tmp_path / "x", {**BASE, 4: "d"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert manifests.verify(prefix) is not None
