"""The card of a model: what a run left becomes tables, a picture and metadata; what is private does not."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.numpy import save_file

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.manifest import FileEntry, Manifest
from megatron.checksums import file_crc32
from megatron.hub.card import CardContext, early_card, raw_card, write_card
from megatron.hub.run_facts import read_facts

pytestmark = pytest.mark.cpu

CONTEXT = CardContext("lab/model", "lab/neox-ckpt-model", "my run", "global_step40", "org/base", 1.5e-6)
CONFIG = {
    "train_iters": 100,
    "seq_length": 16,
    "num_layers": 3,
    "hidden_size": 32,
    "model_parallel_size": 2,
    "train_batch_size": 8,
    "hostfile": "/scratch/bobsname/hosts",
    "wandb_run_name": "try /home" + "/bobsname/x",
}


@pytest.fixture
def folder(tmp_path):
    """A converted model of 4 * 5 + 6 parameters."""
    made = tmp_path / "hf"
    made.mkdir()
    save_file({"a": np.zeros((4, 5), np.float32), "b": np.zeros(6, np.float16)}, made / "model.safetensors")
    (made / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"})
    )
    return made


@pytest.fixture
def facts_of(tmp_path):
    """`facts_of(step, **config)`: of a checkpoint whose run trained to step 60, restarted at 20 and was killed."""

    def make(step=40, **config):
        run = tmp_path / "run"
        checkpoint = run / f"global_step{step}"
        checkpoint.mkdir(parents=True)
        state = checkpoint / "mp_rank_00_model_states.pt"
        state.write_bytes(b"state")
        files = {state.name: FileEntry(5, file_crc32(state))}
        sizes = {"tp": 1, "pp": 1, "dp": 1}
        made = Manifest(
            step, step * 8, sizes, {}, False, {}, files, {**CONFIG, **config}, git="abc", versions={"torch": "2"}
        )
        made.write(checkpoint)
        lines = [{"step": s, "train/lm_loss": 9.0} for s in range(1, 26)]  # the first try, to 25
        lines += [{"step": s, "train/lm_loss": 10 - s / 10} for s in range(21, 61)]
        lines += [{"step": 30, "validation/lm_loss": 7.25}, {"step": 31, "validation/lm_loss": None}]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 61, "trai')
        (run / "eval_results").mkdir()
        for at, value in ((20, 0.2), (40, 0.4), (60, 0.6)):
            task = {"alias": "x", "acc,none": value, "acc_stderr,none": 0.01, "acc,strict": "N/A"}
            (run / f"eval_results/iteration_{at}.json").write_text(json.dumps({"results": {"piqa": task}}))
        return read_facts(open_checkpoint(checkpoint), None)

    return make


def rows(card, heading):
    """Cells of the table below a heading."""
    part = card.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line[2:-2].split(" | ") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_losses_are_those_of_the_line_that_led_here(folder, facts_of):
    facts = facts_of()
    write_card(folder, facts, CONTEXT)
    losses = facts.losses["train/lm_loss"]
    assert list(losses) == list(range(1, 41)) and (losses[20], losses[21], losses[40]) == (9.0, 7.9, 6.0)
    shown = rows((folder / "README.md").read_text(), "Training")
    assert len(shown) == 12 and shown[0][:2] == ["1", "9.0000"] and shown[-1][:2] == ["40", "6.0000"]
    assert ["30", "7.0000", "7.2500"] in shown
    assert [int(row[0]) for row in shown] == sorted({int(row[0]) for row in shown})
    with Image.open(folder / "training_curve.png") as picture:
        picture.verify()
        assert picture.format == "PNG"


def test_a_card_is_the_same_whenever_it_is_written(folder, facts_of):
    facts = facts_of()
    made = []
    for _ in range(2):
        write_card(folder, facts, CONTEXT)
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1]


def test_metadata_and_scores(folder, facts_of):
    facts = facts_of()
    write_card(folder, facts, CONTEXT)
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "org/base" and card.data.library_name == "transformers" and "llama" in card.data.tags
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in card.data.eval_results] == [("piqa", "acc", 0.4)]
    assert rows(str(card), "Evaluation at step 40") == [["piqa", "acc", "0.4000 ± 0.0100"]]
    write_card(folder, facts, CONTEXT, {"arc": {"acc": 0.5}})
    text = (folder / "README.md").read_text()
    assert rows(text, "Evaluation at step 40") == [["arc", "acc", "0.5000"]]


def test_scores_of_an_earlier_step_are_shown_with_it_and_are_not_the_models(folder, facts_of):
    write_card(folder, facts_of(step=50), CONTEXT)
    card = ModelCard.load(folder / "README.md")
    assert rows(str(card), "Evaluation at step 40") == [["piqa", "acc", "0.4000 ± 0.0100"]]
    assert card.data.eval_results is None


@pytest.mark.parametrize(
    ("config", "table"),
    [
        ({"data_path": "{}/a"}, [["a", "1", "1,234", "5,120"]]),
        (
            {"train_data_paths": ["{}/a", "{}/b"], "train_data_weights": [1.0, 3.0]},
            [["a", "0.25", "1,234", "1,280"], ["b", "0.75", "", "3,840"]],
        ),
        (
            {
                "train_data_paths": ["{}/a", "{}/b"],
                "train_data_names": ["web", "code"],
                "train_data_weights": [[0, [1.0, 1.0]], [50, [0.0, 1.0]]],
            },
            [["web", "0.5 > 0", "1,234", ""], ["code", "0.5 > 1", "", ""]],
        ),
    ],
)
def test_the_data_table(tmp_path, folder, facts_of, config, table):
    (tmp_path / "a.manifest.json").write_text(json.dumps({"tokens": 1234}))
    config = json.loads(json.dumps(config).replace("{}", str(tmp_path)))
    write_card(folder, facts_of(**config), CONTEXT)
    assert rows((folder / "README.md").read_text(), "Data") == table  # 40 steps of 8 samples of 16 tokens


def test_facts_and_configuration_without_what_is_private(folder, facts_of):
    write_card(folder, facts_of(), CONTEXT)
    text = (folder / "README.md").read_text()
    for fact in ("| parameters | 26 |", "| code | abc |", "1.5e-06", "| ranks in training | tensor 2 |", "5,120"):
        assert fact in text
    assert 'from_pretrained("lab/model", revision="global_step40")' in text
    config = yaml.safe_load((folder / "deepy_config.yml").read_text())
    assert config["num_layers"] == 3 and config["wandb_run_name"] == "try x" and "hostfile" not in config
    assert yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["hidden_size"] == 32
    assert not [path for path in folder.iterdir() if b"bobsname" in path.read_bytes()]


def test_without_matplotlib_and_without_metrics(folder, facts_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    facts = facts_of()
    write_card(folder, facts, CONTEXT)
    assert not (folder / "training_curve.png").exists() and "training_curve" not in (folder / "README.md").read_text()
    (folder.parent / "run/metrics.jsonl").unlink()
    facts = read_facts(open_checkpoint(folder.parent / "run/global_step40"), None)
    write_card(folder, facts, CONTEXT)
    assert "## Training" not in (folder / "README.md").read_text()


def test_the_other_cards_can_be_read(facts_of):
    early, raw = ModelCard(early_card(CONTEXT, facts_of())), ModelCard(raw_card(CONTEXT))
    assert "step 100" in early.text and early.data.base_model == "org/base"
    assert "hf download lab/neox-ckpt-model --revision global_step40" in raw.text and raw.data.tags[0] == "deepy"
