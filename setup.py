"""Compiles the index builders when there is a C++ compiler; without one the package works on numpy alone.

Everything else about the package is in pyproject.toml.
"""

from setuptools import setup

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

setup(ext_modules=extensions)
