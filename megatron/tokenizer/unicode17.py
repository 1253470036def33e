"""Characters that Unicode 17.0 added to 16.0 and that decide where a word ends: letters, marks and digits.

Libraries built with tables of either version cut text with them in different places (found by comparing every code
point). Source: DerivedGeneralCategory of the two versions.
"""

from __future__ import annotations

import re

BASIC = (*"\u088f\u0c5c\u0cdc\ua7f1", *map(chr, (*range(0x1ACF, 0x1AEC), *range(0xA7CE, 0xA7D5))))
RANGES = (
    (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x10EFA, 0x10EFB), (0x11B60, 0x11B67), (0x11DB0, 0x11DE9),
    (0x16EA0, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E), (0x18D80, 0x18DF2),
    (0x1E6C0, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)  # fmt: skip
BEYOND = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in RANGES) + "]")
# The first two bytes of those in UTF-8, to pass over emoji quickly.
LEADS = re.compile(
    b"\xf0[" + b"".join(sorted({chr(c).encode()[1:2] for pair in RANGES for c in range(pair[0], pair[1] + 1)})) + b"]"
)


def has_young(text: str, utf8: bytes) -> bool:
    """Whether one of these characters is in `text`, whose UTF-8 form is `utf8`."""
    if any(char in text for char in BASIC):
        return True
    return b"\xf0" in utf8 and LEADS.search(utf8) is not None and BEYOND.search(text) is not None
