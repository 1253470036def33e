"""lm-evaluation-harness scores our model as it scores its Hugging Face copy with its own adapter, at every layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers.processors import TemplateProcessing

from megatron.checkpoint.find import open_checkpoint
from megatron.errors import UserError
from megatron.inference.build import build_stage
from megatron.inference.evaluate import stamped, write_results
from megatron.inference.evaluation_team import evaluation_team
from megatron.inference.exported_text import as_exported
from megatron.inference.harness import HarnessModel, Request
from megatron.inference.scoring import score
from megatron.inference.tasks import Tasks, flat_metrics, table
from megatron.inference.team import Control
from megatron.neox_arguments.schema_data import TokenizerConfig
from megatron.neox_arguments.schema_train import GenerationConfig
from megatron.tokenizer import build_tokenizer
from tests.distributed import run_distributed
from tests.inference.local_tasks import CHOICE, write_task, write_tasks
from tests.inference.models import EOD, GPT_NEOX, Layout, inference_args, make_checkpoint, stage_of, state_of
from tests.tokenizer.vocabularies import byte_level, write_json

pytestmark = pytest.mark.cpu

KEYS = {**GPT_NEOX, "num_kv_heads": 4, "tokenizer_type": "HFTokenizer", "train_micro_batch_size_per_gpu": 3}
LONGEST = KEYS["max_position_embeddings"]
BOS = "<|begin|>"

PAIRS = [
    ("hello", " world"),
    ("hello ", "world"),  # the space belongs to the continuation
    ("hello  \n ", "world hello"),
    ("hello", " w"),
    ("hello", " hello"),  # the same context again: one pass
    ("", "hello world"),
    ("", "<|endoftext|>hello"),  # begins with what would be put before it
    ("hel", "lo wor"),  # together other tokens than apart: split after as many as the context has
    ("x" * 100, " too long by far"),
    ("naïve 中", "文 🤖"),
]
TEXTS = ["hello world", "h", "hello world, " * 30, "naïve 中文 🤖 é\u0301"]
PROMPTS = [
    ("hello world", {"until": ["\n\n", "l"], "max_gen_toks": 20}),
    ("hello", {"until": "o", "do_sample": False, "max_gen_toks": 12}),  # a plain string, not a list of letters
    ("x", {"max_gen_toks": 9}),
    ("y" * 200, {"until": [], "max_gen_toks": 5, "temperature": 0.0}),
]


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, item, i) for i, item in enumerate(arguments)]


def all_answers(model: Any) -> dict[str, list[Any]]:
    return {
        "loglikelihood": model.loglikelihood(requests("loglikelihood", PAIRS)),
        "rolling": model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS])),
        "generate": model.generate_until(requests("generate_until", PROMPTS)),
    }


def assert_same(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> None:
    for (value, greedy), (expected, expected_greedy) in zip(one["loglikelihood"], other["loglikelihood"], strict=True):
        assert value == pytest.approx(expected, abs=1e-4, rel=1e-5) and greedy == expected_greedy
    assert one["rolling"] == pytest.approx(other["rolling"], abs=1e-4, rel=1e-5)
    assert one["generate"] == other["generate"]


class Model:
    """A checkpoint of a model with a real tokenizer, its Hugging Face copy, and the harness's adapters for both."""

    def __init__(self, folder: Path, bos: bool, single: str = f"{BOS} $A") -> None:
        """`single`: what the tokenizer makes of every text, if it has a begin token."""
        tokenizer, declared = byte_level(), {"eos_token": "<|endoftext|>"}
        if bos:
            tokenizer.add_special_tokens([BOS])
            number = tokenizer.token_to_id(BOS)
            tokenizer.post_processor = TemplateProcessing(
                single=single, special_tokens=[(BOS, number), ("<|endoftext|>", 0)]
            )
            declared["bos_token"] = BOS
        declared["tokenizer_class"] = "PreTrainedTokenizerFast"
        vocab_file = write_json(folder / "tokenizer.json", tokenizer, tokenizer_config=declared)
        self.keys = {**KEYS, "vocab_file": str(vocab_file)}
        self.tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HFTokenizer", vocab_file=str(vocab_file)))
        self.checkpoint = make_checkpoint(folder, self.keys, Layout(tp=2), self.tokenizer.vocab_size)
        self.folder = folder

    def ours(self, rank: int = 0, layout: Layout | None = None) -> HarnessModel:
        layout = layout or Layout()
        state = state_of(rank, layout)
        args = inference_args(self.keys, layout, self.tokenizer.vocab_size)
        stage = build_stage(args, state, self.tokenizer, open_checkpoint(self.checkpoint))
        exported = as_exported(self.tokenizer, None)
        return HarnessModel(evaluation_team(Control(state), stage, exported, batch=3, seed=1), self.tokenizer, exported)

    def theirs(self) -> Any:
        from lm_eval.models.huggingface import HFLM
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from megatron.convert.hf.export_hf import export

        exported = export(self.checkpoint, self.folder / "hf", overwrite=True).folder
        model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(exported)
        # Its cache of logits reads the wrong positions for texts that are split at different places (0.4.13).
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, device="cpu", logits_cache=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), bos=False)


@pytest.mark.parametrize("bos", [False, True])
def test_equals_the_harness_own_adapter_on_the_exported_copy(model: Model, tmp_path: Path, bos: bool):
    model = Model(tmp_path, bos=True) if bos else model
    ours, theirs = all_answers(model.ours()), all_answers(model.theirs())
    assert_same(ours, theirs)
    # Only a moved space makes no difference.
    assert len({round(value, 3) for value, _ in ours["loglikelihood"]}) == len(PAIRS) - 1
    assert max(map(len, ours["generate"])) > 5


def test_the_end_that_a_tokenizer_adds_is_not_between_context_and_continuation(tmp_path: Path):
    """The harness's own adapter leaves it there (a continuation's first token is then never scored), so it is given
    the tokenizer without its end; a whole text has its end, there too."""
    model = Model(tmp_path, bos=True, single=f"{BOS} $A <|endoftext|>")
    ours, theirs = all_answers(model.ours()), model.theirs()
    assert theirs.tok_encode("x")[-1] == 0
    expected = {"rolling": all_answers(theirs)["rolling"]}
    begin = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, theirs.prefix_token_id)])
    theirs.tokenizer.backend_tokenizer.post_processor = begin
    assert_same(ours, {**all_answers(theirs), **expected})


def test_a_continuation_longer_than_the_model_is_named_before_anything_is_scored(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    adapter = model.ours()
    monkeypatch.setattr(adapter.team, "ask", lambda *arguments: pytest.fail("something was scored"))
    pairs = [("hello", " world"), ("hello", " x" * LONGEST), ("hello", "y" * LONGEST)]
    asked = [
        Instance("loglikelihood", {}, pair, 0, metadata=("tiny_task", 40 + number, 1))
        for number, pair in enumerate(pairs)
    ]
    with pytest.raises(UserError, match=rf"tiny_task, document 41: .*\b{2 * LONGEST} tokens.*\b{LONGEST} positions"):
        adapter.loglikelihood(asked)


def answers_of_rank(rank: int, world: int, model: Model, layout: Layout) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    adapter = model.ours(rank, layout)
    adapter.team.run(lambda: found.update(all_answers(adapter)))
    return found


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, tp=2), Layout(dp=3)], ids=lambda x: x.name)
def test_same_answers_at_every_layout(model: Model, layout: Layout):
    results = run_distributed(answers_of_rank, layout.world, model, layout)
    assert_same(results[0], all_answers(model.ours()))
    assert results[1:] == [{}] * (layout.world - 1)


def one_document(rank: int, world: int, model: Model) -> list[Any]:
    found: list[Any] = []
    adapter = model.ours(rank, Layout(dp=world))
    adapter.team.run(lambda: found.extend(adapter.loglikelihood(requests("loglikelihood", PAIRS[:1]))))
    return found


def test_fewer_documents_than_ranks(model: Model):
    assert len(run_distributed(one_document, 3, model)[0]) == 1


def fail_on_rank_zero(rank: int, world: int, model: Model) -> str:
    def lead() -> None:
        raise UserError("no such task")

    adapter = model.ours(rank, Layout(dp=world))
    try:
        adapter.team.run(lead)
    except UserError as error:
        return str(error)
    return "left in order"


def test_a_failure_on_rank_zero_lets_the_others_go(model: Model):
    assert run_distributed(fail_on_rank_zero, 2, model) == ["no such task", "left in order"]


def test_scores_by_definition():
    """fp64 log-softmax of each position's logits, one text at a time."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        stage = stage_of(make_checkpoint(Path(folder), GPT_NEOX), GPT_NEOX)
        pairs = [([EOD], [5, 9, 33]), ([1, 2, 3], [4]), ([1, 2, 3], [40]), ([7], []), ([EOD, 5], [9, 33])]
        for (context, rest), (total, greedy) in zip(pairs, score(stage, pairs, 2), strict=True):
            text = torch.tensor([context + rest])
            logits = stage.run(text, torch.arange(text.shape[1])[None]).logits()[0].double().log_softmax(dim=-1)
            places = range(len(context) - 1, len(context) + len(rest) - 1)
            assert total == pytest.approx(sum(float(logits[i, t]) for i, t in zip(places, rest)), abs=1e-4)
            assert greedy == all(int(logits[i].argmax()) == t for i, t in zip(places, rest))
        with pytest.raises(UserError, match=rf"\b{LONGEST + 1} tokens .*\b{LONGEST} positions"):
            score(stage, [([1], [2] * (LONGEST + 1))], 2)


def test_a_context_of_spaces_alone_counts_as_none(model: Model):
    adapter = model.ours()
    spaces, none = adapter.loglikelihood(requests("loglikelihood", [("  ", "hello"), ("", "  hello")]))
    assert spaces == none


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Request((), 256, 0.0, 0, 0.0)),
        ({"until": "stop", "max_new_tokens": 3}, Request(("stop",), 3, 0.0, 0, 0.0)),
        ({"until": None, "max_gen_toks": 7}, Request((), 7, 0.0, 0, 0.0)),
        ({"until": ["a", ""], "do_sample": False, "temperature": 0.7}, Request(("a",), 256, 0.0, 0, 0.0)),
        ({"do_sample": True, "top_k": 5, "top_p": 0.9}, Request((), 256, 1.0, 5, 0.9)),
        ({"do_sample": True, "temperature": 0.5}, Request((), 256, 0.5, 0, 0.0)),
    ],
)
def test_generation_options_of_tasks(options: dict[str, Any], expected: Request):
    assert Request.of(options) == expected


def options(*names: str, **keys: Any) -> GenerationConfig:
    return GenerationConfig(eval_tasks=names, **keys)


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    """A folder with four tasks and a group over local files."""
    write_tasks(tmp_path)
    return tmp_path


def test_task_results_equal_the_harness_own_and_reach_a_file(
    model: Model, task_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    from lm_eval import simple_evaluate

    names = [str(task_folder / f"local_{name}.yaml") for name in ("choice", "rolling")]
    results = Tasks(options(*names)).run(model.ours())
    manager = Tasks(options(*names)).manager
    theirs = simple_evaluate(
        model=model.theirs(), tasks=names, bootstrap_iters=0, task_manager=manager, log_samples=False
    )
    for task, metrics in theirs["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert results["results"][task][metric] == pytest.approx(value, rel=1e-4), (task, metric)
    assert results["results"]["local_rolling"]["word_perplexity,none"] > 1
    assert "local_choice" in table(results) and "byte_perplexity" in table(results)
    flat = flat_metrics(results)
    assert flat["local_choice_acc"] == results["results"]["local_choice"]["acc,none"]
    assert "local_rolling_byte_perplexity" in flat and all(name.startswith("local_") for name in flat)
    monkeypatch.chdir(task_folder)
    path = stamped("out/run")
    write_results(results, path)
    assert path.name.startswith("run_eval_results_") and path.parent.name == "out"
    assert json.loads(path.read_text())["results"]["local_choice"]["acc,none"] <= 1
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_folder_names_all_its_tasks_and_groups(task_folder: Path):
    tasks = Tasks(options(str(task_folder)))
    assert sorted(tasks.loaded["tasks"]) == ["local_choice", "local_other", "local_rolling", "local_writing"]
    assert list(tasks.loaded["groups"]) == ["local_group"] and not tasks.failed


def shots_of(tasks: Tasks) -> dict[str, int]:
    return {name: task.get_config("num_fewshot") for name, task in tasks.loaded["tasks"].items()}


def test_examples_before_a_question(tmp_path: Path):
    """As each task's file says, else as asked: for all, by task or by group."""
    write_tasks(tmp_path)
    write_task(tmp_path, "local_two", {**CHOICE, "num_fewshot": 2, "fewshot_split": "train"})
    write_task(tmp_path, "local_never", {**CHOICE, "num_fewshot": 0})
    names, folder = ("local_two", "local_never", "local_group"), {"eval_tasks_path": (str(tmp_path),)}
    two = {"local_two": 2, "local_never": 0, "local_choice": 0, "local_other": 0}
    tasks = Tasks(options(*names, **folder))
    assert shots_of(tasks) == two
    task = tasks.loaded["tasks"]["local_two"]
    task.build_all_requests(rank=0, world_size=1)
    assert task.instances[0].args[0].count("hello world") > 2 and task.instances[0].args[0].endswith("hello world 0")
    three = {"local_two": 3, "local_never": 0, "local_choice": 3, "local_other": 3}
    assert shots_of(Tasks(options(*names, **folder, eval_num_fewshot=3))) == three
    by_name = {"local_group": 1, "local_other": 4, "local_never": 5}
    named = {"local_two": 2, "local_never": 5, "local_choice": 1, "local_other": 4}
    assert shots_of(Tasks(options(*names, **folder, eval_num_fewshot=by_name))) == named
    with pytest.raises(UserError, match=r"eval_num_fewshot\.local_tow: .*Did you mean 'local_two'\?"):
        Tasks(options(*names, **folder, eval_num_fewshot={"local_tow": 1}))
    # A task that fails does not hide the wrong name, and may be named itself.
    lost = str(
        write_task(tmp_path, "local_lost", {**CHOICE, "dataset_kwargs": {"data_files": {"test": "/no/such.jsonl"}}})
    )
    with pytest.raises(UserError, match=r"eval_num_fewshot\.local_tow: "):
        Tasks(options("local_two", lost, **folder, eval_num_fewshot={"local_tow": 1}))
    with_both = {"local_two": 1, lost: 1}
    assert shots_of(Tasks(options("local_two", lost, **folder, eval_num_fewshot=with_both))) == {"local_two": 1}


def record_prompts(adapter: HarnessModel) -> list[str]:
    """The contexts that the adapter is asked to score from now on."""
    prompts: list[str] = []
    score_all = adapter.loglikelihood

    def loglikelihood(asked: list[Instance], **options: Any) -> list[tuple[float, bool]]:
        prompts.extend(one.args[0] for one in asked)
        return score_all(asked, **options)

    adapter.loglikelihood = loglikelihood  # type: ignore[method-assign]
    return prompts


def test_every_run_of_a_task_asks_the_same_and_keeps_nothing(model: Model, tmp_path: Path):
    """Also as the harness itself asks in its first run."""
    from lm_eval import simple_evaluate

    path = write_task(tmp_path, "local_two", {**CHOICE, "num_fewshot": 2, "fewshot_split": "train"})
    tasks, asked = Tasks(options(str(path))), []
    for _ in range(2):
        adapter = model.ours()
        prompts = record_prompts(adapter)
        assert not tasks.run(adapter)["failed"]
        asked.append(prompts)
        assert not tasks.loaded["tasks"]["local_two"].instances
    assert asked[0] == asked[1] and len(set(asked[0])) == 9
    adapter = model.ours()
    prompts = record_prompts(adapter)
    simple_evaluate(model=adapter, tasks=[str(path)], bootstrap_iters=0, task_manager=tasks.manager, log_samples=False)
    assert prompts == asked[0]


def test_a_chat_template_writes_the_question(tmp_path: Path):
    """As the harness's own adapter writes it, with the system's turn and the examples as turns."""
    turns_of = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = turns_of + "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    model = Model(tmp_path / "model", bos=False)
    ours = model.ours()
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(turns) == "<system>Be brief.<user>hello<assistant>"
    theirs = model.theirs()
    for add in (True, False):
        assert ours.apply_chat_template(turns, add) == theirs.apply_chat_template(turns, add)
    write_tasks(tmp_path / "tasks")
    asked = {"eval_tasks_path": (str(tmp_path / "tasks"),), "eval_chat_template": True, "eval_task_limit": 2.0}
    tasks = Tasks(options("local_choice", **asked, eval_system_instruction="Be brief.", eval_num_fewshot=1))
    prompts = record_prompts(ours)
    results = tasks.run(ours)
    assert prompts[0].startswith("<system>Be brief.<user>hello world") and prompts[0].count("<user>") == 2
    assert results["n-samples"]["local_choice"]["effective"] == 2 and not results["failed"]


def test_without_a_chat_template_chats_are_refused(model: Model):
    with pytest.raises(UserError, match="eval_chat_template: .*chat_template.jinja"):
        as_exported(model.tokenizer, None).require_chat_template("eval_chat_template")


def test_data_that_cannot_be_loaded_names_the_task(task_folder: Path):
    path = write_task(task_folder, "local_lost", missing=True)
    with pytest.raises(UserError, match=r"eval_tasks: .*local_lost\.yaml cannot be loaded"):
        Tasks(options(str(path))).require()
    tasks = Tasks(options(str(path), "local_choice", eval_tasks_path=(str(task_folder),)))
    tasks.require()
    assert list(tasks.loaded["tasks"]) == ["local_choice"] and list(tasks.failed) == [str(path)]


@pytest.mark.slow
def test_an_unknown_task_of_a_group_is_named(task_folder: Path):
    (task_folder / "group.yaml").write_text("group: local_group\ntask: [local_choice, local_nowhere]\n")
    with pytest.raises(UserError, match="group local_group names a task 'local_nowhere'"):
        Tasks(options("local_group", eval_tasks_path=(str(task_folder),)))


@pytest.mark.slow
def test_an_unknown_task_names_the_nearest():
    with pytest.raises(UserError, match=r"no task 'lambada_openay'\. Did you mean 'lambada_openai'\?"):
        Tasks(options("lambada_openay"))
