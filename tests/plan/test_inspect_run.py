"""Samples and steps of a run from its configuration: against raw bytes, golden numbers and the loader itself."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron.checkpoint.find import Checkpoint, open_checkpoint
from megatron.checkpoint.start import Start, decide_start
from megatron.data.loader import StepLoader
from megatron.data.view.origin import samples_with
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.plan.inspect_run import RunData, Steps, _known_steps, open_run
from megatron.run.data import collate_rules, open_data
from tests.checkpoint.starts import put
from tests.data.corpus import GOLDEN, write

pytestmark = pytest.mark.cpu

PACKINGS = ("packed", "pack_until_overflow", "unpacked", "best_fit")


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """`config(**keys)` -> a small training config with them."""

    def make(**keys: object) -> Path:
        path = tmp_path / "run.yml"
        base = {
            "num_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "seq_length": 8,
            "pos_emb": "rotary",
            "train_batch_size": 4,
            "train_iters": 6,
            "eval_iters": 0,
            "tokenizer_type": "bytes",
            "seed": 1234,
        }
        path.write_text(yaml.safe_dump(base | keys))
        return path

    return make


def opened(path: Path, *overrides: str, ranks: int | None = None) -> RunData:
    return open_run(NeoXArgs.from_files([str(path)], list(overrides)), ranks)


def item(prefix: str, number: int) -> np.ndarray:
    """An item of a dataset, read by the layout of its two files."""
    index = Path(f"{prefix}.idx").read_bytes()
    items = struct.unpack_from("<Q", index, 18)[0]
    dtype = {4: "<i4", 8: "<u2"}[index[17]]
    sizes = np.frombuffer(index, "<i4", items, 34)
    starts = np.cumsum([0, *sizes])
    return np.fromfile(f"{prefix}.bin", dtype)[starts[number] : starts[number + 1]]


def chats(folder: Path, name: str, count: int, seed: int) -> tuple[str, str]:
    """Documents of random lengths with random labels; returns both prefixes."""
    rng = np.random.RandomState(seed)
    documents = [rng.randint(1, 256, rng.randint(3, 14)).tolist() for _ in range(count)]
    labels = [[token if rng.rand() < 0.5 else -100 for token in document] for document in documents]
    for document, label in zip(documents, labels):
        label[-1] = document[-1]  # something to train in each
    return write(folder / f"{name}_document", documents), write(folder / f"{name}_label_document", labels, np.int32)


# ---- golden


def test_golden_samples(config: Callable[..., Path], tmp_path: Path) -> None:
    """The golden vector of the packed order: documents of 5, 9, 3, 12 and 7 tokens, seed 1234."""
    data = write(tmp_path / "golden", GOLDEN)
    run = opened(config(data_path=data, split="1,0,0", train_batch_size=1))
    train = run.role("train")
    assert run.views(train, 0)[""].tokens.tolist() == [10, 10, 10, 10, 20, 21, 22, 23, 24]
    assert run.views(train, 3)[""].tokens.tolist() == [7, 8, 9, 7, 8, 9, 40, 41, 42]
    held = [(piece.file, piece.document, piece.offset, piece.length, piece.size) for piece in train.origin(3).pieces]
    assert held == [(data, 2, 0, 3, 3), (data, 2, 0, 3, 3), (data, 4, 0, 3, 7)]
    held = [(piece.document, piece.offset, piece.length) for piece in train.origin(0).pieces]
    assert held == [(1, 5, 4), (3, 0, 5)]
    view = run.views(train, 0)[""]
    assert view.title.startswith("sample 0 of train, step 0 (iteration 1 of the log), row 0 of 1")
    assert [(part.start, part.end) for part in view.parts] == [(0, 4), (4, 9)]
    assert f"document 1 of {data}, its tokens 5..8 of 9" == view.parts[0].title
    # What the other way round finds is what reading every sample by eye would.
    by_eye = [k for k in range(6) if 40 in run.views(train, k)[""].tokens or 46 in run.views(train, k)[""].tokens]
    found = list(samples_with(train.plan, train.dataset, range(6), data, range(4, 5)))
    assert set(by_eye) <= set(found)
    assert found == [k for k in range(6) if set(run.views(train, k)[""].tokens.tolist()) & set(range(40, 47))]
    assert list(samples_with(train.plan, train.dataset, range(6), f"{data}.bin", range(4, 5))) == found


# ---- the loader


@pytest.mark.parametrize("pack_impl", PACKINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_shown_is_what_ranks_get(
    config: Callable[..., Path], tmp_path: Path, pack_impl: str, masked: bool
) -> None:
    """A mixture of two labelled sources whose weights change, at dp 1 and 2 and two micro-batches each."""
    (one, one_labels), (two, two_labels) = chats(tmp_path, "one", 40, 1), chats(tmp_path, "two", 30, 2)
    path = config(
        train_data_paths=[one, two],
        train_label_data_paths=[one_labels, two_labels],
        train_data_names=["first", "second"],
        train_data_weights=[[0, [3, 1]], [3, [1, 3]]],
        pack_impl=pack_impl,
        intra_document_masking=masked,
        eod_mask_loss=True,
        seq_length=16,
    )
    sources = set()
    for ranks, micro in ((1, 2), (2, 1), (2, 2)):
        options = (f"global_num_gpus={ranks}", f"train_micro_batch_size_per_gpu={micro}")
        run = opened(path, *options)
        args, train = run.args, run.role("train")
        dataset = open_data(args, run.tokenizer).build().train
        assert dataset is not None and train.count == 24
        gas = 4 // (ranks * micro)
        loaders = [
            StepLoader(
                dataset,
                micro_batch=micro,
                gas=gas,
                rules=collate_rules(args, run.tokenizer),
                dp_rank=rank,
                dp_size=ranks,
            )
            for rank in range(ranks)
        ]
        for step in range(6):
            batches = [loader.read(4 * step, step) for loader in loaders]
            for sample in train.steps.samples(step):
                place, view, origin = train.place(sample), run.views(train, sample)[""], train.origin(sample)
                assert place.step == step
                batch, at = batches[place.rank], (place.micro_batch, place.row % micro)
                assert view.tokens[:-1].tolist() == batch.tokens[at].tolist()
                assert view.targets is not None and view.targets.tolist() == batch.targets[at].tolist()
                assert view.trained[1:].tolist() == (batch.mask[at] > 0).tolist()
                assert view.positions is not None and view.positions.tolist() == batch.positions[at].tolist()
                if masked:
                    assert batch.doc_ids is not None and view.doc_ids is not None
                    assert view.doc_ids.tolist() == batch.doc_ids[at].tolist()
                # and both are what lies in the files
                raw = [item(one.file, one.document)[one.offset : one.offset + one.length] for one in origin.pieces]
                assert np.concatenate(raw).tolist() == view.tokens[: view.real].tolist()
                assert view.tokens[view.real :].tolist() == [0] * (17 - view.real)
                sources.add((step < 3, origin.source, origin.prefix))
    assert {(name, prefix) for _, name, prefix in sources} == {("first", one), ("second", two)}
    counts = [[train.origin(k).source for k in range(*span)].count("first") for span in ((0, 12), (12, 24))]
    assert counts == [9, 3]


def test_nothing_is_hidden_by_padding(config: Callable[..., Path], tmp_path: Path) -> None:
    data, labels = chats(tmp_path, "one", 40, 1)
    run = opened(config(train_data_paths=[data], train_label_data_paths=[labels], pack_impl="unpacked", seq_length=20))
    train = run.role("train")
    for sample in range(8):
        view, (piece,) = run.views(train, sample)[""], train.origin(sample).pieces
        label = item(labels, piece.document)
        expected = [k > 0 and label[k] >= 0 for k in range(len(label))]
        assert view.trained[: view.real].tolist() == expected and not view.trained[view.real :].any()
        assert view.parts[-1].padding and view.parts[-1].end == 21


# ---- roles


def test_validation_sets_and_their_empty_samples(config: Callable[..., Path], tmp_path: Path) -> None:
    data, news = write(tmp_path / "d", [[k] * 30 for k in range(1, 9)]), write(tmp_path / "n", [[9] * 27])
    path = config(train_data_paths=[data], valid_data_paths=[data], valid_sets={"news": news}, eval_iters=2,
                  eval_interval=3)  # fmt: skip
    run = opened(path)
    assert set(run.roles) == {"train", "valid", "valid/news"}
    small = run.role("valid/news")
    assert small.count == 4 and small.origin(0).prefix == news
    assert run.views(small, 0)[""].tokens.tolist() == [9] * 9
    empty = run.views(small, 3)[""]
    assert empty.real == 0 and not empty.trained.any() and [part.padding for part in empty.parts] == [True]
    assert empty.title == "sample 3 of valid/news, batch 0, row 3 of 4"
    valid = run.role("valid")
    assert valid.count == (6 // 3 + 1) * 2 * 4
    assert "batch 1 of validation 2" in run.views(valid, 23)[""].title
    with pytest.raises(UserError, match=r"'vaild', .*train, valid, .*'valid'"):
        run.role("vaild")


def test_a_pattern_names_the_file_of_each_document(config: Callable[..., Path], tmp_path: Path) -> None:
    parts = [write(tmp_path / f"part{k}", [[10 * k + d] * 6 for d in range(1, 4)]) for k in (1, 2)]
    run = opened(config(train_data_paths=[str(tmp_path / "part*")], train_batch_size=1, train_iters=4))
    train = run.role("train")
    for sample in range(4):
        view, origin = run.views(train, sample)[""], train.origin(sample)
        raw = [item(one.file, one.document)[one.offset : one.offset + one.length] for one in origin.pieces]
        assert np.concatenate(raw).tolist() == view.tokens.tolist()
    found = list(samples_with(train.plan, train.dataset, range(4), parts[1], range(2, 3)))
    assert found == [k for k in range(4) if 23 in run.views(train, k)[""].tokens]
    with pytest.raises(UserError, match="documents 0..2, not 3"):
        list(samples_with(train.plan, train.dataset, range(4), parts[1], range(3, 4)))
    with pytest.raises(UserError, match=r"reads no part9\."):
        list(samples_with(train.plan, train.dataset, range(4), "part9", range(1)))


# ---- steps


def test_steps_where_checkpoints_know_of_other_batch_sizes() -> None:
    steps = Steps(8, ((0, 0), (10, 40), (20, 120)))
    assert [steps.samples(k) for k in (0, 9, 10, 19, 20, 21)] == [
        range(4),
        range(36, 40),
        range(40, 48),
        range(112, 120),
        range(120, 128),
        range(128, 136),
    ]
    for step in range(30):
        assert {steps.step_of(sample) for sample in steps.samples(step)} == {step}
    with pytest.raises(UserError, match=r"steps 0 and 10 .*\(44 samples in 10 steps\)"):
        Steps(8, ((0, 0), (10, 44))).samples(3)


def test_steps_of_a_growing_batch_where_checkpoints_agree_with_it() -> None:
    """They do up to step 6; then somebody trained with 3 samples per step."""
    steps = Steps(8, ((0, 0), (6, 20), (8, 26)), BatchPlan(((0, 2), (4, 6), (9, 8))))
    sizes = [2, 2, 2, 2, 6, 6, 3, 3, 6, 8, 8]
    first = list(accumulate(sizes, initial=0))
    assert [steps.samples(k) for k in range(11)] == [range(*pair) for pair in pairwise(first)]
    for step in range(11):
        assert {steps.step_of(sample) for sample in steps.samples(step)} == {step}


def checkpoint(save: Path, step: int, consumed: int) -> Checkpoint:
    """A checkpoint that knows its step and nothing else."""
    put(save, step, consumed=consumed)
    return open_checkpoint(save / f"global_step{step}")


def test_all_checkpoints_of_the_run_are_asked(tmp_path: Path) -> None:
    save = tmp_path / "save"
    for step, consumed in ((10, 40), (20, 120), (25, 160)):
        newest = checkpoint(save, step, consumed)
    other = checkpoint(tmp_path / "other", 5, 50)
    resumed = Start("resume", newest, 25, "")
    assert _known_steps(resumed, str(save), (0, 0)) == ((0, 0), (10, 40), (20, 120), (25, 160))
    assert _known_steps(Start("load", other, 5, ""), str(save), (0, 0)) == ((0, 0), (5, 50))
    assert _known_steps(Start("finetune", other, 0, ""), None, (0, 0)) == ((0, 0),)
    assert _known_steps(resumed, str(save), (8, 30)) == ((8, 30), (10, 40), (20, 120), (25, 160))


def test_what_was_before_is_of_another_run() -> None:
    steps = Steps(4, ((5, 50),))
    assert steps.samples(5) == range(50, 54) and steps.step_of(57) == 6
    with pytest.raises(UserError, match=r"step 4: .*step 5\b.*\b50 samples"):
        steps.samples(4)
    with pytest.raises(UserError, match="sample 49: .* at step 5"):
        steps.step_of(49)


def test_the_run_of_another_user_can_be_looked_at(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(data_path=write(tmp_path / "d", GOLDEN), split="1,0,0", save=str(tmp_path / "save"))
    monkeypatch.setattr("megatron.checkpoint.start.os.access", lambda *asked: False)
    assert opened(path).role("train").count == 24
    with pytest.raises(UserError, match="may not be written"):
        decide_start(NeoXArgs.from_files([str(path)]).checkpoint)


def test_what_the_run_does_not_reach(config: Callable[..., Path], tmp_path: Path) -> None:
    run = opened(config(data_path=write(tmp_path / "d", GOLDEN), split="1,0,0"))
    train = run.role("train")
    assert list(train.samples_of(range(5, 6))) == [20, 21, 22, 23]
    for asked in (range(5, 7), range(6, 7)):
        with pytest.raises(UserError, match=r"step 6: .* 0\.\.5 of train "):
            list(train.samples_of(asked))
    with pytest.raises(UserError, match=r"sample 24: .* 0\.\.23 of train "):
        run.views(train, 24)[""]


def test_a_run_of_which_nothing_says_how_many_ranks_it_has(
    config: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = config(data_path=write(tmp_path / "d", GOLDEN), split="1,0,0", train_batch_size=None,
                  train_micro_batch_size_per_gpu=2)  # fmt: skip
    assert len(opened(path, ranks=4).role("train").steps.samples(0)) == 8
    assert "how many ranks" not in caplog.text


@pytest.mark.parametrize("pack_impl", ["unpacked", "best_fit"])
def test_pairs_are_shown_side_by_side(config: Callable[..., Path], tmp_path: Path, pack_impl: str) -> None:
    """Each text with its file and its number there; a document is found by the name of either file."""
    for side, texts in (("c", [[1, 2, 3], [4, 5, 6, 7]]), ("r", [[1, 2], [4, 8, 9]])):
        write(tmp_path / side, texts)
    keys = {"dataset_impl": "pairwise", "train_impl": "dpo", "pos_train_data_paths": [str(tmp_path / "c")]}
    keys |= {"neg_train_data_paths": [str(tmp_path / "r")], "pack_impl": pack_impl, "intra_document_masking": True}
    run = opened(config(**keys))
    train = run.role("train")
    shown = [view for sample in range(4) for view in run.views(train, sample).values()]
    texts = {tuple(view.tokens[p.start : p.end].tolist()) for view in shown for p in view.parts if not p.padding}
    assert texts == {(1, 2), (1, 2, 3), (4, 5, 6, 7), (4, 8, 9)}
    if pack_impl == "unpacked":
        assert [view.title.rpartition(", ")[2] for view in shown] == ["chosen", "rejected"] * 4
    held = [(Path(piece.file).name, piece.document) for piece in train.origin(0).pieces]
    assert held[:2] in ([("c", 0), ("r", 0)], [("c", 1), ("r", 1)])
    for file in ("c", "r"):
        (first, *_) = samples_with(train.plan, train.dataset, range(train.count), str(tmp_path / file), range(1, 2))
        assert any(piece.document == 1 for piece in train.origin(first).pieces)
