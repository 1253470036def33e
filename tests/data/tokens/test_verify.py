"""Every kind of damage is found, named with its file, and only that."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens import indexed
from megatron.data.tokens import verify as verifying
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import HEADER
from megatron.data.tokens.labels import find_labels
from megatron.data.tokens.manifest import finalize_with_manifest
from megatron.data.tokens.token_files import TokenFiles
from megatron.data.tokens.verify import verify_path
from megatron.tokenizer.fingerprint import Fingerprint
from tests.data.corpus import GOLDEN, write

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[3]
N = len(GOLDEN)


def with_manifest(prefix: Path, vocabulary: int = 50) -> str:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in GOLDEN:
            builder.add_document(document)
        fingerprint = Fingerprint.of({i: str(i) for i in range(vocabulary)})
        finalize_with_manifest(builder, tokenizer=fingerprint, source="test")
    return str(prefix)


def faults(path: str | Path, **options) -> list[str]:
    return [fault for report in verify_path(path, **options) for fault in report.faults]


def test_a_whole_dataset(tmp_path: Path) -> None:
    (report,) = verify_path(with_manifest(tmp_path / "x_text_document"), full=True)
    assert report.faults == []
    assert report.facts == "5 items, 5 documents, 36 tokens, uint16, manifest"
    (report,) = verify_path(write(tmp_path / "y", GOLDEN))
    assert report.faults == [] and "no manifest" in report.facts


def change(prefix: str, at: int, value: int, width: int) -> None:
    """Overwrite one number of the index."""
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(at)
        file.write(value.to_bytes(width, "little", signed=True))


DAMAGE: dict[str, tuple[Callable[[str], None], str]] = {
    "pointer": (lambda p: change(p, HEADER.size + 4 * N + 8 * 2, 30, 8), "item 2 .* byte 30.*at 28"),
    "negative size": (lambda p: change(p, HEADER.size, -5, 4), "item 0 has -5 tokens"),
    "sizes swapped": (lambda p: (change(p, HEADER.size, 9, 4), change(p, HEADER.size + 4, 5, 4))[0], "item 1 .* byte"),
    "first document": (lambda p: change(p, HEADER.size + 12 * N, 1, 8), "begin.* item 0"),
    "last document": (lambda p: change(p, HEADER.size + 12 * N + 8 * N, 4, 8), "ends at item 4 of 5"),
    "documents go back": (lambda p: change(p, HEADER.size + 12 * N + 8 * 2, 0, 8), "goes back after document [01]"),
    "cut index": (lambda p: Path(f"{p}.idx").write_bytes(Path(f"{p}.idx").read_bytes()[:-1]), "incomplete or damaged"),
    "cut tokens": (lambda p: Path(f"{p}.bin").write_bytes(Path(f"{p}.bin").read_bytes()[:-2]), "describes 72 bytes"),
    "no tokens": (lambda p: Path(f"{p}.bin").unlink(), r"\.bin is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("piece", [2, 1 << 15])
def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, piece: int) -> None:
    monkeypatch.setattr(indexed, "_CHECKED", piece)
    prefix = write(tmp_path / "x", GOLDEN)
    damage, said = DAMAGE[kind]
    damage(prefix)
    (fault,) = faults(prefix)
    assert re.search(said, fault), fault
    assert str(tmp_path) in fault


def test_the_checksum_of_the_index(tmp_path: Path) -> None:
    prefix = with_manifest(tmp_path / "x")
    stored = json.loads((tmp_path / "x.manifest.json").read_text())
    (tmp_path / "x.manifest.json").write_text(json.dumps({**stored, "index_sha256": "0" * 64}))
    (fault,) = faults(prefix)
    assert "index_sha256" in fault and "x.manifest.json" in fault


def test_ids_beyond_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(with_manifest(tmp_path / "x", vocabulary=47)) == []
    (fault,) = faults(with_manifest(tmp_path / "x", vocabulary=46))
    assert re.search(r"x: token 35 has id 46\b.*\bmanifest\b.*\b46 entries", fault)
    assert "token 29 has id 40" in faults(tmp_path / "x", vocab_size=40)[0]
    (fault,) = faults(write(tmp_path / "neg", [[1, -1]], np.int32))
    assert "token 1 has id -1" in fault
    # Without `full` a part is looked at: the first piece and the last one always.
    monkeypatch.setattr(verifying, "_PIECE", 2)
    monkeypatch.setattr(verifying, "_SAMPLED", 4)
    prefix = write(tmp_path / "hidden", [[1] * 13 + [99] + [1] * 26])
    assert faults(prefix, vocab_size=50) == []
    assert len(faults(prefix, vocab_size=50, full=True)) == 1
    assert len(faults(write(tmp_path / "end", [[1] * 39 + [99]]), vocab_size=50)) == 1


def test_labels_next_to_the_data(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x_text_document", GOLDEN)
    assert find_labels(prefix) is None
    masked = [[-100 if token % 2 else token for token in document] for document in GOLDEN]
    labels = write(tmp_path / "x_text_label_document", masked, np.int32)
    assert find_labels(prefix) == labels and find_labels(labels) is None
    (report,) = verify_path(prefix)
    assert report.faults == [] and "labels" in report.facts
    assert faults(labels) == []
    masked[3][0] = 7
    write(labels, masked, np.int32)
    (fault,) = faults(prefix)
    assert re.search(rf"{re.escape(labels)}: label 17 is 7\b.* -100\b.*\b20\b.*{re.escape(prefix)}\b", fault)
    write(labels, masked[:-1], np.int32)
    assert "item sizes differ" in faults(prefix)[0]


def test_npy_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.asarray([60000, 5, 0, 6, 0, 7], "<u2").tofile(tmp_path / f"{name}.npy")
    reports = verify_path(tmp_path / "*.npy", files=TokenFiles(0, "uint16"), vocab_size=100)
    assert [len(report.faults) for report in reports] == [1, 1]
    assert "a.npy: token 0 has id 60000" in reports[0].faults[0]
    assert "3 items" in reports[0].facts
    assert "npy_eod" in faults(tmp_path / "a.npy")[0]


def tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/datasets/verify_dataset.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_tool(tmp_path: Path) -> None:
    good, bad = with_manifest(tmp_path / "good_document"), write(tmp_path / "bad_document", GOLDEN)
    done = tool(good)
    facts = rf"{re.escape(good)}: 5 items, 5 documents, 36 tokens, uint16, manifest, 100 % .*: whole\n"
    assert done.returncode == 0 and re.fullmatch(facts, done.stdout)
    change(bad, HEADER.size + 4 * N + 8, 3, 8)
    done = tool(tmp_path / "*_document", "--full")
    assert done.returncode == 2 and re.search(r"\b1 of 2\b", done.stderr)
    assert [line for line in done.stdout.splitlines() if line.startswith("  FAULT")] != []
    assert tool(tmp_path / "nothing").returncode == 2
    assert "Traceback" not in done.stderr
