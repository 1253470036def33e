"""Memory of whole conversions, as the kernel counts it, and what is left of one that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model
from tests.convert.helpers import LLAMA, hugging_face, resolved

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[3]

# Converts a tiny model there and back first, so that everything is imported and every pool is made. Prints by how many
# MB the peak has grown after the conversions without the comparison, and after those with it; and the peak.
MEASURE = """
import sys
from pathlib import Path
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

folder = Path(sys.argv[1])

def both(source, name, tp, check):
    import_model(str(folder / source), folder / name, tp=tp, check=check)
    export(folder / name, folder / f"{name}-back", tokenizer=False, check=check, max_shard_bytes=10**7)

both("tiny", "first", 1, True)
before = peak()
both("hf", "one", 1, False)
both("hf", "two", 2, False)
grown = peak() - before
both("hf", "checked", 1, True)
print(grown, peak() - before, peak())
"""

# Dies in the middle of a write.
KILLED = """
import itertools, os, signal, sys
from megatron.checkpoint import stored_zip
from megatron.convert.hf import safetensors_writer
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model

def deadly(write, count=itertools.count()):
    def call(*arguments):
        if next(count) == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*arguments)
    return call

stored_zip.CheckedFile.write = deadly(stored_zip.CheckedFile.write)
safetensors_writer._write_tensor = deadly(safetensors_writer._write_tensor)
if sys.argv[1] == "import":
    import_model(sys.argv[2], sys.argv[3])
else:
    export(sys.argv[2], sys.argv[3], tokenizer=False)
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    # One arena, and freed blocks go back to the kernel: else the peak is partly what the allocator keeps.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **malloc, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def random_model(folder: Path, layers: int, hidden: int) -> None:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=1000,
        max_position_embeddings=64,
        num_attention_heads=4,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
    )
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder, max_shard_size="10MB")


def test_no_conversion_holds_more_than_a_small_part_of_the_model(tmp_path):
    """86 MB in layers of 5 MB. Without the comparison a few tensors are in memory, with it a layer in fp32 and what it
    computes; transformers would take 172 MB to load the model in fp32."""
    torch.manual_seed(0)
    random_model(tmp_path / "tiny", 1, 32)
    random_model(tmp_path / "hf", 18, 384)
    shards = [path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")]
    assert sum(shards) > 80e6 and max(shards) < 11e6
    done = python(MEASURE, tmp_path)
    assert done.returncode == 0, done.stderr
    unchecked, checked, peak = map(float, done.stdout.split())
    assert unchecked < 35 and checked < 75, (unchecked, checked)
    assert peak < 1.5 * max(shards) / 1e6 + 1000  # of which Python and the libraries take nearly all
    source = {k: v for path in (tmp_path / "hf").glob("*.safetensors") for k, v in load_file(path).items()}
    for back in ("one-back", "two-back"):
        sizes = {path.name: path.stat().st_size for path in (tmp_path / back).glob("*.safetensors")}
        index = json.loads((tmp_path / back / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(sizes) and max(sizes.values()) < 10**7 + 10**4
        written = {k: v for name in sizes for k, v in load_file(tmp_path / back / name).items()}
        assert written.keys() == source.keys()
        assert all(torch.equal(tensor, written[name]) for name, tensor in source.items())


@pytest.mark.parametrize("at", [9, 20])
def test_what_is_killed_while_it_writes_leaves_no_folder_and_the_next_one_cleans_up(tmp_path, at):
    model, _ = hugging_face(resolved(**LLAMA), "llama")
    model.save_pretrained(tmp_path / "hf")
    died = python(KILLED, "import", tmp_path / "hf", tmp_path / "out", at)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (tmp_path / "out").exists() and len(os.listdir(tmp_path)) == 2
    import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
    died = python(KILLED, "export", tmp_path / "out", tmp_path / "back", at)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (tmp_path / "back").exists() and len(os.listdir(tmp_path)) == 3
    export(tmp_path / "out", tmp_path / "back", tokenizer=False)
    assert sorted(os.listdir(tmp_path)) == ["back", "hf", "out"]
