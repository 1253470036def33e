"""The page at / in a real browser: a conversation, what it is asked for, and the probabilities of its tokens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.inference.server.models import served, write_model

pytestmark = pytest.mark.cpu

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if CHROMIUM is None:
        missing = "no chromium on PATH (CONTRIBUTING.md, Tests)"
        pytest.fail(missing) if os.environ.get("DEEPY_REQUIRE_BROWSER") == "1" else pytest.skip(missing)
    with sync_playwright() as driver:
        # As root, in a container, chromium has no sandbox of its own.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def test_a_conversation_with_probabilities(page: Page, tmp_path: Path):
    problems, sent, foreign = [], [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    keys = write_model(tmp_path)
    with served(tmp_path, keys) as (address, _):
        page.on("request", lambda request: None if request.url.startswith(address) else foreign.append(request.url))
        page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
        page.goto(address)
        expect(page.locator("#model")).to_contain_text("checkpoints/global_step1, 256 positions")
        page.fill("#system", "Be <b>brief</b>.")
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "9")
        page.fill("#text", "Hello <img src=x onerror=alert(1)>")
        page.press("#text", "Enter")
        expect(page.locator(".turn.assistant small")).to_contain_text(" tokens, ")
        assert page.locator(".turn.user").inner_text() == "Hello <img src=x onerror=alert(1)>"
        parts = page.locator(".turn.assistant .tok")
        text = "".join(parts.all_text_contents())
        assert text
        share = float(parts.first.get_attribute("data-probability"))
        assert 0 < share < 1 and "background: rgba" in parts.first.get_attribute("style")
        parts.first.hover()
        tip = page.locator("#tip")
        expect(tip).to_be_visible()
        rows = tip.inner_text().split("\n\n")[0].splitlines()  # of the part's first token: the likeliest five
        assert len(rows) == 5 and rows[0].startswith("▸") and f"{100 * share:.1f} %" in tip.inner_text()

        page.fill("#text", "and now?")
        page.click("#send")
        expect(page.locator(".turn.assistant small")).to_have_count(2)
        roles = [[turn["role"] for turn in body["messages"]] for body in sent]
        assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
        assert sent[0]["messages"][0]["content"] == "Be <b>brief</b>." and sent[1]["messages"][2]["content"] == text
        assert sent[0]["temperature"] == 0 and sent[0]["max_tokens"] == 9 and sent[0]["logprobs"] is True

        page.uncheck("#colours")
        expect(parts.first).to_have_css("background-color", "rgba(0, 0, 0, 0)")
        page.fill("#max_tokens", "0")  # the server's message is shown
        page.fill("#text", "once more")
        page.click("#send")
        expect(page.locator(".turn.error")).to_contain_text("max_tokens is not a whole number")
        assert [problem for problem in problems if "400" not in problem] == [] and foreign == []
        page.click("#reset")
        expect(page.locator(".turn")).to_have_count(0)

        # A conversation that is left while the model answers leaves nothing to the next one.
        page.fill("#max_tokens", "200")
        page.fill("#text", "left")
        page.click("#send")
        expect(page.locator(".turn.assistant .tok").first).to_be_visible()
        page.click("#reset")
        expect(page.locator("#send")).to_be_enabled()
        page.fill("#max_tokens", "3")
        page.fill("#text", "begun")
        page.click("#send")
        expect(page.locator(".turn.assistant small")).to_contain_text(" tokens, ")
        assert [turn["content"] for turn in sent[-1]["messages"]] == ["Be <b>brief</b>.", "begun"]


def test_a_model_without_a_template_continues_texts(page: Page, tmp_path: Path):
    keys = write_model(tmp_path)
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": None}))
    with served(tmp_path, keys, maximum_tokens=6) as (address, _):
        page.goto(address)
        expect(page.locator("#model")).to_contain_text("no chat template")
        expect(page.locator("#system")).to_be_hidden()
        expect(page.locator("#max_tokens")).to_have_value("6")  # the most that the server allows
        page.fill("#text", "Hello")
        page.press("#text", "Enter")
        expect(page.locator(".turn.assistant small")).to_contain_text(" tokens, ")
        page.locator(".turn.assistant .tok").first.hover()
        expect(page.locator("#tip")).to_be_visible()
