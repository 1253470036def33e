"""Compiles the index builders when there is a C++ compiler (without one the package works on numpy alone), and puts
what is no module (scripts, configs, tools, sbatch files, guides) into its folder `deepy_home`: megatron/home.py.

Everything else about the package is in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOME_FOLDERS = ("configs", "tools", "huggingface", "post-training", "slurm", "requirements", "documentation")


class BuildWithHome(build_py):
    """The modules, and beside them `deepy_home`; an editable installation finds those files in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        home = Path(self.build_lib, "deepy_home")
        shutil.rmtree(home, ignore_errors=True)  # of an earlier build
        home.mkdir(parents=True)
        for folder in filter(Path.is_dir, map(Path, HOME_FOLDERS)):
            shutil.copytree(folder, home / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for file in (*Path().glob("*.py"), *Path().glob("*.sbatch"), *Path().glob("*.sh")):
            if file.name != "setup.py":
                shutil.copy(file, home)


try:
    from pybind11.setup_helpers import Pybind11Extension

    extensions = [
        Pybind11Extension(
            f"megatron.data.index_builders.{module}",
            [f"megatron/data/index_builders/{source}"],
            cxx_std=17,
            # No fused multiply-add: blending must round as numpy does, on every processor.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
        for module, source in (("_native", "native.cpp"), ("_packing", "packing.cpp"), ("_shuffle", "shuffle.cpp"))
    ]
except ImportError:
    extensions = []

setup(ext_modules=extensions, cmdclass={"build_py": BuildWithHome})
