"""What a tokenizer puts around every text: found, recorded with the data, compared everywhere, never doubled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from megatron.data.tokenise.chunks import RowChunk
from megatron.data.tokenise.encode import write_datasets
from megatron.data.tokenise.masked_texts import Delimiter, MaskedTextEncoder
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import check_tokenizer, manifest_path, read_manifest
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import Group
from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer
from megatron.tokenizer.base import single
from megatron.tokenizer.hugging_face import LibraryTokenizer
from megatron.tokenizer.ragged import Ragged
from tests.tokenizer.vocabularies import byte_level, write_json

pytestmark = pytest.mark.cpu

BOS, EOS = "<s>", "</s>"
FORMS = {"bare": "$A", "start": f"{BOS} $A", "both": f"{BOS} $A {EOS}", "end": f"$A {EOS}"}
TEXTS = ["hello world", "", f"{BOS}hello", f"hello{EOS}", f"{BOS}hello{EOS}", f"{BOS}{BOS}hello", BOS, "x"]


def tokenizer(folder: Path, form: str) -> LibraryTokenizer:
    """The same ids in every form."""
    made = byte_level(special=(BOS, EOS))
    made.post_processor = TemplateProcessing(single=FORMS[form], special_tokens=[(BOS, 0), (EOS, 1)])
    path = write_json(folder / form / "tokenizer.json", made, tokenizer_config={"eos_token": EOS, "bos_token": BOS})
    found = create_tokenizer("HFTokenizer", str(path))
    assert isinstance(found, LibraryTokenizer)
    return found


def documents(prefix: str) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.get(i).tolist() for i in range(len(data))]


def write(folder: Path, form: str, name: str = "out", **options: bool) -> str:
    encoder = TextEncoder(tokenizer(folder, form), EncodeOptions(**options))  # type: ignore[arg-type]
    rows = [{"text": text} for text in TEXTS]
    write_datasets(iter([RowChunk("memory", 0, rows, 1)]), encoder, str(folder / name))
    return str(folder / f"{name}_text_document")


def once(made: LibraryTokenizer, text: str, start: bool, end: bool) -> list[int]:
    """The plain ids of the library, with a start and an end where the text has none itself."""
    ids = made.backend.encode(text, add_special_tokens=False).ids
    head = [0] if start and ids[:1] != [0] else []
    return [*head, *ids, *([1] if end and ids[-1:] != [1] else [])]


def test_a_token_that_is_both_start_and_end_is_counted_once_for_each() -> None:
    """[9, 9] is the start and the end of an empty text; each further one next to them is the text's own."""
    rows = [[9, 9], [9, 5, 9], [9, 9, 9], [9, 9, 5, 9], [9, 5, 9, 9], [9, 9, 5, 9, 9], [9, 9, 9, 9]]
    expected = [[9, 9], [9, 5, 9], [9, 9], [9, 5, 9], [9, 5, 9], [9, 5, 9], [9, 9]]
    assert [row[single(row, (9,), (9,))] for row in rows] == expected
    together = Ragged(np.concatenate(rows), np.array([len(row) for row in rows])).single((9,), (9,))
    assert together.ids.tolist() == [i for row in expected for i in row]
    assert together.lengths.tolist() == [len(row) for row in expected]


@pytest.mark.parametrize("form", FORMS)
def test_a_start_and_an_end_are_written_once(tmp_path: Path, form: str) -> None:
    made = tokenizer(tmp_path, form)
    start, end = form in ("start", "both"), form in ("both", "end")
    assert made.added == ((0,) * start, (1,) * end)
    texts = [text for text in TEXTS if text]
    for append in (False, True):
        prefix = write(tmp_path, form, f"out{append}", append_eod=append)
        assert documents(prefix) == [once(made, text, start, end or append) for text in texts]
        stored = read_manifest(prefix)
        assert stored is not None and stored.tokenizer is not None
        assert (stored.tokenizer["start"], stored.tokenizer["end"]) == ([0] * start, [1] * end)
        masked = MaskedTextEncoder(made, EncodeOptions(append_eod=append), Delimiter(text="hello"))
        encoded = masked.encode(RowChunk("memory", 0, [{"text": text} for text in texts], 1))
        assert encoded.ids[0].tolist() == [i for text in texts for i in once(made, text, start, end or append)]
        ids = once(made, texts[0], start, end or append)
        first = encoded.ids[1][: encoded.lengths[1][0]].tolist()
        assert first == [-100 if i <= start else token for i, token in enumerate(ids)]  # what follows "hello"


@pytest.mark.parametrize("form", FORMS)
def test_a_text_to_be_continued_has_no_end(tmp_path: Path, form: str) -> None:
    made = tokenizer(tmp_path, form)
    start = form in ("start", "both")
    plain = [made.backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
    expected = [[0] * (start and ids[:1] != [0]) + ids for ids in plain]
    assert made.tokenize_openly(TEXTS) == expected


def test_data_of_another_form_is_refused_for_training_and_merging(tmp_path: Path) -> None:
    prefixes = {form: write(tmp_path, form, form) for form in FORMS}
    for form, prefix in prefixes.items():
        for other in FORMS:
            made = tokenizer(tmp_path, other)
            if other == form:
                check_tokenizer(IndexedDataset(prefix), made)
                continue
            with pytest.raises(UserError, match=f"{prefix}.*text.*there.*text.*here"):
                check_tokenizer(IndexedDataset(prefix), made)
            with pytest.raises(UserError, match=f"{prefixes[other]} and {prefix} "):
                merge_groups([Group(str(tmp_path / "merged"), (prefix, prefixes[other]))])
    assert not list(tmp_path.glob("merged*"))


def test_manifests_without_the_fact_stay_usable(tmp_path: Path) -> None:
    """As an earlier version wrote them."""
    old, new = write(tmp_path, "start", "old"), write(tmp_path, "start", "new")
    path = manifest_path(old)
    stored = json.loads(path.read_text())
    del stored["tokenizer"]["start"], stored["tokenizer"]["end"]
    path.write_text(json.dumps(stored))
    for form in FORMS:
        check_tokenizer(IndexedDataset(old), tokenizer(tmp_path, form))
    (merged,) = merge_groups([Group(str(tmp_path / "merged"), (new, old))])
    assert merged.tokenizer is not None and merged.tokenizer == stored["tokenizer"]
    check_tokenizer(IndexedDataset(tmp_path / "merged"), tokenizer(tmp_path, "bare"))
