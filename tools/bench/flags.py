"""Types of the benchmarks' flags."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number
