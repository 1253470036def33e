"""The tokenizer of a checkpoint: recorded by imports and copies, compared wherever ids meet weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.start import Start
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model
from megatron.convert.neox.rewrite import rewrite
from megatron.convert.pairs import Place
from megatron.convert.verify import verify
from megatron.errors import UserError
from megatron.inference.build import build_stage
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.plan.preflight import preflight
from megatron.run.data import check_saved_tokenizer
from megatron.tokenizer import build_tokenizer
from tests.convert.helpers import NEOX, hugging_face, resolved
from tests.tokenizer.vocabularies import byte_level, write_json

pytestmark = pytest.mark.cpu


def change(made: dict[str, Any], kind: str) -> None:
    """A tokenizer.json of the same size, type and special tokens, but not the same tokenizer."""
    if kind == "permuted":
        vocab = made["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        return
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    made["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf/, what was imported from it (ours/), and two other tokenizers."""
    root = tmp_path_factory.mktemp("identity")
    path = write_json(root / "hf/tokenizer.json", byte_level(), tokenizer_config={"eos_token": "<|endoftext|>"})
    size = byte_level().get_vocab_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.convert.helpers.VOCAB", size)
        hugging_face(resolved(**NEOX), "neox")[0].save_pretrained(root / "hf")
    import_model(str(root / "hf"), root / "ours", check=False)
    for kind in ("permuted", "with a start"):
        content = json.loads(path.read_text(encoding="utf-8"))
        change(content, kind)
        (root / kind).mkdir()
        (root / kind / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        (root / f"{kind}.yml").write_text(yaml.safe_dump({"vocab_file": str(root / kind / "tokenizer.json")}))
    return root


def config(made: Path, kind: str, **more: Any) -> NeoXArgs:
    """As generate.py and eval.py get it."""
    keys = {"vocab_file": str(made / kind / "tokenizer.json"), "text_gen_type": "unconditional", **more}
    args = for_inference(NeoXArgs.from_files([str(made / "ours/config.yml")], keys))
    return derive(args, Facts(vocab_size=byte_level().get_vocab_size(), num_devices=1))


@pytest.mark.parametrize("kind", ["permuted", "with a start"])
def test_generation_evaluation_and_new_runs_refuse_another_tokenizer(made: Path, kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(made / "ours/global_step0")
    task = tmp_path / "task.yml"
    task.write_text("task: x\n")
    for script in ("generate", "eval"):
        more = {"eval_tasks": [str(task)]} if script == "eval" else {}
        preflight(config(made, "hf", **more), script)
        with pytest.raises(UserError, match=r"ours/global_step0 .*another tokenizer.*allow_config_changes"):
            preflight(config(made, kind, **more), script)
        preflight(config(made, kind, allow_config_changes=True, **more), script)
    args = config(made, kind)
    other = build_tokenizer(args.tokenizer)
    with pytest.raises(UserError, match="another tokenizer"):
        build_stage(args, ParallelState.single(), other, checkpoint)
    for start in ("finetune", "init", "load", "resume"):
        with pytest.raises(UserError, match="another tokenizer"):
            check_saved_tokenizer(Start(start, checkpoint, 0, ""), other, allow=False)
        check_saved_tokenizer(Start(start, checkpoint, 0, ""), other, allow=True)


def test_exports_and_comparisons_refuse_another_tokenizer(made: Path, tmp_path: Path) -> None:
    for kind in ("permuted", "with a start"):
        with pytest.raises(UserError, match="another tokenizer.*--config_file.*--no_save_tokenizer"):
            export(made / "ours", tmp_path / "out", config_files=[str(made / f"{kind}.yml")], check=False)
        assert not list(tmp_path.iterdir())
        shutil.copytree(made / "hf", tmp_path / "theirs")
        shutil.copyfile(made / kind / "tokenizer.json", tmp_path / "theirs/tokenizer.json")
        with pytest.raises(UserError, match="another tokenizer"):
            verify(Place(str(made / "ours"), "A"), Place(str(tmp_path / "theirs"), "B"))
        shutil.rmtree(tmp_path / "theirs")
    # What the message recommends.
    export(made / "ours", tmp_path / "bare", config_files=[str(made / "permuted.yml")], tokenizer=False, check=False)
    assert not (tmp_path / "bare/tokenizer.json").exists()
    export(made / "ours", tmp_path / "whole", check=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "whole")
    assert theirs.get_vocab() == AutoTokenizer.from_pretrained(made / "hf").get_vocab()
    assert verify(Place(str(tmp_path / "whole"), "A"), Place(str(made / "ours"), "B")).ok


def test_a_copy_of_the_weights_keeps_the_record(made: Path, tmp_path: Path) -> None:
    copied = rewrite(made / "ours", tmp_path / "copy", tp=2)
    assert open_checkpoint(copied).callbacks == open_checkpoint(made / "ours/global_step0").callbacks != {}
    with pytest.raises(UserError, match="another tokenizer"):
        export(copied, tmp_path / "out", config_files=[str(made / "permuted.yml")], check=False)
