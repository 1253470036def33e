"""Every command that README and the guides show is run as it is written, in a process of its own.

One folder holds the files that the commands name: small data, a config of a small model, a tokenizer. What is not run
as written stands in `INSTEAD` with its reason and what is run in its place. A new command in a document is run
without being named here; if it cannot be, its test fails.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

from tests.checkpoint.neox_files import write_neox
from tests.documented import DOCUMENTS, ROOT, commands
from tests.tools.test_looking_at_data_guide import make_stdlib
from tests.warm_python import WarmPython

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(500)]

# Their blocks in `bash` are run by tests that also compare what is printed.
ELSEWHERE = {
    "documentation/conversion.md": "tests/convert/test_conversion_guide.py",
    "documentation/looking_at_data.md": "tests/tools/test_looking_at_data_guide.py",
    "documentation/tokenizing.md": "tests/tools/test_tokenizing_guide.py",
}
NOTHING = ":"
PREPARE = "python prepare_data.py --help", "half a minute; tests/data/tokenise/test_prepare.py runs it"
MAKE = NOTHING, "installs, or runs this suite; tests/test_documents.py compares the targets"
CLUSTER = NOTHING, "a part of a line for a cluster, or folders that are there only"
NETWORK = "python prepare_hf_dataset.py --help", "the Hub; tests/tools/test_prepare_hf_dataset.py has one of its own"
DOCS = NOTHING, "rewrites the documents of the repository; tests/neox_args/test_docs.py"
PLANNED = "{} --dry-run", "2M tokens a step, for GPUs"
TASKS = "{} --dry-run", "tasks of the Hub; tests/inference/test_cli.py evaluates"
BENCH = "{} --help", "minutes of measuring"
# a regular expression for commands -> what is run instead ({}: the command), and why
INSTEAD = {
    r"make .*": MAKE,
    r"python tools/ckpts/convert_(neox_to_peft|peft_to_neox)\.py .*": (
        "{words[0]} {words[1]} --help",
        "checkpoints of runs; tests/convert/hf/test_peft.py converts",
    ),
    r"python post-training/win_rate\.py .*": (
        "{words[0]} {words[1]} --help",
        "answers of two models; tests/tools/test_post_training.py judges some",
    ),
    r"python tools/ckpts/convert_neox_to_hf\.py .* --pad-token-id ID": (
        "{words[0]} {words[1]} --help",
        "a reward model's checkpoint; tests/convert/hf/test_reward_models.py converts",
    ),
    r"source \.venv/bin/activate|bash setup_uv_env\.sh": MAKE,
    r"python prepare_data\.py stdlib( -d \S+)?": PREPARE,
    r"deepy data corpus stdlib( -d \S+)?": ("deepy data corpus --help", PREPARE[1]),
    r"python deepy\.py train\.py configs/pythia/70M\.yml .*": PLANNED,
    r"deepy train (configs/pythia/70M\.yml .*)": ("deepy plan {words[2]} {words[3]} {words[4]}", PLANNED[1]),
    r"deepy new .* -o mine\.yml": ("deepy new --help", "a minute of a CPU; tests/recipes runs it"),
    r"deepy (train|chat) mine\.yml": (NOTHING, "what deepy new has made"),
    r"deepy eval run\.yml .*": ("{} --dry-run", "tasks of the Hub; tests/inference/test_cli.py evaluates"),
    r"deepy monitor runs/": ("deepy monitor --help", "run folders; tests/monitor types it"),
    r"srun --(ntasks-per-node|gpus-per-task)=1( torchrun .*)?|srun python -u train\.py CONF(IG)?\.\.\.": CLUSTER,
    r"(?s)srun --cpus-per-task=32 .*|.* --input /data/shards --output-prefix /data/corpus": CLUSTER,
    r"python slurm/monitor\.py (--wait-iterations|--cluster|--usage).*|bash tools/cluster/.*": (
        "python slurm/monitor.py --help",
        "SLURM; tests/monitor and tests/cluster/real type them",
    ),
    r"python slurm/monitor\.py runs/small --json": ("mkdir -p runs/small && {}", "a run folder"),
    r"python tools/report\.py .*": ("python tools/report.py --help", "run folders; tests/monitor/test_report.py"),
    r"(\w+=\S+ )?sbatch .*": (NOTHING, "SLURM; tests/cluster runs the scripts"),
    r"python slurm/submit\.py .*": (
        "python slurm/submit.py --help",
        "ssh to clusters; tests/jobs/test_submit.py submits",
    ),
    r"python -m megatron\.jobs\.environment --cluster NAME": ("{words[0]} {words[1]} {words[2]}", "a name"),
    r"python -m megatron\.neox_arguments\.docs": DOCS,
    r"python tools/ckpts/upload\.py .*": ("{words[0]} {words[1]} --help", "the Hub; tests/hub/test_push.py has one"),
    r"(python huggingface/upload_checkpoint\.py|bash huggingface/batch_\w+\.sh) (my-run|EXP) .*": (
        "{words[0]} {words[1]} checkpoints/tiny my-org --dry-run",
        "the Hub; tests/hub/test_upload_checkpoint.py and tests/jobs/test_publishing.py have one",
    ),
    r"deepy convert average .*": ("deepy convert average --help", "tests/convert/test_average.py averages"),
    r"python tools/bench/\w+\.py": BENCH,
    r"DEEPY_GPU_TESTS_ON=cpu bash tests/gpu/run\.sh": (NOTHING, "minutes of tests"),
    r"python -m torch\.distributed\.flight_recorder\.fr_trace RUN/.*": (
        "{words[0]} {words[1]} {words[2]} --help",
        "a folder of NCCL's dumps",
    ),
    r"python tools/bench/(train_step\.py --shape long|quality\.py --data) .*": (
        "{words[0]} {words[1]} --help",
        "minutes of measuring",
    ),
    r"(?s)(HF_HUB_OFFLINE=1 )?python prepare_hf_dataset\.py --dataset (owner|Salesforce|HuggingFaceTB)/.*": NETWORK,
    r"python deepy\.py eval\.py .*(hellaswag|--eval_suite).*": TASKS,
    r"python tools/ckpts/convert_neox_to_hf\.py .* --ema": (
        "{words[0]} {words[1]} --help",
        "a run with ema_decay; tests/training/test_ema.py exports one",
    ),
    r"python deepy\.py eval\.py .*my_group .*": ("mkdir -p lm_eval_tasks && {} --dry-run", TASKS[1]),
    r"python deepy\.py eval\.py .*my_tasks/ .*": (
        "python deepy.py eval.py -d configs run.yml --eval_tasks my_tasks/ one_more.yml --dry-run",
        "step 1000; tests/inference/test_cli.py evaluates tasks in files",
    ),
    r"python -m megatron\.jobs\.evaluation .*": (
        "python -m megatron.jobs.evaluation --help",
        "eval_tasks; tests/callbacks/test_evaluation_jobs.py evaluates",
    ),
    r"torchrun --nproc_per_node 4 generate\.py .*": (
        "torchrun --nproc_per_node 1 {words[3]} run.yml",
        "train.py has four ranks",
    ),
    r"(?s).* --text-column conversations .*": ("sed -i s/messages/conversations/ chats.jsonl && {}", "another column"),
    r"python deepy\.py train\.py configs/moe/1B-7B\.yml .*": ("{} seq_length=16", "small data"),
    r"python deepy\.py train\.py run\.yml load=neox save=new( --dry-run)?": (
        "python deepy.py train.py run.yml load=neox finetune=true save=new --dry-run",
        "no optimizer state; tests/training/test_neox_start.py continues such a run",
    ),
    r"python deepy\.py train\.py run\.yml mixture=.*": ("{} load=null", "run.yml here also generates"),
    r"python tools/compat\.py FOLDER": (
        "python tools/compat.py --help",
        "a second per file; tests/tools/test_compat.py sweeps a folder",
    ),
    r"python \./deepy\.py \./train\.py -d configs llama/7B.*": (
        "{} train_iters=10 lr_decay_iters=10 --dry-run",
        "7B, for GPUs",
    ),
    r"\./deepy\.py train\.py \.\.\.": ("./deepy.py train.py your.yml --dry-run", "a pattern"),
    r"\./prepare_hf_dataset\.py \.\.\.": ("./prepare_hf_dataset.py --help", "a pattern"),
    r"python deepy\.py tools/ckpts/convert_hf_to_sequential\.py .*": (
        "python tools/ckpts/convert_hf_to_sequential.py --help",
        "a model of the Hub; tests/convert/test_faces.py converts as the launcher starts it",
    ),
    r"python configs/gen_docs\.py": DOCS,
    r"python deepy\.py train\.py post-training/toy-grpo\.yml": (
        "{} train_iters=2",
        "half a minute; tests/run/test_rollouts.py",
    ),
    r"python post-training/llama_data\.py": ("{} --help", "the Hub; tests/tools/test_post_training.py has one"),
    r"(?s)python huggingface/convert_hf_to_neox\.py --hf-model meta-llama/.*": (
        "{words[0]} {words[1]} --help",
        "a model of the Hub",
    ),
    r"(?s)for split in train val test; do.*": (NOTHING, "data of the Hub; tests/tools/test_post_training.py tokenises"),
    r"python deepy\.py train\.py post-training/configs/llama3-8b-dpo\.yml": (
        "{} --explain dpo_beta",
        "8B, for GPUs; tests/tools/test_post_training.py loads it",
    ),
    r"printf 'Hello!.* \| deepy chat checkpoints/tiny .*": (
        "printf 'a\\n/help\\n' | deepy chat checkpoints/tiny maximum_tokens=2",
        "the small model has 16 positions",
    ),
    r"deepy serve .*": (
        "{} --dry-run",
        "it answers until it is stopped; tests/inference/server asks it",
    ),
    r"python deepy\.py (train|generate)\.py FILES.*": (
        "python deepy.py {words[2]} run.yml --dry-run",
        "a pattern",
    ),
    r"python deepy\.py eval\.py FILES .*": (
        "python deepy.py eval.py run.yml --eval_tasks a --dry-run",
        "the same",
    ),
}
_helped: set[str] = set()
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "max_position_embeddings": 16}
SMALL |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "train_iters": 5, "checkpoint_factor": 5}
SMALL |= {"eval_iters": 1, "eval_interval": 5, "num_workers": 0, "rms_norm_epsilon": 1e-5}


FILES = {
    "configs/text_generation.yml": "maximum_tokens: 4\nnum_samples: 2\n",
    "run.yml": "extends: configs/tiny.yml\nload: checkpoints/tiny\n",
    "configs/run.yml": "extends: tiny.yml\nload: checkpoints/tiny\n",
    "a.yml": "extends: configs/tiny.yml\n",
    "b.yml": "seed: 1\n",
    "your.yml": "extends: configs/tiny.yml\n",
    "text_generation.yml": "maximum_tokens: 4\n",
    "prompts.txt": "document 1\nword 2\n",
    "a.jsonl": '{"text": "document 3"}\n' * 3,
    "chats.jsonl": '{"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}]}\n' * 3,
    # chat_data.md
    "pairs.jsonl": '{"chosen": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}], '
    '"rejected": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "C"}]}\n',
    "qa.jsonl": '{"text": "Question: 1? Answer: 2", "question": "1?", "answer": "2"}\n' * 3,
    # huggingface_datasets.md
    "corpus.csv": "text\ndocument 4\ndocument 5\n",
    "data/stdlib/chat_template.jinja": "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}",
    # mixtures.md
    "late_math.yml": "mixture: {sources: {a: stdlib/stdlib_text_document}}\n",
}
LINKS = {
    "A": "checkpoints/tiny",
    "B": "hf",
    "EleutherAI/pythia-70m": "hf",
    "checkpoints/run": "checkpoints/mamba2",
    "path/to/tokenizer": "data/stdlib",
    "old/corpus_text_document.bin": "data/stdlib/stdlib_text_document.bin",
    "old/corpus_text_document.idx": "data/stdlib/stdlib_text_document.idx",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Path:
    """Where all commands of README have been run, with the files that the guides need besides."""
    place = tmp_path_factory.mktemp("commands")
    for name in (
        "tools",
        "huggingface",
        "slurm",
        "post-training",
        *(path.name for path in ROOT.glob("*.py") if path.name != "setup.py"),
    ):
        (place / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", place / "configs")
    _shrink(place / "configs/tiny.yml")
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for name, target in LINKS.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(place / target)  # where a command of README makes it
    make_stdlib(place / "data/stdlib")
    shutil.copy(place / "data/stdlib/tokenizer.json", place / "tokenizer.json")
    (place / "olmo").mkdir()
    np.save(place / "olmo/part-0.npy", np.array([1, 2, 100257, 3, 100257], dtype=np.uint32))
    pd.DataFrame({"text": ["document 6", "document 7"]}).to_parquet(place / "corpus.parquet")
    run_all(warm_python, place, "README.md")
    keys = {"num_layers": 4, "gpt_j_residual": True, **SMALL}
    write_neox(place / "neox/global_step9", load_file(place / "hf/model.safetensors"), keys)
    return place


def _shrink(config: Path) -> None:
    text = config.read_text()
    for key, value in SMALL.items():
        text, found = re.subn(rf"^{key}: .*$", f"{key}: {value}", text, flags=re.MULTILINE)
        text += "" if found else f"{key}: {value}\n"
    config.write_text(text)


def as_run(document: str) -> list[str]:
    """The commands of a document, those of `INSTEAD` replaced."""
    found = []
    for command in commands(document, ("", "sh") if document in ELSEWHERE else ("", "sh", "bash")):
        instead = [text for pattern, (text, _) in INSTEAD.items() if re.fullmatch(pattern, command)]
        assert len(instead) < 2, command
        found.append(instead[0].format(command, words=command.split()) if instead else command)
    return found


def run_all(warm: WarmPython, place: Path, document: str) -> None:
    for command in as_run(document):
        if command.endswith("--help") and command in _helped:
            continue
        _helped.add(command)
        done = warm.run(command, place, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{command}\n{done.stderr}"


def test_every_command_of_the_readme(folder: Path) -> None:
    for made in ("checkpoints/tiny/global_step5", "hf/model.safetensors"):
        assert (folder / made).exists(), made


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "README.md" and commands(name)])
def test_every_command_of_a_guide(folder: Path, warm_python: WarmPython, document: str) -> None:
    run_all(warm_python, folder, document)


def test_what_is_not_run_as_written_is_still_there() -> None:
    every = [command for document in DOCUMENTS for command in commands(document)]
    assert len(every) > 100
    assert [pattern for pattern in INSTEAD if not any(re.fullmatch(pattern, command) for command in every)] == []
    for document, test in ELSEWHERE.items():
        assert f'"{Path(document).name}"' in (ROOT / test).read_text(encoding="utf-8"), test
