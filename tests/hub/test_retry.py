"""Uploads to a Hub that is busy, breaks, cuts connections and loses answers, in this process."""

from __future__ import annotations

import argparse
import signal
import time
from hashlib import sha256
from types import SimpleNamespace

import pytest

from megatron.convert.cli import add_upload_flags
from megatron.errors import MachineError, UserError
from megatron.hub import push
from megatron.hub.push import check_hub, push_folder, verify_remote
from megatron.hub.retry import Retry, is_transient, redact, retry_of
from tests.hub.upload_server import TOKEN, UploadHub

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]

SOON = Retry(max_retries=2, min_wait=0, max_wait=0)
REPO = "lab/tiny"


@pytest.fixture
def waits(monkeypatch):
    """The seconds of every wait, none of which is waited."""
    seconds = []
    monkeypatch.setattr("megatron.hub.retry.time", SimpleNamespace(sleep=seconds.append, time=time.time))
    return seconds


@pytest.fixture(params=[True, False], ids=["xet", "lfs"])
def xet(request, monkeypatch):
    """Both ways in which the client commits; the files of these tests are too small for Xet's store."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", not request.param)
    return request.param


@pytest.fixture
def hub(monkeypatch):
    """A Hub that the client of this process talks to."""
    with UploadHub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def folder(tmp_path):
    """Small files, one of them in a folder."""
    made = tmp_path / "model"
    (made / "configs").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "configs/run.yml").write_text("seed: 1\n")
    return made


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("call", ["whoami", "repos/create", "/refs", "/commits/", "/branch/", "/revision/", "/tree/"])
@pytest.mark.parametrize("how", [{"status": 429, "headers": {"Retry-After": "0"}}, {"how": "cut"}], ids=["429", "cut"])
def test_calls_that_the_client_tries_once_are_tried_again(hub, folder, waits, monkeypatch, call, how):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # of the calls that it does try again
    hub.fail(call, **how)
    repo = check_hub("tiny", SOON)
    address = push_folder(folder, repo, revision="global_step7", retry=SOON)
    assert address == f"{hub.endpoint}/me/tiny/tree/global_step7"
    assert hub.models["me/tiny"].branches == {"main": {}, "global_step7": content(folder)}
    assert hub.models["me/tiny"].commits == 1 and hub.count(call) >= 2


@pytest.mark.parametrize("fault", [{"status": 429}, {"status": 503}, {"status": 412}, {"how": "cut"}, {"how": "lose"}])
def test_a_commit_that_fails_or_whose_answer_is_lost_is_made_once(hub, folder, waits, xet, monkeypatch, fault):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    hub.fail("/commit/", **fault)
    push_folder(folder, REPO, retry=SOON)
    assert hub.models[REPO].titles() == ["Upload model", "initial commit"]
    assert hub.models[REPO].branches["main"] == content(folder)


def test_the_wait_is_at_least_what_the_hub_asks_for(hub, folder, waits):
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 5000))
    hub.fail("repos/create", status=429, headers={"Retry-After": "300"})
    hub.fail("repos/create", status=429, headers={"ratelimit": '"api";r=0;t=450', "Retry-After": "3"})
    hub.fail("repos/create", status=503, headers={"Retry-After": later})
    push_folder(folder, REPO, retry=Retry(max_retries=3, min_wait=1, max_wait=2))
    assert [300 <= waits[0] < 335, 450 <= waits[1] < 500, 4990 <= waits[2] < 5510] == [True] * 3


def test_without_a_word_of_the_hub_waits_grow_between_the_limits(hub, folder, waits):
    hub.fail("repos/create", status=503, times=8)
    with pytest.raises(MachineError, match=rf"making {REPO} failed, after 7 retries: .*503.*the same command"):
        push_folder(folder, REPO, retry=Retry(max_retries=7, min_wait=10, max_wait=200))
    assert len(waits) == 7 and hub.count("repos/create") == 8
    assert all(10 <= seconds <= min(200, 10 * 2 ** (n + 1)) for n, seconds in enumerate(waits))
    assert len(set(waits)) == 7


def test_a_branch_that_moved_is_read_again_soon(hub, folder, waits):
    hub.fail("/commit/", status=412)
    push_folder(folder, REPO)
    assert len(waits) == 1 and waits[0] <= 4


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_is_not_tried_again(hub, folder, waits, status):
    hub.fail("/commit/", status=status)
    with pytest.raises(UserError, match=f"(?s){REPO}.*`python tools/ckpts/upload.py {folder} {REPO}`"):
        push_folder(folder, REPO)
    assert not waits and hub.count("/commit/") == 1


def test_a_wait_says_what_and_how_long_and_ends_at_once(hub, folder, monkeypatch, caplog):
    def interrupt(_: float) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("megatron.hub.retry.time", SimpleNamespace(sleep=interrupt, time=time.time))
    monkeypatch.setattr("megatron.hub.retry.random", SimpleNamespace(uniform=lambda low, high: high))
    hub.fail("repos/create", status=503)
    with caplog.at_level("INFO", "deepy"), pytest.raises(KeyboardInterrupt):
        push_folder(folder, REPO)
    assert len(caplog.messages) == 2 and hub.count("repos/create") == 1
    assert all(fact in caplog.messages[0] for fact in (REPO, "503", "4 min 0 s", "retry 1 of 20"))
    assert "the same command" in caplog.messages[1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_new_repositories_are_private_and_old_ones_keep_their_visibility(hub, folder, caplog):
    push_folder(folder, "lab/mine")
    push_folder(folder, "lab/open", private=False)
    assert (hub.models["lab/mine"].private, hub.models["lab/open"].private) == (True, False)
    with caplog.at_level("WARNING", "deepy"):
        push_folder(folder, "lab/open")
        push_folder(folder, "lab/mine", private=False)
    assert (hub.models["lab/mine"].private, hub.models["lab/open"].private) == (True, False)
    said = [message.split(";")[0] for message in caplog.messages if " exists " in message]
    assert said == ["lab/open exists and is public", "lab/mine exists and is private"]


def test_a_file_that_changes_during_the_upload_is_found(hub, folder, monkeypatch):
    (folder / "model.safetensors").write_bytes(b"a" * 1000)
    push_folder(folder, REPO)
    assert verify_remote(folder, REPO) == []
    compare = push.verify_remote

    def changed_before(*args, **options):
        (folder / "model.safetensors").write_bytes(b"b" * 1000)
        (folder / "config.json").write_text("[]")
        return compare(*args, **options)

    monkeypatch.setattr(push, "verify_remote", changed_before)
    with pytest.raises(UserError, match=r"config.json, model.safetensors \(2 in all\)"):
        push_folder(folder, REPO)
    assert verify_remote(folder, REPO, allow=["*.yml"]) == []


def test_secrets_are_not_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_short")
    shown = redact(f"a hf_short b hf_{'x' * 34} https://me:{'pass'}@host/a?X-Amz-Signature={'0f1e2d3c'}&b d")
    assert shown == "a *** b *** https://me:" + "***@host/a?X-Amz-Signature=***&b d"


def test_what_has_arrived_is_not_sent_again(hub, folder, waits, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    large = {f"model-{n}.safetensors": bytes([n]) * 200_000 for n in range(4)}
    for name, value in large.items():
        (folder / name).write_bytes(value)
    broken = sha256(large["model-2.safetensors"]).hexdigest()
    hub.fail(f"PUT /_lfs/{broken}", how="cut", bytes=50_000, times=6)  # as often as the client tries
    with pytest.raises(MachineError, match="after 0 retries"):
        push_folder(folder, REPO, retry=Retry(max_retries=0))
    assert hub.models[REPO].commits == 0 and len(hub.large) == 3
    before, cut = hub.sent_large(), hub.sent[f"/_lfs/{broken}"]
    assert before == 3 * 200_000 + cut and 6 * 50_000 <= cut < 6 * 200_000
    push_folder(folder, REPO, retry=SOON)
    assert hub.sent_large() - before == 200_000
    assert hub.models[REPO].branches["main"] == content(folder) and hub.models[REPO].commits == 1


def test_hundreds_of_files_are_few_commits(hub, folder, xet):
    for n in range(300):
        (folder / f"layer_{n:03}.json").write_text(f"[{n}]")
    push_folder(folder, REPO)
    assert hub.models[REPO].branches["main"] == content(folder) and hub.models[REPO].commits <= 2
    requests = len(hub.log)
    push_folder(folder, REPO)
    assert hub.models[REPO].commits <= 2 and len(hub.log) - requests <= 12


def test_tokens_and_signatures_are_in_no_message(hub, folder, waits, monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    (folder / "model.safetensors").write_bytes(b"a" * 1000)
    hub.fail("PUT /_lfs/", status=500, times=7)
    hub.fail("/commit/", status=403, error=f"{TOKEN} may not write")
    with caplog.at_level("DEBUG", "deepy"), pytest.raises(UserError) as refused:
        push_folder(folder, REPO, retry=SOON)
    text = f"{caplog.text}{refused.value}"
    assert hub.count("X-Amz-Signature=0123") >= 8 and "/_lfs/" in text and "Forbidden" in text
    assert "0123456789abcdef" not in text and TOKEN not in text
    assert "may not write" in str(refused.value)  # what the Hub says


@pytest.mark.parametrize(
    ("text", "transient"), [("client error (403 Forbidden)", False), ("server error (503 S", True)]
)
def test_the_status_in_an_error_of_xet_decides(text, transient):
    assert is_transient(ConnectionError(f"Request error: HTTP status {text}, domain: https://cas/v1/x")) == transient


@pytest.mark.parametrize("numbers", [(-1, 1, 2), (1, 3, 2), (1, -1, 2), (1, 1, float("inf")), (1, float("nan"), 2)])
def test_numbers_that_cannot_be_are_refused(numbers):
    with pytest.raises(UserError, match="--retry-min-wait"):
        Retry(*numbers)


def test_the_waits_are_those_of_the_documents_unless_asked() -> None:
    flags = argparse.ArgumentParser()
    add_upload_flags(flags)
    plain = flags.parse_args([])
    assert retry_of(plain) == Retry() == Retry(20, 120.0, 3600.0) and not plain.public
    asked = flags.parse_args(["--max-retries=3", "--retry-min-wait=0.5", "--retry-max-wait=9"])
    assert retry_of(asked) == Retry(3, 0.5, 9.0)
