"""Rows of tokens for people: text of tokens, lines for a terminal, pages."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.collate import CollateRules
from megatron.data.sample import Sample
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.manifest import finalize_with_manifest
from megatron.data.view.content import Part, View, document_view, sample_view
from megatron.data.view.decode import token_texts
from megatron.data.view.documents import open_documents
from megatron.data.view.html import histogram, page, write_page
from megatron.data.view.origin import Origin, OriginPiece
from megatron.data.view.terminal import Style, escape_controls, lines
from megatron.errors import UserError
from megatron.tokenizer import create_tokenizer
from tests.data.corpus import write
from tests.tokenizer.vocabularies import write_json
from tests.tokenizer.zoo import OTHER_SCRIPTS, ZOO

pytestmark = pytest.mark.cpu

BYTES = create_tokenizer("bytes")


def row(text: str, trained: str | None = None) -> View:
    """A row of bytes; `trained` has a `^` under what is trained."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    marks = np.array([c == "^" for c in trained]) if trained is not None else np.full(len(ids), True)
    return View("a row", ids, marks, (Part("document 0", 0, len(ids)),), source="here")


# ---- the text of single tokens


@given(st.text(max_size=12))
def test_characters_belong_to_their_last_byte(text: str) -> None:
    """Against UTF-8 itself."""
    expected = [""] * len(text.encode())
    at = 0
    for char in text:
        at += len(char.encode())
        expected[at - 1] = char
    if "\ufffd" not in text:  # the sign of half a character
        assert token_texts(BYTES, list(text.encode())) == expected


@given(st.binary(max_size=40))
def test_noise_has_a_text_for_every_token(noise: bytes) -> None:
    texts = token_texts(BYTES, list(noise))
    assert len(texts) == len(noise)


def test_a_byte_level_vocabulary(tmp_path: Path) -> None:
    tokenizer = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "tokenizer.json")))
    text = "naïve 🤖 text,\n日本語<|endoftext|>next"
    ids = tokenizer.tokenize(text)
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == text
    assert "<|endoftext|>" in texts and "🤖" in texts and "日" in texts


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "wordpiece", "qwen2"])
def test_tokenizers_that_decode_in_their_own_ways(tmp_path: Path, kind: str) -> None:
    """Leading blanks dropped, blanks put between tokens, bytes as tokens of their own."""
    tokenizer = create_tokenizer("HFTokenizer", str(write_json(tmp_path / "tokenizer.json", ZOO[kind]())))
    ids = tokenizer.tokenize(f"Hello  world, {OTHER_SCRIPTS} 🤖🤖 end")
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == tokenizer.detokenize(ids)
    if kind != "wordpiece":
        assert not any("\ufffd" in text for text in texts) and sum("🤖" in text for text in texts) >= 3


def test_a_row_that_begins_within_a_character() -> None:
    ids = list("🤖ab".encode())[2:]
    texts = token_texts(BYTES, ids)
    assert len(texts) == len(ids) and "".join(texts) == BYTES.detokenize(ids) and texts[-1] == "b"


# ---- terminals


def shown(view: View, **style: bool | int) -> str:
    return "\n".join(lines(view, BYTES, Style(**style)))


def test_trained_parts_are_marked() -> None:
    assert shown(row("ask: yes.", "-----^^^^")).endswith("-- document 0\nask: [[yes.]]")
    assert shown(row("ask: yes.", "-----^^^^"), color=True).endswith("ask: \x1b[32myes.\x1b[0m")
    assert "[[" not in shown(row("all of it"))


def test_a_first_token_that_nothing_predicts_is_no_reason_for_marks() -> None:
    assert "[[" not in shown(row("abc", "-^^"))
    assert shown(row("abc", "--^")).endswith("ab[[c]]")


def test_nothing_reaches_the_terminal_that_could_command_it() -> None:
    evil = "a\x1b[2J\x07b\u202ec\x9bd\r"
    assert escape_controls(evil) == "a\\x1b[2J\\x07b\\u202ec\\x9bd\\x0d"
    assert escape_controls("tab\tline\nñ 🤖 日") == "tab\tline\nñ 🤖 日"
    for style in ({}, {"ids": True}):
        out = shown(row(evil), **style)
        assert not set(out) & set("\x1b\x07\u202e\x9b\r")


def test_long_documents_are_cut() -> None:
    out = shown(row("0123456789"), limit=4)
    assert "\n0123\n" in out and "6 more tokens" in out and "4567" not in out


def test_a_line_per_token() -> None:
    out = shown(row("é!", "--^"), ids=True).splitlines()
    assert [line.split() for line in out[-3:]] == [["0", "195", "-"], ["1", "169", "-", "é"], ["2", "33", "yes", "!"]]


def test_without_tokenizer_ids() -> None:
    assert list(lines(row("ab"), None, Style()))[-1] == "97 98"


# ---- samples


def test_parts_of_a_sample_end_where_attention_ends() -> None:
    tokens = np.array([5, 6, 0, 7, 8, 9, 9, 0, 0])
    pieces = (OriginPiece("a", 3, 2, 5, 7), OriginPiece("a", 1, 0, 2, 2))
    origin = Origin("a", "a", 0, pieces)
    sample = Sample(tokens, np.array([0, 5]), None, length=7)
    rules = CollateRules(8, eod=0, intra_document_masking=True)
    view = sample_view(sample, origin, rules, "t")
    assert [(part.start, part.end, part.padding) for part in view.parts] == [
        (0, 3, False),
        (3, 5, False),
        (5, 7, False),
        (7, 9, True),
    ]
    assert view.parts[0].title == "document 3 of a, its tokens 2..6 of 7" and view.parts[2].title == "document 1 of a"
    assert view.trained.tolist() == [False, True, True, True, True, False, True, False, False]
    assert view.real == 7
    plain = sample_view(sample, origin, CollateRules(8, eod=0), "t")
    assert [part.start for part in plain.parts] == [0, 5, 7]


# ---- datasets with what lies beside them


def test_companions_are_found(tmp_path: Path) -> None:
    for side, first in (("chosen", 1), ("rejected", 11)):
        write(tmp_path / f"p_{side}_document", [[first, 2, 3], [4, 5]])
        write(tmp_path / f"p_{side}_label_document", [[-100, 2, 3], [-100, 5]], np.int32)
    write(tmp_path / "p_chosen_reward_document", [[0.5], [-1]], np.float32)
    for side in ("chosen", "rejected"):
        found = open_documents(str(tmp_path / f"p_{side}_document"))
        assert found.names == ["chosen", "rejected"]
        views = found.views(0)
        assert [view.tokens[0] for view in views] == [1, 11]
        assert [view.trained.tolist() for view in views] == [[False, True, True]] * 2
        assert found.reward(1) == -1
    assert open_documents(str(tmp_path / "p_chosen_document"), labels="none").views(1)[0].trained.all()
    given = str(tmp_path / "p_rejected_label_document")
    assert open_documents(str(tmp_path / "p_chosen_document"), labels=given).labels is not None


def test_companions_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "x_chosen_document", [[1, 2], [3]])
    write(tmp_path / "x_rejected_document", [[1]])
    with pytest.raises(UserError, match="x_chosen_document.*2 .*x_rejected_document.*1"):
        open_documents(data)
    other = write(tmp_path / "labels", [[1], [3]], np.int32)
    with pytest.raises(UserError, match="labels"):
        open_documents(data, labels=other)
    write(tmp_path / "r_text_reward_document", [[1.0]], np.float32)
    with pytest.raises(UserError, match="r_text_reward_document.*float32"):
        open_documents(str(tmp_path / "r_text_reward_document"))
    write(tmp_path / "r_text_document", [[1], [2]])
    with pytest.raises(UserError, match="1 .*2 .*r_text_document"):
        open_documents(str(tmp_path / "r_text_document"))


def test_labels_cannot_be_decoded(tmp_path: Path) -> None:
    data, labels = write(tmp_path / "d", [[97, 98]]), str(tmp_path / "l")
    with IndexedDatasetBuilder(labels, np.int32) as builder:
        builder.add_document([-100, 98])
        finalize_with_manifest(builder, tokenizer=BYTES.fingerprint(), source=None)
    assert open_documents(data, BYTES).views(0)[0].tokens.tolist() == [97, 98]
    assert open_documents(labels).views(0)[0].tokens.tolist() == [-100, 98]  # as numbers
    with pytest.raises(UserError, match=r"document 0 of .*-100 to 98.*258"):
        open_documents(labels, BYTES).views(0)


# ---- pages


class Reader(HTMLParser):
    """What is on a page: the text of each <pre>, of trained tokens, hovers; tags must close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.pre: list[str] = []
        self.trained: list[str] = []
        self.hovers: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)
        if tag == "pre":
            self.pre.append("")
        if tag in ("b", "i") and "pre" in self.open:
            self.hovers.append(dict(attrs)["title"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.pre[-1] += data
            if self.open[-1] == "b":
                self.trained.append(data)


def test_a_page_holds_the_text_and_nothing_else(tmp_path: Path) -> None:
    text = "\n<script>alert('1')</script>&amp; \"q\" é🤖 </pre>\tend"
    view = row(text, "".join("^" if i % 3 else "-" for i in range(len(text.encode()))))
    path = tmp_path / "page.html"
    write_page(path, page("<title> & co", [("run", "<b>x")], [view, row("plain")], BYTES))
    source = path.read_text(encoding="utf-8")
    read = Reader(source)
    assert read.pre == ["\n" + text, "\nplain"]  # browsers drop the first line break of <pre>
    assert not read.tags & {"script", "link", "img", "iframe", "object"}
    assert not read.attributes & {"src", "onclick", "onload"}
    assert set(re.findall(r'href="(.)', source)) == {"#"}
    assert "://" not in source and "url(" not in source and "@import" not in source
    assert len(read.hovers) == len(text.encode()) + 5 and read.hovers[1].startswith(f"1: id {ord('<')}")
    marks = "".join(text for text in read.trained)
    trained = [char for i, char in enumerate(token_texts(BYTES, list(text.encode()))) if i % 3]
    assert marks == "".join(trained) + "plain"
    assert "prefers-color-scheme: dark" in source
    assert os.listdir(tmp_path) == ["page.html"]


def test_control_characters_are_pictures_on_a_page() -> None:
    source = "".join(page("t", [], [row("a\x00\x1b[0m\rb")], BYTES))
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", source)
    assert "␀" in source and "␛" in source


def test_statistics_of_a_page() -> None:
    padded = View("p", np.zeros(10, np.int64), np.arange(10) < 3, (Part("d", 0, 4), Part("padding", 4, 10, True)))
    source = "".join(page("t", [], [row("abcdef"), padded], BYTES))
    cells = re.findall(r"<tr>(.*?)</tr>", source)
    assert re.findall(r">([^<>]+)</td>", cells[-1]) == ["all", "2", "10", "90.0 %", "37.5 %", "2", "5.0"]
    assert source.count("<svg") == 3


def test_long_documents_are_cut_on_a_page() -> None:
    source = "".join(page("t", [], [row("0123456789")], BYTES, limit=4))
    assert Reader(source).pre == ["\n0123"] and "... 6 more tokens" in source and ">10</td>" in source


def test_a_page_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> object:
        yield "begin"
        raise ValueError("in the middle")

    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="middle"):
        write_page(path, broken())  # type: ignore[arg-type]
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]
    with pytest.raises(UserError, match="cannot write"):
        write_page(tmp_path / "none" / "page.html", ["x"])


def test_the_page_links_to_each_row(tmp_path: Path) -> None:
    data = open_documents(write(tmp_path / "d", [[97, 98], [99]])).data
    text = "".join(page("t", [], [document_view(data, i) for i in (0, 1)], BYTES))
    Reader(text)
    assert re.findall(r'<a href="#([^"]+)">', text) == ["row-1", "row-2", "row-1", "row-2"]
    assert re.findall(r'<section id="([^"]+)">', text) == ["row-1", "row-2"]
    legend = re.sub(r"<[^>]+>", "", text[text.index("<ul>") : text.index("</ul>")])
    assert legend.splitlines()[:2] == ["trained: the model learns to write it", "not trained: it is only read"]


@given(st.lists(st.integers(0, 5000) | st.floats(0, 1e6), max_size=30))
def test_bars_count_every_value(values: list[float]) -> None:
    found = histogram(values, "a <title>")
    counts = [int(n.replace(",", "")) for n in re.findall(r": ([\d,]+)</title>", found)]
    assert sum(counts) == len(values)
    tops = [float(y) for y in re.findall(r'<rect [^>]*y="([\d.]+)"', found)]
    assert found.index("<figcaption>") < found.index("<svg") and (not values or min(tops) == 14.0)
    marks = re.findall(r'text-anchor="end">([^<]+)</text>', found)  # of counts from 0 to the most, then of values
    assert marks[0] == "0" and (not values or f"{max(counts):,}" in marks)
    Reader(found)


def test_a_document_says_what_it_is(tmp_path: Path) -> None:
    data = open_documents(write(tmp_path / "d", [[97, 98], [99]])).data
    view = document_view(data, 1, reward=0.25)
    assert view.facts == (("tokens", "1"), ("trained", "all"), ("reward", "0.25"))
