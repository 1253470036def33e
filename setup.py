"""Compiles the index builders when there is a C++ compiler; without one the package works on numpy alone.

Everything else about the package is in pyproject.toml.
"""

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension

    extensions = [
        Pybind11Extension(
            "megatron.data.index_builders._native",
            ["megatron/data/index_builders/native.cpp"],
            cxx_std=17,
            # No fused multiply-add: blending must round as numpy does, on every processor.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
except ImportError:
    extensions = []

setup(ext_modules=extensions)
