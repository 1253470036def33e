"""GPT-2's way of writing any byte as a printable character, in which byte-level vocabularies are stored."""

from __future__ import annotations


def byte_alphabet() -> dict[int, str]:
    """GPT-2's map from byte to printable character: itself when printable Latin-1, else U+0100 and up in byte order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte if byte in printable else 0x100 + hidden.index(byte)) for byte in range(256)}
