"""Fingerprints decide "equal" and "contained" on id maps."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.tokenizer import Fingerprint, create_tokenizer
from tests.tokenizer.vocabularies import byte_level, write_gpt2, write_json, write_tiktoken

pytestmark = pytest.mark.cpu

id_maps = st.dictionaries(st.integers(0, 60), st.text(max_size=3), min_size=1, max_size=25)


@given(base=id_maps, other=id_maps)
@settings(deadline=None)
def test_contained_is_what_it_says(base: dict[int, str], other: dict[int, str]) -> None:
    fingerprint = Fingerprint.of(base)
    assert fingerprint.contained_in(base)
    assert fingerprint.contained_in(other) == (base.items() <= other.items())
    assert fingerprint.contained_in(other | base)
    assert (Fingerprint.of(other) == fingerprint) == (other == base)
    assert Fingerprint.from_dict(fingerprint.to_dict()) == fingerprint


def test_tokens_do_not_run_into_each_other() -> None:
    assert Fingerprint.of({0: "ab", 1: "c"}).sha256 != Fingerprint.of({0: "a", 1: "bc"}).sha256


def test_ranges_are_small() -> None:
    assert Fingerprint.of({i: str(i) for i in range(50000)} | {60000: "x"}).ranges == ((0, 50000), (60000, 60001))


def test_a_base_is_covered_by_its_extension_and_not_the_other_way_round(tmp_path: Path) -> None:
    base = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "a.json", byte_level())))
    more = byte_level()
    more.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    instruct = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "b.json", more)))
    other = create_tokenizer(
        "HFTokenizer", str(write_json(tmp_path / "c.json", byte_level(("<|endoftext|>", "<pad>"))))
    )
    assert base.covers(base.fingerprint())
    assert instruct.covers(base.fingerprint())
    assert not base.covers(instruct.fingerprint())
    assert not other.covers(base.fingerprint())
    assert not create_tokenizer("CharLevelTokenizer").covers(create_tokenizer("bytes").fingerprint())


def test_one_vocabulary_has_one_fingerprint_whatever_its_file_format(tmp_path: Path) -> None:
    vocab, merges = write_gpt2(tmp_path)
    gpt2 = create_tokenizer("GPT2BPETokenizer", str(vocab), str(merges))
    folder = create_tokenizer("HFTokenizer", str(tmp_path))
    ranks = create_tokenizer("TiktokenTokenizer", str(write_tiktoken(tmp_path / "t.tiktoken", {"<|endoftext|>": 264})))
    assert gpt2.fingerprint() == folder.fingerprint() == ranks.fingerprint()


def test_the_hash_is_the_documented_one() -> None:
    """Manifests and checkpoints hold it: it may not change. Per id: id and length as 64 bits, then the token."""
    id_map = {0: "a", 1: "é\ud800", 5: ""}
    raw = b"".join(
        i.to_bytes(8, "little") + len(token).to_bytes(8, "little") + token
        for i, token in ((0, b"a"), (1, b"\xc3\xa9\xed\xa0\x80"), (5, b""))
    )
    assert Fingerprint.of(id_map).to_dict() == {"ranges": [[0, 2], [5, 6]], "sha256": hashlib.sha256(raw).hexdigest()}
