"""Does this environment have what Deepy needs? A line for each thing, and how to get what is missing.

python tools/check_environment.py          exit code 0: ready; 2: something that is needed is missing or does not work
python tools/check_environment.py --mend   also mends what a setting of this environment can mend

Run it on a compute node to see its GPUs: sbatch slurm/run_on_compute.sbatch python tools/check_environment.py
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import site
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.errors import run_cli  # noqa: E402
from megatron.files import write_atomically  # noqa: E402
from megatron.flags import Parser  # noqa: E402
from megatron.home import installs  # noqa: E402

ARCH_FILE = "deepy_gh200.pth"  # Python runs the `import` lines of such files of an environment at its start
ARCH_LINE = "import os; os.environ.setdefault('TORCH_CUDA_ARCH_LIST', '9.0')\n"
_OLD_LOCK = 3600.0  # seconds; no build of ours takes longer


@dataclass(frozen=True)
class Finding:
    """One line. `wrong`: Deepy does not work so; `note`: it works, but the user may want to know."""

    grade: Literal["ok", "note", "wrong"]
    name: str
    found: str


def check_python() -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.machine()}, {sys.prefix}"
    grade: Literal["ok", "wrong"] = "ok" if sys.version_info >= (3, 10) else "wrong"
    yield Finding(grade, "Python", found + ("" if grade == "ok" else ": 3.10 or newer is needed"))


def check_packages(requirements: Path = ROOT / "requirements/requirements.txt") -> Iterator[Finding]:
    """Every package of `requirements` is there; another version than the tests ran with is a note."""
    from packaging.requirements import Requirement

    install = f"pip install -r {requirements.relative_to(ROOT) if requirements.is_relative_to(ROOT) else requirements}"
    lines = [line.partition("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines()]
    asked = [Requirement(line) for line in lines if line]
    same = 0
    for requirement in asked:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("wrong", requirement.name, f"not installed: {install}")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            same += 1
        else:
            yield Finding("note", requirement.name, f"{version}; the tests ran with {requirement.specifier}")
    yield Finding("ok", "packages", f"{same} in the versions of {requirements.name}")


def check_imports(names: tuple[str, ...] = ("torch", "deepspeed", "transformers", "tokenizers")) -> Iterator[Finding]:
    """What is installed can be imported: a wheel for another CUDA or processor cannot."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            continue  # `check_packages` reports it
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken package raises
            yield Finding("wrong", name, f"cannot be imported: {type(error).__name__}: {error}")
        else:
            yield Finding("ok", name, importlib.metadata.version(name))


def check_index_builders() -> Iterator[Finding]:
    from megatron.data.index_builders import builders

    if builders().__name__.endswith("fallback"):
        again = "pip install --no-build-isolation --no-deps -e . (with g++ installed)"
        yield Finding("note", "index builders", f"not compiled; numpy takes their place, slower: {again}")
    else:
        yield Finding("ok", "index builders", "compiled")


def check_devices() -> Iterator[Finding]:
    """GPUs, and whether this torch has code for them; NCCL as it is loaded, which LD_PRELOAD may have replaced."""
    import torch

    driver = shutil.which("nvidia-smi") is not None
    if not torch.cuda.is_available():
        if not driver:
            yield Finding("ok", "device", "CPU (no GPU driver on this machine)")
        elif torch.version.cuda is None:
            how = "bash setup_uv_env.sh --cuda auto, or make venv with TORCH_INDEX"
            yield Finding(
                "wrong", "device", f"this machine has GPUs, but torch {torch.__version__} is a CPU build: {how}"
            )
        else:
            yield Finding("wrong", "device", f"torch for CUDA {torch.version.cuda} finds no GPU: is the driver older?")
        return
    compiled = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        fits = any(arch.startswith((f"sm_{major}", f"compute_{major}")) for arch in compiled)
        found = f"{name}, sm_{major}{minor}, CUDA {torch.version.cuda}"
        yield Finding("ok" if fits else "wrong", f"GPU {index}", found + ("" if fits else f"; torch has {compiled}"))
    product = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) @ torch.ones(64, 64, device="cuda").bfloat16()
    right = product.float().eq(64).all().item()
    yield Finding("ok" if right else "wrong", "bf16 product", "computed" if right else "wrong result")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    preloaded = os.environ.get("LD_PRELOAD", "")
    yield Finding("ok", "NCCL", nccl + (f" (LD_PRELOAD={preloaded})" if "nccl" in preloaded else " (torch's own)"))
    if shutil.which("nvcc") is None:
        yield Finding("note", "nvcc", "not on PATH: kernels that compile at start (fused optimizers) are not available")


def check_arch_flags(torch_extension: ModuleType | None = None, mend: bool = False) -> Iterator[Finding]:
    """GH200 calls itself `sm_90a`, which torch before 2.6 reads as a number when it compiles an extension, and fails.

    With `mend`, every Python of this environment gets TORCH_CUDA_ARCH_LIST=9.0, which spares torch the reading.
    """
    if torch_extension is None:
        torch_extension = importlib.import_module("torch.utils.cpp_extension")
    import torch

    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CUDA_ARCH_LIST"}
    gh200 = {"device_count": 1, "get_device_capability": (9, 0), "get_arch_list": ["sm_80", "sm_90a"]}
    with mock.patch.dict(os.environ, environment, clear=True):
        with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=it) for name, it in gh200.items()}):
            try:
                torch_extension._get_cuda_arch_flags()
            except ValueError as error:
                broken = str(error)
            else:
                yield Finding("ok", "sm_90a", "torch reads the name of GH200's architecture")
                return
    place = Path(site.getsitepackages()[0], ARCH_FILE)
    if mend:
        write_atomically(place, ARCH_LINE)
    if place.exists():
        yield Finding("ok", "sm_90a", f"torch cannot read it ({broken}); {place} sets TORCH_CUDA_ARCH_LIST=9.0")
    else:
        grade: Literal["note", "wrong"] = "wrong" if platform.machine() == "aarch64" else "note"
        yield Finding(grade, "sm_90a", f"{broken}: on GH200 set TORCH_CUDA_ARCH_LIST=9.0, or run this with --mend")


def check_locks(folder: Path | None = None) -> Iterator[Finding]:
    """A killed build of an extension leaves a lock, for which every later run waits without a word."""
    if folder is None:
        folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache/torch_extensions"))
    for lock in sorted(folder.glob("**/lock")):
        if time.time() - lock.stat().st_mtime > _OLD_LOCK:
            yield Finding("wrong", "stale lock", f"{lock}: a build was killed; delete the file, or runs hang at start")


def check_optional() -> Iterator[Finding]:
    """Packages that some keys ask for."""
    files = {"flash_attn": "flashattention", "transformer_engine": "transformerengine", "mamba_ssm": "mamba"}
    for name, file in {**files, "wandb": "wandb", "tensorboard": "tensorboard"}.items():
        if importlib.util.find_spec(name) is None:
            yield Finding("note", name, f"not installed (optional): {installs(file)}")
        else:
            yield Finding("ok", name, importlib.metadata.version(name))


def find_all(mend: bool) -> Iterator[Finding]:
    """Every finding, in the order in which a person would look."""
    yield from check_python()
    yield from check_packages()
    yield from check_imports()
    if importlib.util.find_spec("torch") is not None:
        yield from check_devices()
        yield from check_arch_flags(mend=mend)
    yield from check_index_builders()
    yield from check_locks()
    yield from check_optional()


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--mend", action="store_true", help="write the setting that old torch needs on GH200")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; 2 when one of them is wrong."""
    given = parser().parse_args(argv)
    wrong = 0
    for finding in find_all(given.mend):
        wrong += finding.grade == "wrong"
        print(f"{finding.grade:5}  {finding.name:16} {finding.found}", flush=True)
    print("ready" if not wrong else f"{wrong} {'thing is' if wrong == 1 else 'things are'} wrong")
    return 2 if wrong else 0


if __name__ == "__main__":
    run_cli(main)
