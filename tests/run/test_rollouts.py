"""Runs that train on their own completions: the same at any layout, after a stop, and whoever gives the rewards."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.checkpoint.find import find_checkpoint
from megatron.data.sample import IGNORE
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.inference.data_servers import DataServers
from megatron.inference.generate import generate
from megatron.inference.json_service import judge_at
from megatron.inference.reward_model import RewardModel
from megatron.inference.rewards import Rollout
from megatron.inference.rollouts import Completed
from megatron.inference.team import Control
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.plugin_key import import_plugins
from megatron.plan.memory import bytes_beside
from tests.distributed import run_distributed
from tests.documented import ROOT
from tests.plugins.helpers import remembered
from tests.tokenizer.vocabularies import byte_level, write_json
from tests.training.runs import Faults, process_of, run, train
from tests.training.tiny import LLAMA, Layout

pytestmark = pytest.mark.cpu

KEYS: dict[str, Any] = {
    **LLAMA,
    "tokenizer_type": "HFTokenizer",
    "train_impl": "grpo",
    "kl_impl": "k3",
    "rollouts_per_prompt": 4,
    "rollout_tokens": 6,
    "rollout_temperature": 0.9,
    "train_batch_size": 8,
    "train_iters": 4,
    "checkpoint_factor": 2,
    "seq_length": 16,
    "reward": "vowels",
}
PLUGIN = """
from megatron.inference.rewards import REWARDS

@REWARDS.register("vowels")
def vowels(rollout):
    if rollout.fields.get("hard") and len(rollout.completion) % 3 == 0:
        raise ValueError("too hard")
    return sum(letter in "aeiou" for letter in rollout.completion) + 0.1 * len(rollout.completion)
"""
PROMPTS = [{"prompt": text} for text in ("hello", " two words", "x", "four 4")] + [{"prompt": "y", "hard": True}]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rollouts")
    declared = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    vocab_file = write_json(folder / "tokenizer" / "tokenizer.json", byte_level(), tokenizer_config=declared)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in PROMPTS))
    (folder / "reward.py").write_text(PLUGIN)
    given = {"vocab_file": str(vocab_file), "rollout_prompts": [str(folder / "prompts.jsonl")]}
    return {**KEYS, **given, "plugins": [str(folder / "reward.py")]}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What plugins registered, in this process."""
    with remembered():
        yield


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


# Of each objective: what it reads besides its defaults, and layouts that do not divide its batch as one rank does.
CASES: list[tuple[str, dict[str, Any], list[Layout]]] = [
    ("grpo", {"kl_impl": "k3"}, [Layout(pp=2, dp=2, micro=1), Layout(dp=2, zero=3)]),
    ("rloo", {}, [Layout(tp=2, sequence_parallel=True, micro=4), Layout(dp=2, micro=1, engine="native")]),
    ("reinforce", {"kl_impl": "full"}, [Layout(pp=2, tp=2, micro=4)]),
]


@pytest.mark.parametrize(("impl", "more", "layouts"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_any_layout_draws_the_same_and_learns_the_same(
    tmp_path: Path, keys: dict[str, Any], impl: str, more: dict[str, Any], layouts: list[Layout]
) -> None:
    keys = {**keys, "train_impl": impl, "kl_div_beta": 0.5, "rollout_log": 8, **more}
    if impl == "rloo":
        del keys["kl_impl"]
    (alone,) = run({**keys, "save": str(tmp_path / "alone")}, Layout())
    drawn = lines(tmp_path / "alone")
    assert not alone.error and alone.steps == [1, 2, 3, 4] and len({line["text"] for line in drawn}) > 20
    logged = [metrics for _, metrics in alone.logged]
    assert all(metrics["train/sampler_difference"] < 1e-5 for metrics in logged)
    # The reference is what the run began with: the distance from it is 0 at first and grows.
    assert abs(logged[0]["train/kl"]) < 1e-6 < abs(logged[-1]["train/kl"])
    assert logged[-1]["rollout/failed"] > 0
    for layout in layouts:
        save = tmp_path / layout.name
        for report in run({**keys, "save": str(save)}, layout):
            assert not report.error
            assert report.loss == pytest.approx(alone.loss, rel=1e-5, abs=1e-6)
            assert report.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
        for one, other in zip(lines(save), drawn, strict=True):
            assert one["text"] == other["text"] and one["reward"] == other["reward"]


def test_prompts_that_are_held_out(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Completed alike at any layout, and nothing of the training moves; a run that goes on has the later ones."""
    (held_out := tmp_path / "held_out.jsonl").write_text("".join(json.dumps(one) + "\n" for one in PROMPTS[1:4]))
    (plain,) = run({**keys, "save": str(tmp_path / "plain")}, Layout())
    more = {**keys, "rollout_valid_prompts": [str(held_out)], "eval_interval": 3}
    (alone,) = run({**more, "save": str(tmp_path / "alone")}, Layout())
    assert (alone.loss, alone.grad_norm) == (plain.loss, plain.grad_norm) and not plain.evaluated
    assert [(step, split) for step, split, _ in alone.evaluated] == [(step, "validation") for step in (0, 3, 4)]
    for _, _, metrics in alone.evaluated:
        assert metrics["reward"] > 0.1 * metrics["length"] / 2 > 0 and 0 <= metrics["finished"] <= 1
    for report in run({**more, "save": str(tmp_path / "other")}, Layout(tp=2, dp=2)):
        for one, other in zip(report.evaluated, alone.evaluated, strict=True):
            assert one[:2] == other[:2] and one[2] == pytest.approx(other[2], rel=1e-6)
    resumed = {"load": str(tmp_path / "alone"), "iteration": 2, "save": str(tmp_path / "on")}
    (later,) = run({**more, **resumed}, Layout())
    assert later.evaluated == alone.evaluated[1:]


def written_at_a_time(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> list[int]:
    """How many completions a rank writes at a time, each time of a run."""
    found: list[int] = []

    def watched(stage: Any, prompts: Sequence[Any], *more: Any, **named: Any) -> Any:
        found.append(len(prompts))
        return generate(stage, prompts, *more, **named)

    with mock.patch("megatron.inference.rollouts.generate", watched):
        train(rank, world, keys, layout, Faults())
    return found


def test_many_prompts_that_are_held_out_take_no_more_memory_than_a_step(tmp_path: Path, keys: dict[str, Any]) -> None:
    (held_out := tmp_path / "held_out.jsonl").write_text("".join(json.dumps(PROMPTS[0]) + "\n" for _ in range(20)))
    keys = {**keys, "rollout_valid_prompts": [str(held_out)], "train_iters": 1, "eval_interval": 1}
    for sizes in run_distributed(written_at_a_time, 2, keys, Layout(dp=2), timeout=110):
        assert sizes == [4, 4, 2, 4, 4, 4, 2]  # of 10 before the step, of the 8 of the step, of 10 behind it


RESUMED: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(pp=2), {"lora_r": 2, "precision": "bfloat16"}),
    (Layout(dp=2, zero=1, micro=1), {"train_impl": "reinforce"}),
]


@pytest.mark.parametrize(("layout", "more"), RESUMED, ids=("lora-bf16", "baseline"))
def test_a_resumed_run_goes_on_where_it_was(
    tmp_path: Path, keys: dict[str, Any], layout: Layout, more: dict[str, Any]
) -> None:
    """Also between two steps that train on the same completions, and with the baseline of the steps before; of adapters
    the reference is the model without them."""
    keys = {**keys, "rollout_steps": 2, "train_iters": 6, "rollout_log": 8, **more}
    keys |= {"hidden_dropout": 0.1, "checkpoint_factor": 3}
    straight = run({**keys, "save": str(tmp_path / "a")}, layout)
    again = {"load": str(tmp_path / "a"), "iteration": 3, "save": str(tmp_path / "b")}
    resumed = run({**keys, **again}, layout)
    for before, after in zip(straight, resumed, strict=True):
        assert not before.error and not after.error
        assert before.steps == [1, 2, 3, 4, 5, 6] and after.steps == [4, 5, 6]
        assert after.loss == before.loss[3:] and after.grad_norm == before.grad_norm[3:]
        assert before.state and after.state == before.state
        # Nothing but bf16 and dropout is between the sampler, the trainer and the reference.
        assert before.logged[0][1]["train/kl"] < 0.01 and before.logged[0][1]["train/sampler_difference"] < 0.1
    first, second = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert second == [line for line in first if line["step"] == 4] and {line["step"] for line in first} == {0, 2, 4}


def test_a_stop_does_not_wait_for_the_completions(tmp_path: Path, keys: dict[str, Any]) -> None:
    """It ends the run before the step that they are for, which is the first of the next start."""
    layout, keys = Layout(pp=2, dp=2), {**keys, "rollout_log": 8}
    straight = run({**keys, "save": str(tmp_path / "a")}, layout)
    keys |= {"save": str(tmp_path / "b")}
    for report in run(keys, layout, Faults(signal=(3, 2, signal.SIGTERM))):
        assert report.steps == [1] and report.exit_code == 3 and "completions" in report.error
    for before, after in zip(straight, run(keys, layout), strict=True):
        assert after.steps == [2, 3, 4] and after.loss == before.loss[1:] and after.state == before.state
    assert lines(tmp_path / "b") == lines(tmp_path / "a")


def test_the_toy_task_is_learnt(tmp_path: Path) -> None:
    """Whose first completions are random characters."""
    with contextlib.chdir(ROOT):
        given = NeoXArgs.from_files([str(ROOT / "post-training/toy-grpo.yml")], ["train_iters=45"]).to_dict()
        (report,) = run({**given, "save": str(tmp_path), "tokenizer_type": "CharLevelTokenizer"})
    assert not report.error
    rewards = [metrics["rollout/reward"] for _, metrics in report.logged]
    assert rewards[0] < 0.05 and rewards[-1] > 0.15


def test_other_prompts_are_refused_on_resume(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert not run({**keys, "save": str(tmp_path), "train_iters": 2})[0].error
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "other"}))
    (report,) = run({**keys, "save": str(tmp_path), "rollout_prompts": [str(tmp_path / "other.jsonl")]})
    assert report.exit_code == 2 and "rollout_prompts" in report.error and "allow_config_changes" in report.error


def test_the_reference_is_never_the_weights_of_the_middle_of_a_run(tmp_path: Path, keys: dict[str, Any]) -> None:
    keys, kept = {**keys, "train_iters": 4, "kl_div_beta": 0.5}, str(tmp_path / "kept")
    assert not run({**keys, "save": kept, "train_iters": 2})[0].error
    (report,) = run({**keys, "save": kept, "no_load_optim": True})
    assert report.exit_code == 2 and re.search("no_load_optim: .*kl_div_beta.*finetune: true", report.error)
    (report,) = run({**keys, "init_from": {"path": kept}, "save": str(tmp_path / "began")})
    assert not report.error and report.steps == [3, 4]
    first, last = (metrics["train/kl"] for _, metrics in report.logged)
    assert abs(first) < 1e-6 < abs(last)
    without = {**keys, "save": str(tmp_path / "without")}
    assert not run({**without, "kl_div_beta": 0.0, "train_iters": 2})[0].error
    (report,) = run(without)
    assert report.exit_code == 2 and re.search("kl_div_beta: 0.5 .*finetune: true", report.error)


def write_pairs(folder: Path) -> dict[str, Any]:
    """Keys of pairs of which the better answer has lower ids, labelled where a reward is read."""
    rng, found = np.random.RandomState(3), {}
    for side, first in (("pos", 1), ("neg", 150)):
        texts, labels = folder / f"{side}_document", folder / f"{side}_label_document"
        with IndexedDatasetBuilder(texts, np.uint16) as text, IndexedDatasetBuilder(labels, np.int32) as label:
            for _ in range(40):
                tokens = rng.randint(first, first + 100, 9).tolist()
                text.add_document([*tokens, 0])
                label.add_document([IGNORE] * 9 + [0])
            text.finalize(), label.finalize()
        found |= {f"{side}_train_data_paths": [str(texts)], f"{side}_train_label_data_paths": [str(labels)]}
    return {**found, "train_impl": "rm", "dataset_impl": "pairwise", "pack_impl": "unpacked", "eod_mask_loss": False}


def judge(rank: int, world: int, keys: dict[str, Any]) -> tuple[list[float | None], list[float], tuple[float, int]]:
    """Rewards of texts that are judged together, and of each by itself; bytes of the weights, planned and there."""
    process = process_of(rank, keys, Layout())
    model = RewardModel(
        find_checkpoint(keys["reward_model"]), process.args, process.tokenizer, Control(process.state), 3
    )
    texts = [Completed([5, 6], [7], None), Completed([9], [200, 3, 4, 0], None), Completed([1], [2], None)]
    texts += [Completed([80], [90, 100], None), Completed([3], [], None)]
    alone = []
    for one in texts[:4]:
        tokens = torch.tensor([[*one.prompt, *one.tokens]])
        out = model.stage.run(tokens, torch.arange(tokens.shape[1])[None])
        alone.append(float(out.logits()[0, -1]))
    weights = {p for layer in model.stage.layers for p in layer.parameters()}
    return model.judge(texts), alone, (bytes_beside(process.args), sum(p.nbytes for p in weights))


def test_rewards_of_a_reward_model(tmp_path: Path, keys: dict[str, Any]) -> None:
    """At another layout than it was trained at, and the same at all."""
    rewards = {name: value for name, value in keys.items() if name not in ("rollout_prompts", "plugins", "reward")}
    folder = str(tmp_path / "rm")
    (trained,) = run({**rewards, **write_pairs(tmp_path), "save": folder, "kl_impl": "mse"})
    assert not trained.error
    more = {"reward": None, "plugins": [], "reward_model": folder, "rollout_log": 8}
    together, alone, (planned, there) = run_distributed(judge, 1, {**keys, **more})[0]
    assert planned == pytest.approx(there, rel=0.02) and there > 10_000
    assert together[:4] == pytest.approx(alone, rel=1e-5) and together[4] is None and len(set(alone)) == 4
    for name, layout in (("a", Layout()), ("b", Layout(pp=2, tp=2))):
        reports = run({**keys, **more, "save": str(tmp_path / name), "train_iters": 2}, layout)
        assert not any(report.error for report in reports)
    for one, other in zip(lines(tmp_path / "a"), lines(tmp_path / "b"), strict=True):
        assert one["text"] == other["text"] and one["reward"] == pytest.approx(other["reward"], rel=1e-4)
    (report,) = run({**keys, **more, "reward_model": str(tmp_path / "a")})
    assert report.exit_code == 2 and "reward_model: " in report.error and "train_impl: rm" in report.error


# -- services ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def service(answer: Callable[[Any], bytes]) -> Iterator[tuple[int, list[Any]]]:
    """An HTTP server on this machine, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(question)
            content = answer(question)
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # whoever asked has lost patience
                self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_rewards_of_a_service(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Those that it does not give, or not in time, are counted."""

    def answer(question: Any) -> bytes:
        rollouts = question["rollouts"]
        if len(asked) == 2:
            time.sleep(1.5)
        if len(asked) == 3:
            return b"[1, 2"
        return json.dumps({"rewards": [len(one["completion"]) for one in rollouts[:-1]] + [None]}).encode()

    with service(answer) as (port, asked):
        more = {"reward": None, "reward_url": f"http://127.0.0.1:{port}", "reward_timeout": 0.8}
        (report,) = run({**keys, **more, "save": str(tmp_path)})
    assert not report.error and len(asked) == 4
    assert [metrics["rollout/failed"] for _, metrics in report.logged] == [1, 9, 17, 18]
    assert report.skipped == [False, True, True, False]
    first = asked[0]["rollouts"][0]
    assert set(first) == {"prompt", "completion", "finished", "fields"} and first["prompt"] in {
        one["prompt"] for one in PROMPTS
    }


@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n900\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"rewards": [10**400]}).encode(),
    ],
    ids=["status", "cut", "huge"],
)
def test_an_answer_that_is_none_is_counted(answer: bytes) -> None:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16), connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        thread = threading.Thread(target=serve)
        thread.start()
        assert judge_at(f"http://127.0.0.1:{server.getsockname()[1]}", 10.0)([Rollout("a", "b")]) == [None]
        thread.join()


def test_every_prompt_of_an_epoch_is_asked(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Whatever `rollout_steps` is and becomes, and whatever is skipped: of a group its first step, or the whole."""

    def answer(question: Any) -> bytes:
        return json.dumps({"rewards": [len(one["completion"]) for one in question["rollouts"]]}).encode()

    def prompts(**more: Any) -> list[str]:
        with service(answer) as (port, asked):
            (report,) = run({**keys, **more, "reward": None, "reward_url": f"http://127.0.0.1:{port}"})
        assert not report.error
        return [one["prompt"] for question in asked for one in question["rollouts"][::4]]

    keys = {**keys, "rollout_steps": 2, "train_iters": 6, "lr_decay_iters": 6, "checkpoint_factor": 3, "rollout_log": 1}
    first = prompts(save=str(tmp_path / "a"))
    later = prompts(load=str(tmp_path / "a"), iteration=3, save=str(tmp_path / "b"), rollout_steps=1)
    assert len(first) == 6 and first[4:] == later[:2]  # those of step 3 were drawn before it
    turns = first + later[2:]
    assert set(turns[:5]) == set(turns[5:]) == {one["prompt"] for one in PROMPTS}
    skipped = prompts(save=str(tmp_path / "c"), train_iters=8, skip_steps=[[2, 3], [4, 6]])
    assert skipped == turns[:4] + turns[6:8]
    assert [line["step"] for line in lines(tmp_path / "c")] == [0, 3, 6]


ONLINE = {"dataset_impl": "online", "train_impl": "reinforce", "reinforce_leave_one_out": True, "reward": None}


def test_completions_of_data_servers(tmp_path: Path, keys: dict[str, Any]) -> None:
    """GPT-NeoX's keys: two servers, each asked for its part of a step; at another layout the same."""

    def answer(question: Any) -> bytes:
        assert question["split"] == "train"
        ids = [[3 + question["step"], 9], [4], [7, 7, 8, 1]][: question["samples"] - 1]
        groups = [{"prefix": [5, 6], "completions": ids, "rewards": [1.0, 2.0, 6.0][: len(ids)]}]
        return json.dumps([*groups, {"prefix": [8], "completions": [[1]], "rewards": [3.0]}]).encode()

    keys = {name: value for name, value in keys.items() if name not in ("rollout_prompts", "plugins")} | ONLINE
    with service(answer) as (first, asked), service(answer) as (second, _):
        servers = {"online_dataserver_ips": "127.0.0.1", "online_dataserver_ports": [first, second]}
        (alone,) = run({**keys, **servers})
        reports = run({**keys, **servers}, Layout(dp=2, micro=2))
    assert not alone.error and [one["samples"] for one in asked] == [4] * 8
    assert [one["step"] for one in asked] == [0, 1, 2, 3] * 2
    assert alone.logged[0][1]["rollout/reward"] == 3.0 and alone.logged[-1][1]["rollout/failed"] == 0
    for report in reports:
        assert report.loss == pytest.approx(alone.loss, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "answer",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # a pickle
        b"[" * 10_000,
        b"{}",
        b'[{"prefix": [1], "completions": [[9999999]], "rewards": [1]}]',
        b'[{"prefix": [1], "completions": [[true]], "rewards": [1]}]',
        b'[{"prefix": [], "completions": [[1]], "rewards": [1]}]',
        b'[{"prefix": [1], "completions": [[1], []], "rewards": [1, 2]}]',
        b'[{"prefix": [1], "completions": [[1]], "rewards": ["1", 2]}]',
        b'[{"prefix": [1], "completions": [[1]], "rewards": [1]}]',  # too few
        b"\xff\xfe",
    ],
    ids=range(10),
)
def test_what_a_data_server_says_is_only_read(answer: bytes) -> None:
    with service(lambda question: answer) as (port, _):
        assert DataServers("127.0.0.1", port, 5.0, 100).fetch("train", 0, 8) == []


def test_a_run_without_rewards_ends(keys: dict[str, Any]) -> None:
    keys = {name: value for name, value in keys.items() if name not in ("rollout_prompts", "plugins")} | ONLINE
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        servers = {"online_dataserver_ips": "127.0.0.1", "online_dataserver_ports": closed.getsockname()[1]}
        (report,) = run({**keys, **servers, "train_iters": 20})
    assert report.exit_code == 2 and "10 steps in a row" in report.error and report.steps == list(range(1, 10))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rollout_prompts": None}, "rollout_prompts: must be set"),
        ({"reward": None}, "reward: must be set"),
        ({"reward_url": "http://localhost:1"}, "reward: one is enough: reward and reward_url are set"),
        ({"rollouts_per_prompt": 3}, "rollouts_per_prompt: is 3; train_batch_size: 8.*6 or 9"),
        ({"rollouts_per_prompt": 1}, "rollouts_per_prompt: .*2 or more"),
        ({"train_impl": "normal"}, "rollout_prompts: is not read by train_impl: normal"),
        ({"data_path": "x"}, "data_path: .*completions"),
        ({"train_impl": "rloo"}, "kl_impl: is not read by rloo"),
        ({"ema_decay": 0.9}, "ema_decay: "),
        ({"train_epochs": 1, "train_iters": None}, "train_epochs: .*set train_iters"),
        (
            {"moe_num_experts": 4, "moe_router_type": "topk", "moe_bias_balancing_rate": 0.1},
            "moe_bias_balancing_rate: .*kl_div_beta: 0",
        ),
        ({"rollout_temperature": 0.0}, "rollout_temperature: must be above 0"),
        ({"reward": "vowel"}, "reward: .*vowels"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_does_not_fit_is_said(keys: dict[str, Any], wrong: dict[str, Any], message: str) -> None:
    import_plugins(keys["plugins"], lambda name: "test")
    with pytest.raises(UserError) as error:
        derive(NeoXArgs.from_saved({**keys, **Layout().keys(), **wrong}), Facts(vocab_size=266, num_devices=1))
    assert re.search(message, str(error.value))
