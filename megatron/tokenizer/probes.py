"""Texts on which encoders tend to disagree. Fixed: the same file is always tried on the same texts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

RUNS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 129)
SPACES = (" ", "\n", "\t", "\r\n", " \n", "\n ", "\t ", "\u00a0", "\u3000", "\u2028", "\x0b\x0c", "\u200b", "\x85 ")
SCRIPTS = (
    "I'm you're he'LL it’s 'S 'tis don't'll 've'D  's' ''re '\u0301s i'M'VE we'dd 'ſ 'ß",
    "0 00 1234567 12,345.678 1a2b3c ٣٤٥٦ ½⅔Ⅷ २०२६ 1\u0301 ２０２６ 3.14e-10 0xDEADBEEF v1.2.3-rc4",
    "!!!???... ===== -----\n /**/ <<>>== a.b(c)[d]{e}; $x @y #z `w` ~ ^ | \\n \\\\ ...\n\n!\n?  ! ?",
    "def f(x):\n    if x:\n        return [y for y in x]\n\n\n\tpass\r\n\r\n# end\n   \n",
    "中文测试，没有空格。日本語のテキスト、カタカナ・ひらがな。한국어 문장입니다 조합형 ᄒ\u1161\u11ab",
    "العَرَبِيَّة فارسی עִבְרִית हिन्दी क्षत्रिय ไทยไม่มีช่องว่าง བོད་ ქართული Ελληνικά Ὀδυσσεύς Ћирилица",
    "e\u0301\u0301 \u0301abc a\u0300\u0301\u0302\u0303 Z\u0351\u036b\u0343 c\u0327\u0327a \u200d\u0301 n\u0303o\u0308",
    "ﬁ ﬀ ① Å Å Å ㎏ ² ſ ß ẞ İ ı ǅ ŉ Ω K ﷺ ＡＢＣ ｱｲｳ ™ … ‥ ´ ¨ ¸ \u0344 \u1e9b\u0323",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷🇯 ❤️ ☺︎ 1️⃣ 🏴\U000e0067\U000e0062\U000e007f 🤖🤖🤖 \U0001f9d1\u200d 🫠",
    "\x00 \x01a\x02 \x1b[0m\x7f\x80\x9f \ufeffx \u200b\u200c\u2060 \u202eabc\u202c\ufffd\ufffe\uffff \U0010ffff \ue000",
    "Ġ Ċ ĉ Ā ▁ ▁▁a <0x0A> <0xFF> <unk> <s> </s> <pad> [UNK] [MASK] ## ##ing <|endoftext|> <|im_start|> <|",
    "https://user@example.org:8080/a/b_c?d=e&f=%20#g me.too@mail.example C:\\Users\\x ~/.config aGVsbG8gd29ybGQ=",
    "iPhone McDonald XMLHttpRequest snake_case kebab-case SCREAMING_CASE ÀÉÎ àéî ǄǅǆǇ aA1Bb2 ABCdef ABc",
    "\U000105d2\u0307\U000105da\u0307 \U00011382\U000113c9 \U00016d63\U00016d67\U00016d67",
    "a\u0344 \u0f71\u0f72 \u1100\u1161\u11a8",
    "\n\n\n", "   ", "\t", " a", "a ", " a ", "\na\n", "", "a", "'", "\u00e9", "\u4e2d", "\U0001f600",
)  # fmt: skip
LONG = ("a", "ab", "=", "é", "中", "🤖", "'s", "9", "\u0301", "aB", ".\n", "x ", "a\u200d")
# Letters, marks and digits that are new in Unicode 15 to 17.
YOUNG = (
    0x088F, 0x0C5C, 0x0CDC, 0x1ACF, 0x1AE0, 0x1C89, 0xA7CB, 0xA7CE, 0xA7D2, 0xA7D4, 0xA7DA, 0xA7F1, 0x10940, 0x105C0,
    0x10D40, 0x10D6F, 0x10EC2, 0x10EC5, 0x11380, 0x113D1, 0x11BC0, 0x11BF0, 0x11DB0, 0x11DE0, 0x11F02, 0x11F50, 0x13460,
    0x16100, 0x16130, 0x16D40, 0x16D70, 0x16EA0, 0x16EBB, 0x16FF2, 0x187F8, 0x18D09, 0x18D80, 0x1DF25, 0x1E4D0, 0x1E4F0,
    0x1E5D0, 0x1E5F1, 0x1E6C0, 0x1E6FE, 0x2B739, 0x2B73A, 0x2CEA2, 0x2EBF0, 0x31350, 0x323B0, 0x33100, 0x33478,
)  # fmt: skip


def hostile_texts(
    added: Sequence[str] = (), decode: Callable[[list[int]], str] | None = None, size: int = 0
) -> list[str]:
    """Whitespace runs, contractions, scripts, marks, control characters, very long words, every kind of code point.

    `added`: tokens found in text unchanged, tried in all surroundings. With `decode` and the `size` of the
    vocabulary, also what runs of its tokens, in and out of order, spell.
    """
    texts = [*SCRIPTS, *map("".join, itertools.pairwise(SCRIPTS))]
    texts += [f"a{space * n}b{space * n}.{space * n}1{space * n}" for space in SPACES for n in RUNS]
    texts += [f"{space * n}{other * n}x" for space, other in itertools.pairwise(SPACES) for n in (1, 2, 7)]
    texts += [f"a{space * 1025}b" for space in SPACES]
    texts += [piece * n for piece in LONG for n in (50, 700)]
    randomly = random.Random(0)
    texts += ["".join(randomly.choices("etaoinshrdlu", k=n)) for n in (300, 3000)]
    texts += _code_points(randomly)
    texts += _around(added, randomly)
    if decode is not None and size:
        texts += [decode(list(range(first, min(first + 24, size)))) for first in range(0, size, max(size // 64, 24))]
        texts += [decode([randomly.randrange(size) for _ in range(24)]) for _ in range(64)]
    return texts


def _code_points(randomly: random.Random) -> Iterator[str]:
    """All of the first blocks and a few of every later one, where their class decides what belongs to a word."""
    step = [*range(0x20, 0x250), *range(0x250, 0x3100, 9), *range(0x3100, 0xD800, 431), *range(0xE000, 0x20000, 97)]
    letters = "aZ1.' "
    for start in range(0, len(step), 64):
        yield "".join(f" {chr(c)}{chr(c)}{randomly.choice(letters)}{chr(c)}" for c in step[start : start + 64])
    # Libraries are built with tables of different versions of Unicode.
    young = [
        *step[600::7],
        *range(0x10000, 0x1F000, 61),
        *range(0x20000, 0x34000, 0x2F3),
        *YOUNG,
        *(c + 2 for c in YOUNG),
    ]
    for start in range(0, len(young), 16):
        yield "".join(f"{chr(c)}'llof{chr(c)}2345 1{chr(c)}1'S{chr(c)}\n" for c in young[start : start + 16])


def _around(added: Sequence[str], randomly: random.Random) -> Iterator[str]:
    """Added tokens (of very many the first, the last and some between) in the midst of words, spaces and each other."""
    shown = list(added) if len(added) <= 96 else [*added[:32], *added[-32:], *randomly.sample(list(added), 32)]
    for token in shown:
        yield f"{token}a{token} b {token} {token}{token}\n{token}\n  {token}  1{token}.{token}"
        yield "".join(f"{token}{mark}{token}a{mark}" for mark in ("\u0301", "\u0338", "\u200d", "ﬁ", "▁", "'s"))
        yield f"x{token[:-1]} {token[1:]}{token[:-1]}{token}{token[1:]} {token.upper()} {token.lower()} {token}s"
    for _ in range(min(len(shown), 32)):
        yield "".join(randomly.choice(shown) + randomly.choice(("", " ", "a", "\n", "é")) for _ in range(8))
