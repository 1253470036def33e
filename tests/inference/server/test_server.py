"""OpenAI's client against our server: texts are those of transformers, streams add up, bad requests say why."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.convert.hf.export_hf import export
from megatron.inference.server.desk import Desk
from tests.inference.server.models import client_of, served, write_model

pytestmark = pytest.mark.cpu

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello, how are you?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve café 🤖"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I am fine."},
        {"role": "user", "content": "[INST]"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {}}}]


@dataclass
class Server:
    folder: Path
    address: str
    desk: Desk

    @cached_property
    def client(self) -> openai.OpenAI:
        return client_of(self.address)

    @cached_property
    def model(self) -> str:
        return self.client.models.list().data[0].id

    @cached_property
    def exported(self) -> tuple[Any, Any]:
        folder = export(self.folder / "checkpoints" / "global_step1", self.folder / "hf").folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model, AutoTokenizer.from_pretrained(folder)

    def expected(self, ids: list[int], tokens: int) -> list[int]:
        """What transformers writes, greedily, with the token that ended it."""
        model, tokenizer = self.exported
        given = torch.tensor([ids])
        found = model.generate(given, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.eos_token_id)
        return found[0, len(ids) :].tolist()

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> Any:
        given: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"return_token_ids": True}, **more}
        return self.client.chat.completions.create(model=self.model, messages=messages, **given)  # type: ignore[arg-type]

    def complete(self, prompt: Any, **more: Any) -> Any:
        given: dict[str, Any] = {"temperature": 0, "max_tokens": 12, **more}
        return self.client.completions.create(model=self.model, prompt=prompt, **given)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    keys = write_model(folder)
    with served(folder, keys) as (address, desk):
        yield Server(folder, address, desk)


def test_models(server: Server):
    (model,) = server.client.models.list().data
    assert model.id == "checkpoints/global_step1" == server.client.models.retrieve(model.id).id
    assert model.max_model_len == 256 and httpx.get(f"{server.address}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_a_chat_is_what_transformers_writes_after_the_template(server: Server, number: int):
    _, tokenizer = server.exported
    ids = tokenizer.apply_chat_template(CHATS[number], add_generation_prompt=True, return_dict=False)
    found = server.chat(CHATS[number])
    expected = server.expected(ids, 12)
    (choice,) = found.choices
    assert found.prompt_token_ids == ids and choice.token_ids == expected
    ended = choice.finish_reason == "stop"
    assert choice.message.content == tokenizer.decode(expected[: len(expected) - ended])
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), len(expected))


def test_a_completion_of_a_text_and_of_its_tokens_and_of_several(server: Server):
    _, tokenizer = server.exported
    texts = ["Hello, how", "a\n", " naïve"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = [tokenizer.decode(server.expected(ids, 12)) for ids in prompts]
    together = server.complete(texts).choices
    assert [choice.index for choice in together] == [0, 1, 2]
    found = [choice.text + "<|im_end|>" * (choice.finish_reason == "stop") for choice in together]
    assert found == expected
    by_ids = server.complete(prompts).choices
    assert [choice.text for choice in by_ids] == [choice.text for choice in together]
    assert server.complete(prompts[1]).choices[0].text == together[1].text


def test_log_probabilities_are_those_of_transformers(server: Server):
    model, tokenizer = server.exported
    found = server.chat(CHATS[0], logprobs=True, top_logprobs=4, temperature=1.0, seed=3).choices[0]
    ids = tokenizer.apply_chat_template(CHATS[0], add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = model(torch.tensor([ids + found.token_ids])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(dim=-1)
    assert len(found.logprobs.content) == len(found.token_ids)
    for row, token, told in zip(expected, found.token_ids, found.logprobs.content, strict=True):
        assert told.token == tokenizer.decode([token]) and told.logprob == pytest.approx(row[token].item(), abs=1e-3)
        best = row.topk(4)
        assert [one.logprob for one in told.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [one.token for one in told.top_logprobs] == [tokenizer.decode([one]) for one in best.indices]

    plain = server.complete("Hello", logprobs=2).choices[0]
    content = plain.logprobs
    assert "".join(content.tokens) == plain.text or "\ufffd" in "".join(content.tokens)
    assert all(max(top.values()) == own for top, own in zip(content.top_logprobs, content.token_logprobs, strict=True))


def test_a_stream_adds_up_to_the_answer(server: Server):
    whole = server.chat(CHATS[1], n=2, temperature=1.0, seed=5, logprobs=True)
    usage, texts, tokens, ids, ends = None, ["", ""], [[], []], [[], []], [None, None]
    stream = server.chat(
        CHATS[1], n=2, temperature=1.0, seed=5, logprobs=True, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert usage == whole.usage
    for choice in whole.choices:
        place = choice.index
        assert texts[place] == choice.message.content and ids[place] == choice.token_ids
        assert tokens[place] == choice.logprobs.content and ends[place] == choice.finish_reason
    assert texts[0] != texts[1]  # each choice has draws of its own
    assert [choice.message.content for choice in server.chat(CHATS[1], n=2, temperature=1.0, seed=6).choices] != texts

    plain = server.complete("Hello", max_tokens=20).choices[0].text
    parts = [choice.text for chunk in server.complete("Hello", max_tokens=20, stream=True) for choice in chunk.choices]
    assert "".join(parts) == plain and len(parts) > 3


def test_stop_strings_end_a_text_before_them(server: Server):
    free = server.complete("Hello, how", max_tokens=30).choices[0].text
    stop = next(free[i : i + 2] for i in range(4, len(free)) if "\ufffd" not in free[i : i + 2])
    for stream in (False, True):
        found = server.complete("Hello, how", max_tokens=30, stop=["never there", stop], stream=stream)
        choices = [choice for chunk in found for choice in chunk.choices] if stream else found.choices
        assert "".join(choice.text for choice in choices) == free.partition(stop)[0]
        assert choices[-1].finish_reason == "stop"


def test_requests_that_come_together_are_decoded_together_and_answered_as_alone(server: Server, monkeypatch):
    alone = [server.chat(messages, max_tokens=40).choices[0] for messages in CHATS]
    sizes, step = [], server.desk.decoder.step

    def counted(*work: Any) -> Any:
        found = step(*work)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(server.desk.decoder, "step", counted)
    with ThreadPoolExecutor(9) as pool:
        together = list(pool.map(lambda i: server.chat(CHATS[i % 3], max_tokens=40).choices[0], range(9)))
    assert [one.token_ids for one in together] == [alone[i % 3].token_ids for i in range(9)]
    assert max(sizes) > 3


def test_tool_calls(server: Server, monkeypatch):
    """The template is given the tools; what a model writes of calls (here by hand) is told as calls."""
    with_tools = server.chat(CHATS[0], tools=TOOLS)
    _, tokenizer = server.exported
    assert with_tools.prompt_token_ids == tokenizer.apply_chat_template(
        CHATS[0], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    call = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    written = [*tokenizer(call)["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")]
    monkeypatch.setattr(
        "megatron.inference.server.decoder._pick",
        lambda logits, rows: torch.tensor([written[len(row.text.completion.tokens)] for row in rows]),
    )
    for stream in (False, True):
        found = server.chat(CHATS[0], tools=TOOLS, max_tokens=100, stream=stream)
        if stream:
            deltas = [chunk.choices[0] for chunk in found]
            text, (calls,) = (
                "".join(d.delta.content or "" for d in deltas),
                [d.delta.tool_calls for d in deltas if d.delta.tool_calls],
            )
            reason = deltas[-1].finish_reason
        else:
            message = found.choices[0].message
            text, calls, reason = message.content, message.tool_calls, found.choices[0].finish_reason
        assert text == "Let me see.\n" and reason == "tool_calls"
        assert calls[0].function.name == "weather" and json.loads(calls[0].function.arguments) == {"city": "Köln"}
    untold = server.chat(CHATS[0], max_tokens=100)  # without tools it is text
    assert untold.choices[0].message.content == call and untold.choices[0].message.tool_calls is None


CHAT, TEXT = {"messages": CHATS[0]}, {"prompt": "a"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("chat/completions", b"{", 400, None, "not JSON"),
        ("chat/completions", b"[]", 400, None, "not a JSON object"),
        ("chat/completions", {}, 400, "messages", "messages"),
        ("chat/completions", {"messages": [{"content": "a"}]}, 400, "messages[0]", "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "text"),
        ("chat/completions", {**CHAT, "temprature": 1}, 400, "temprature", "not known"),
        ("chat/completions", {**CHAT, "logit_bias": {"5": 1}}, 400, "logit_bias", "not available"),
        ("chat/completions", {**CHAT, "temperature": 3}, 400, "temperature", "between 0 and 2"),
        ("chat/completions", {**CHAT, "top_logprobs": 3}, 400, "top_logprobs", "logprobs: true"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice", "auto"),
        ("chat/completions", {**CHAT, "model": "gpt-4"}, 404, "model", "no model 'gpt-4'"),
        ("completions", {**TEXT, "max_tokens": 0}, 400, "max_tokens", "between 1"),
        ("completions", {**TEXT, "n": 1000}, 400, "n", "between 1 and 128"),
        ("completions", {**TEXT, "stop": [""]}, 400, "stop", "stop"),
        ("completions", {**TEXT, "stream": 1}, 400, "stream", "true nor false"),
        ("completions", {"prompt": [5, 100000]}, 400, "prompt", "token id"),
        ("completions", {"prompt": [[1], "a", {}]}, 400, "prompt", "neither a text"),
        ("completions", {"prompt": "a b " * 300}, 400, "prompt", "the model takes 256"),
        ("completions", b"x" * (9 << 20), 413, None, "Large"),
        ("completions", b'{"prompt": "half \\ud83d", "stop": []}', 400, None, "surrogates"),
        ("nowhere", {}, 404, None, "POST /v1/nowhere"),
    ],
)
def test_bad_requests_say_why_in_openais_form(server: Server, path: str, body: Any, status: int, param, words: str):
    content = body if isinstance(body, bytes) else json.dumps(body)
    found = httpx.post(
        f"{server.address}/v1/{path}", content=content, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert words in error["message"] and error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


def test_web_pages_of_others_cannot_use_the_model(server: Server):
    plain = httpx.post(f"{server.address}/v1/completions", content=json.dumps(TEXT))
    assert plain.status_code == 415
    rebound = httpx.get(f"{server.address}/v1/models", headers={"Host": "evil.example"})
    assert rebound.status_code == 403 and "evil.example" in rebound.json()["error"]["message"]


def test_who_leaves_is_not_written_for_any_longer(server: Server, monkeypatch):
    monkeypatch.setattr(server.desk.decoder, "ends", frozenset())  # no text ends by itself
    written, step = [], server.desk.decoder.step

    def slow(*work: Any) -> Any:
        time.sleep(0.02)
        found = step(*work)
        written.extend(found)
        return found

    monkeypatch.setattr(server.desk.decoder, "step", slow)
    body = {**TEXT, "stream": True, "max_tokens": 240}
    with httpx.stream("POST", f"{server.address}/v1/completions", json=body, timeout=60) as stream:
        assert next(stream.iter_lines()).startswith("data: ")
    deadline = time.monotonic() + 30
    while server.desk.decoder._rows and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.desk.decoder._rows and 0 < len(written) < 200


def test_a_full_server_says_so_and_an_ending_one_finishes_what_it_has_begun(tmp_path: Path):
    keys = write_model(tmp_path)
    gate = threading.Event()
    with served(tmp_path, keys, serve_batch_size=2, maximum_tokens=30) as (address, desk):
        step = desk.decoder.step

        def slow(*work: Any) -> Any:
            gate.wait()
            return step(*work)

        desk.decoder.step = slow  # type: ignore[method-assign]
        with ThreadPoolExecutor(2) as pool:
            body = {"prompt": ["a", "b", "c"], "temperature": 0}
            first = pool.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=60)
            while len(desk._heard) < 3:
                time.sleep(0.01)
            many = httpx.post(f"{address}/v1/completions", json={"prompt": ["a"] * 20}, timeout=60)
            assert many.status_code == 503 and "waiting" in many.json()["error"]["message"]
            long = httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 31}, timeout=60)
            assert long.status_code == 400 and long.json()["error"]["param"] == "max_tokens"
            desk.stop()
            gate.set()
            answer = first.result().json()
        assert len(answer["choices"]) == 3 and all(choice["finish_reason"] for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] <= 90
