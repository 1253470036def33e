"""Characters so new to Unicode that libraries, built with tables of different versions, do not treat them alike.

Found by comparing gigatoken 0.10 with tokenizers 0.23 on every code point, alone, doubled and next to combining marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

# Letters, marks and digits that 17.0 added to 16.0 (DerivedGeneralCategory): they decide where a word ends.
NEW_IN_17 = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0x1ACF, 0x1AEB), (0xA7CE, 0xA7D4), (0xA7F1, 0xA7F1),
    (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x10EFA, 0x10EFB), (0x11B60, 0x11B67), (0x11DB0, 0x11DE9),
    (0x16EA0, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E), (0x18D80, 0x18DF2),
    (0x1E6C0, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)  # fmt: skip
# Marks that later versions gave a place in the order of marks, and scripts with compositions that 16.0 brought: they
# come out differently of NFC and its relatives.
NORMALIZED_ANEW = (
    (0x7FD, 0x7FD), (0x897, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEB8, 0xEBA),
    (0x1715, 0x1715), (0x1ABF, 0x1ACE), (0x1DF5, 0x1DFA), (0xA82C, 0xA82C), (0x105C0, 0x105FF), (0x10D24, 0x10D27),
    (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFC, 0x10EFF), (0x10F46, 0x10F50), (0x10F82, 0x10F85),
    (0x11070, 0x11070), (0x1133B, 0x1133B), (0x11380, 0x113FF), (0x1145E, 0x1145E), (0x11839, 0x1183A),
    (0x1193D, 0x11943), (0x119E0, 0x119E0), (0x11A34, 0x11A34), (0x11A47, 0x11A47), (0x11A99, 0x11A99),
    (0x11D42, 0x11D45), (0x11D97, 0x11D97), (0x11F41, 0x11F42), (0x16100, 0x1613F), (0x16D40, 0x16D7F),
    (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE), (0x1E2EC, 0x1E2EF),
    (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF),
)  # fmt: skip


class Characters:
    """A set of characters that is quickly seen to be absent from texts, as it nearly always is."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """`ranges` of code points from U+0080 on, ends included."""
        ranges = list(ranges)
        self._pattern = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges) + "]")
        # By the first two bytes of a character in UTF-8. Emoji and the common scripts have other ones.
        starts = {chr(c).encode("utf-8")[:2] for first, last in ranges for c in range(first, last + 1)}
        self._lowest = min(start[0] for start in starts)
        self._starts = np.zeros(1 << 16, bool)
        self._starts[[start[0] << 8 | start[1] for start in starts]] = True

    def occur_in(self, text: str) -> bool:
        """Whether one of them is in `text`. Slow."""
        return self._pattern.search(text) is not None

    def may_occur_in(self, texts: Sequence[bytes]) -> bool:
        """False when none of them is in any of `texts`, which are UTF-8."""
        joined = np.frombuffer(b"".join([*texts, b"\0"]), np.uint8)
        at = np.flatnonzero(joined >= self._lowest)
        return bool(self._starts[joined[at].astype(np.uint16) << 8 | joined[at + 1]].any())
