"""One checkpoint to a Hub on this machine: what is where, what is not done twice, what stays private."""

from __future__ import annotations

import json
import re

import pytest
from safetensors.torch import load

from megatron.errors import UserError
from megatron.jobs.publishing import publish_one
from tests.checkpoint.neox_files import write_neox
from tests.convert.helpers import NEOX, hugging_face, resolved
from tests.hub.published_run import PRIVATE, log_in, write_run, write_tokenizer
from tests.hub.upload_server import UploadHub

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(240)]

MODEL, RAW = "lab/sweep-a", "lab/neox-ckpt-sweep-a"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("checkpoints") / "sweep=a")


@pytest.fixture
def upload(tmp_path, run_folder, monkeypatch):
    """`upload(hub, *arguments)`: run the command on the run's folder."""

    def run(hub, *arguments):
        environment = log_in(hub, tmp_path, monkeypatch)
        names = tmp_path / "names.yml"
        names.write_text('replace: {"=": "-"}\n')
        given = ["--output-dir", str(tmp_path / "hf"), f"--names={names}", "--retry-min-wait=0", "--retry-max-wait=0"]
        return publish_one([str(run_folder), *given, *arguments], environment, None)

    return run


def texts(files):
    return {name: text.decode(errors="replace") for name, text in files.items() if not name.endswith(".png")}


def test_all_of_a_run_is_where_it_should_be(tmp_path, upload, run_folder, capsys):
    with UploadHub() as hub:
        assert upload(hub, "5", "lab") == 0
        model, raw = hub.models[MODEL], hub.models[RAW]
        assert model.private and raw.private
        assert set(model.branches) == {"main", "global_step5"} == set(raw.branches)
        assert set(model.branches["main"]) == {"README.md", "deepy.json"} == set(raw.branches["main"])
        made = model.branches["global_step5"]
        assert made == {path.name: path.read_bytes() for path in (tmp_path / "hf/sweep-a/global_step5").iterdir()}
        assert {"config.json", "tokenizer.json", "README.md", "deepy_config.yml", "training_curve.png"} < set(made)

        # The last step is main too, and the earlier branch stays as it was.
        assert upload(hub, "lab") == 0
        assert model.branches["main"] == model.branches["global_step10"] != made == model.branches["global_step5"]
        weights = [load(model.branches[name]["model.safetensors"]) for name in ("global_step5", "global_step10")]
        name = "model.embed_tokens.weight"
        assert (weights[1][name] / weights[0][name]).mean().item() == pytest.approx(1.10 / 1.05, rel=1e-4)

        # So is the raw one, next to the card.
        last = raw.branches["main"]
        assert {name: last[name] for name in raw.branches["global_step10"]} == raw.branches["global_step10"]
        assert last.keys() - raw.branches["global_step10"].keys() == {"README.md"}

        # The raw checkpoint is a complete one, with the same weights.
        local = run_folder / "global_step5"
        sent = raw.branches["global_step5"]
        assert {name: sent[name] for name in sent if name.endswith(".pt")} == {
            path.name: path.read_bytes() for path in local.glob("*.pt")
        }
        assert f"{hub.endpoint}/lab/sweep-a/tree/global_step5" in capsys.readouterr().out
        everything = [files for each in (model, raw) for files in each.branches.values()]
        for text in [text for files in everything for text in texts(files).values()]:
            assert not [word for word in PRIVATE if word in text]


def test_what_is_done_is_not_done_again(tmp_path, upload, monkeypatch):
    with UploadHub() as hub:
        hub.fail("/commit/global_step5", status=403)
        with pytest.raises(UserError, match="uploading .*global_step5"):
            upload(hub, "5", "lab", "--skip-neox-upload")
        sent, converted = hub.sent_large(), (tmp_path / "hf/sweep-a/global_step5/model.safetensors").stat()
        assert sent == converted.st_size
        upload(hub, "5", "lab", "--skip-neox-upload")
        assert hub.sent_large() == sent
        assert (tmp_path / "hf/sweep-a/global_step5/model.safetensors").stat().st_mtime_ns == converted.st_mtime_ns

        # Without the local copy, nothing is converted or committed for what is complete ...
        commits = hub.models[MODEL].commits
        upload(hub, "5", "lab", "--skip-neox-upload", "--skip-if-exists", "--output-dir", str(tmp_path / "other"))
        assert not (tmp_path / "other").exists() and hub.models[MODEL].commits == commits
        # ... and it is for what has the tokenizer only, or another file in the place of the weights.
        branch = hub.models[MODEL].refs["global_step5"].files
        whole, branch["model.safetensors"] = branch["model.safetensors"], bytes(len(branch["model.safetensors"]))
        upload(hub, "5", "lab", "--skip-neox-upload", "--skip-if-exists")
        assert hub.models[MODEL].branches["global_step5"]["model.safetensors"] == whole
        del hub.models[MODEL].refs["global_step5"].files["model.safetensors"]
        upload(hub, "5", "lab", "--skip-neox-upload", "--skip-if-exists", "--delete-local")
        assert hub.models[MODEL].branches["global_step5"]["model.safetensors"] == whole
        assert not (tmp_path / "hf/sweep-a/global_step5").exists()


def test_the_raw_checkpoint_alone_is_complete_and_skipped_when_it_is_there(tmp_path, upload, run_folder):
    from megatron.checkpoint.find import open_checkpoint

    with UploadHub() as hub:
        upload(hub, "5", "lab", "--upload-neox-only", "--public")
        assert list(hub.models) == [RAW] and not hub.models[RAW].private
        copy = tmp_path / "global_step5"
        for name, content in hub.models[RAW].branches["global_step5"].items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
        found = open_checkpoint(copy)
        found.check_files(checksums=True)
        assert found.manifest.config["train_data_paths"] == ["pile_text_document", "code_text_document"]
        assert found.manifest.parameters == open_checkpoint(run_folder / "global_step5").manifest.parameters
        commits = hub.models[RAW].commits
        upload(hub, "5", "lab", "--upload-neox-only", "--skip-if-exists")
        assert hub.models[RAW].commits == commits
        del hub.models[RAW].refs["global_step5"].files["layer_00-model_00-model_states.pt"]
        upload(hub, "5", "lab", "--upload-neox-only", "--skip-if-exists")
        assert hub.models[RAW].commits == commits + 1


def test_a_repository_of_another_run_is_left_alone(upload):
    with UploadHub() as hub:
        upload(hub, "5", "lab", "--upload-neox-only")
        record = json.loads(hub.models[RAW].refs["main"].files["deepy.json"])
        hub.models[RAW].refs["main"].files["deepy.json"] = json.dumps({**record, "experiment": "other"}).encode()
        with pytest.raises(UserError, match=f"{RAW}.*'other'.*'sweep=a'.*--names"):
            upload(hub, "lab", "--upload-neox-only")
        assert list(hub.models[RAW].branches) == ["main", "global_step5"]


HARNESS = """
import json, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert pathlib.Path(given["--model_args"].removeprefix("pretrained="), "config.json").exists()
with open("{log}", "a") as log: log.write(given["--tasks"] + " " + given["--include_path"])
if given["--tasks"] == "broken": sys.exit(3)
out = pathlib.Path(given["--output_path"], "m"); out.mkdir()
values = {{"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.25}}
(out / "results_1.json").write_text(json.dumps({{"results": {{"piqa": values}}, "config": {{"user": "bobsname"}}}}))
"""


def test_an_evaluation_gets_into_the_card_and_a_failing_one_ends_nothing(tmp_path, upload, monkeypatch, caplog):
    (tmp_path / "fake/lm_eval").mkdir(parents=True)
    (tmp_path / "fake/lm_eval/__init__.py").write_text("")
    (tmp_path / "fake/lm_eval/__main__.py").write_text(HARNESS.format(log=tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    options = ["5", "lab", "--skip-neox-upload", "--eval", "--task-include-path", str(tmp_path)]
    with UploadHub() as hub:
        assert upload(hub, *options, "--eval-tasks=broken") == 0
        made = hub.models[MODEL].branches["global_step5"]
        assert "eval_results.json" not in made and "Evaluation at step 5" in made["README.md"].decode()
        upload(hub, *options, "--eval-tasks=piqa")
        made = hub.models[MODEL].branches["global_step5"]
        assert json.loads(made["eval_results.json"])["results"]["piqa"]["acc,none"] == 0.5
        assert "| piqa | acc | 0.5000 ± 0.2500 |" in made["README.md"].decode()
        assert not [text for text in texts(made).values() if "bobsname" in text]
        upload(hub, *options, "--eval-tasks=piqa", "--skip-if-exists")
        upload(hub, *options, "--eval-tasks=piqa")  # its results are kept with the folder
    assert (tmp_path / "log").read_text() == f"broken {tmp_path}piqa {tmp_path}"


def test_a_checkpoint_of_gpt_neox_with_another_form_of_its_tokenizer(tmp_path, monkeypatch, capsys):
    """The flag's tokenizer has a chat template; when the template changes, the model is converted again."""
    own, other = (write_tokenizer(tmp_path / name) for name in ("bobsname/own", "other"))
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    keys = {**NEOX, "gpt_j_residual": True, "tokenizer_type": "HFTokenizer", "vocab_file": str(own / "tokenizer.json")}
    folder = tmp_path / "old/global_step9"
    write_neox(folder, hugging_face(resolved(**NEOX, gpt_j_residual=True), "neox")[1], keys)
    (folder / "configs").mkdir()
    config = {**keys, "train_iters": 9, "train_batch_size": 4, "hostfile": "/scratch/bobsname/hosts"}
    (folder / "configs/run.yml").write_text(json.dumps(config))
    given = [str(folder), "lab", "--tokenizer", str(other), "--skip-if-exists", "--retry-min-wait=0"]
    with UploadHub() as hub:
        environment = log_in(hub, tmp_path, monkeypatch)
        publish_one(given, environment, None)
        branches = hub.models["lab/old"].branches
        assert branches["main"] == branches["global_step9"]
        assert branches["main"]["chat_template.jinja"] == b"{{ messages[0].content }}"
        card = branches["main"]["README.md"].decode()
        assert "| tokens seen | 1,728 |" in card and "Step 9 of 9" in card  # 9 steps of 4 samples of 48 tokens
        raw = hub.models["lab/neox-ckpt-old"].branches["global_step9"]
        assert raw["layer_02-model_00-model_states.pt"] == (folder / "layer_02-model_00-model_states.pt").read_bytes()
        published = [*texts(branches["main"]).values(), *texts(raw).values()]
        assert not [text for text in published if "bobsname" in text]
        commits = hub.models["lab/old"].commits
        publish_one(given, environment, None)
        assert hub.models["lab/old"].commits == commits
        (other / "chat_template.jinja").write_text("{{ messages[1].content }}")
        publish_one(given, environment, None)
        assert hub.models["lab/old"].branches["main"]["chat_template.jinja"] == b"{{ messages[1].content }}"


def test_a_dry_run_needs_no_network_and_writes_nothing(tmp_path, upload, capsys):
    with UploadHub() as hub:
        pass  # nobody listens there now
    assert upload(hub, "--dry-run", "--eval", "--upload-delay", "random", "--delete-local") == 0
    lines = capsys.readouterr().out
    for fact in (
        "step 10 of 10",
        r"<you>/sweep-a, revision global_step10 and main\b",
        "<you>/neox-ckpt-sweep-a",
        "piqa",
    ):
        assert re.search(fact, lines), fact
    assert not (tmp_path / "hf").exists()
    assert upload(hub, "5", "lab", "--dry-run", "--upload-neox-only") == 0
    lines = capsys.readouterr().out
    assert "main" not in lines and "sweep-a, revision" in lines and "convert" not in lines


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["6", "lab"], r"iteration 6.*\[5, 10\]"),
        (["5x", "lab"], "STEP: '5x'"),
        (["--upload-neox-only", "--skip-neox-upload"], "--skip-neox-upload"),
        (["5", "lab", "--names", "no.yml"], "--names: .*no.yml.*sfm"),
        (["5", "lab", "--max-retries=-1"], "--max-retries"),
    ],
)
def test_wrong_arguments_are_refused(upload, arguments, fact):
    with UploadHub() as hub, pytest.raises(UserError, match=fact):
        upload(hub, *arguments)


@pytest.mark.parametrize("place", ["hf/sweep-a/global_step5", "hf/sweep-a/raw/global_step5"])
def test_a_folder_that_publishing_did_not_make_is_neither_replaced_nor_deleted(tmp_path, upload, place):
    theirs = tmp_path / place
    theirs.mkdir(parents=True)
    (theirs / "config.json").write_text("{}")
    (theirs / "model.safetensors").write_bytes(b"theirs")
    with UploadHub() as hub, pytest.raises(UserError, match=rf"{theirs} .*--output-dir"):
        upload(hub, "5", "lab", "--delete-local", "--upload-neox-only" if "raw" in place else "--skip-neox-upload")
    assert not hub.models
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"theirs",
    }


def test_another_run_with_the_same_name_is_refused(run_folder, upload):
    other = run_folder.parent / "sweep-a/global_step1"
    other.mkdir(parents=True)
    try:
        with UploadHub() as hub, pytest.raises(UserError, match="sweep=a and sweep-a"):
            upload(hub, "5", "lab", "--dry-run")
    finally:
        other.rmdir()
        other.parent.rmdir()
