"""No token, key or password is in the tree, passes a config or a command line, or is in what a run writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron import log
from megatron.cluster.launchers import LAUNCHERS, MultiNodeJob, command_environment, select_exports
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.secrets import find_secrets, hide_secrets, is_secret_variable

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
# Made up, and put together here, so that this file holds none.
HEX, WORD = "0123456789abcdef" * 2 + "01234567", "aB3dE5gH1jK2mN4pQ6rS7tU8vW9xY0zA1b"
UUID = "-".join(("0f8fad5b", "d9cb", "469f", "a165", "70867728950e"))
FISH = "sword" + "fish"
LOGIN = f"me:{FISH}" + "@"
SECRETS = {
    "hub": f"hf_{WORD}",
    "wandb": HEX,
    "aws": "AKIA" + "QWERTYUIOPASDFGH",
    "aws_secret": f"{WORD}/{WORD}"[:40],
    "comet": WORD[::-1][:25],
    "github": f"ghp_{WORD[::-1]}aB3d",
}
# A line of a config -> the variable or command that its refusal names.
REFUSED = {
    f"wandb_team: {SECRETS['wandb']}": "WANDB_API_KEY",
    f"wandb_host: {SECRETS['wandb']}": "WANDB_API_KEY",
    f"wandb_team: {(WORD * 3)[:86]}": "WANDB_API_KEY",
    f"wandb_api_key: {SECRETS['wandb']}": "WANDB_API_KEY",
    f"comet_others: {{note: wandb_v1_{WORD}}}": "WANDB_API_KEY",
    f"wandb_host: https://{LOGIN}wandb.example": "netrc",
    f"s3_path: s3://{SECRETS['aws']}:{SECRETS['aws_secret']}@bucket/x": "AWS_ACCESS_KEY_ID",
    f"s3_path: s3://{LOGIN}bucket/x": "netrc",
    f"comet_others: {{token: {SECRETS['hub']}}}": "HF_TOKEN",
    f"comet_workspace: {SECRETS['hub']}": "HF_TOKEN",
    f"comet_api_key: {SECRETS['comet']}": "COMET_API_KEY",
    f'comet_others: {{"COMET_API_KEY": "{SECRETS["comet"]}"}}': "COMET_API_KEY",
    f"comet_others: {{aws_secret_access_key: {SECRETS['aws_secret']}}}": "AWS_SECRET_ACCESS_KEY",
    f"comet_others: {{db_password: {FISH}}}": "environment variable",
    f"wandb_run_name: {SECRETS['github']}": "credential helper",
    f"seed: 1  # {SECRETS['hub']}": "HF_TOKEN",
    f"# wandb login {SECRETS['wandb']}": "WANDB_API_KEY",
    "# password: " + "hunter2" + "x": "environment variable",
    f"comet_others: {{x: sk-ant-{'api03'}-{WORD}_{WORD}-A}}": "environment variable",
    f"comet_others: [sk-{'proj'}-x_{WORD}]": "environment variable",
    f"comet_others: {{x: 'sk-{'or-v1'}-{HEX[:32]}{HEX[:32]}'}}": "environment variable",
    f"comet_others: {{x: sk-{WORD[:20]}{WORD[:28]}}}": "environment variable",
    f"comet_others: {{token: {UUID}}}": "environment variable",
    f"comet_others: {{api_key: {'-'.join((WORD[:13], WORD[13:27]))}}}": "environment variable",
    f"comet_tags: [a, 'https://x.example/f?X-Amz-Signature={HEX}']": "signature",
    "-----BEGIN OPENSSH PRIVATE " + "KEY-----": "ssh",
}
HARMLESS = [
    f"git_hash: {HEX}",
    f"wandb_run_name: run-{HEX}",
    "wandb_host: https://wandb.example:8080/path",
    "s3_path: s3://bucket/user@example/x",
    'stop_tokens: ["<|im_end|>", 151645]',
    "comet_others: {eos_token: '<|endoftext|>', bos_token: '<s>', tokens: 30000000000000000000}",
    'train_data_paths: ["/data/token_files_2024_01_text_document"]',
    "comet_others: {password: null, token: $TOKEN}",
    "keep_last_n_checkpoints: 1234567890123456789",
    "data_path: /data/sk-wikipedia_20231101_text_document",
    "save: sk-large_lr_0001_bs_1024_warm_100",
    "wandb_group: task-sk-learn_Experiment_Number_20231101",
    "comet_others: {note: risk-Assessment_With_Llama_3_1_8B_Instruct}",
    "# password: stored in the vault",
    "passphrase: my-run",
    "vocab_token: gpt2_50257_tokens_v1",
    "eos_token: Qwen2_5-32B-Instruct_2024",
    "data_path: /data/api-key_sha256/tokens.2023-11-01_text_document",
    f"comet_others: {{sha256: {HEX}{HEX[:24]}, commit: {HEX}, id: {UUID}}}",
    "wandb_run_name: EleutherAI/pythia-1.4b-deduped_step143000_hf_2024",
    "comet_others: {image: 'docker://ubuntu:22.04" + "@sha256:" + HEX + "'}",
    "tokenizer_type: HFTokenizer  # token: see vocab_file_gpt2_20231101",
]
# Refused in a value, and hidden in a log.
_IT = "pass" + "word: "
EXPLAINED = [f"# {_IT}deposited in the vault", f"seed: 1 # its {_IT}written-down", f"#{_IT}ask-the-owner"]
# The user of GPT-NeoX's own image, in its example.
USER_PATHS = {"configs/docker/pythia-paths.yml"}


def tracked() -> Iterator[tuple[str, str]]:
    """(path, text) of the files in version control, and of new ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            yield name, path.read_bytes().decode("utf-8", "replace")


def test_the_tree_holds_no_secret_and_no_user() -> None:
    """By the patterns of a scanner, and by ours, which know trackers and names of keys."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector

    known = get_mapping_from_secret_type_to_class().values()
    slow = re.compile("Ibm|Cloudant|Softlayer|Artifactory|IPPublic")  # services that nobody here has, 3 s of processor
    scanners = [one() for one in known if issubclass(one, RegexBasedDetector) and not slow.match(one.__name__)]
    assert len(scanners) > 15
    user = re.compile(r"(?<![\w.$}])/(?:home|Users)/(?!\w*NAME\b|USER\b|you\b)[A-Za-z][\w.-]*")
    found, files = [], 0
    for name, text in tracked():
        files += 1
        found += [f"{name}:{secret.line}: {secret.kind}" for secret in find_secrets(text)]
        found += [f"{name}: {type(scanner).__name__}" for scanner in scanners if any(scanner.analyze_string(text))]
        if name not in USER_PATHS:
            found += [f"{name}: {match[0]}" for match in user.finditer(text)]
    assert files > 500 and not found, "\n".join(found)


@pytest.mark.parametrize("line", REFUSED)
def test_a_secret_in_a_config_is_refused_where_it_stands_and_never_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.yml"
    path.write_text(f"num_layers: 2\n{line}\n")
    with pytest.raises(UserError) as caught:
        NeoXArgs.from_files([str(path)])
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ") and REFUSED[line] in message
    assert not any(part in message for part in (*SECRETS.values(), HEX, FISH))


def test_a_secret_in_a_file_that_is_extended_or_on_the_command_line_or_in_a_call_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base.yml").write_text(f"seed: 1\ncomet_others: {{token: {SECRETS['hub']}}}\n")
    (tmp_path / "run.yml").write_text("extends: base\n")
    with pytest.raises(UserError, match=r"base\.yml:2: .*HF_TOKEN"):
        NeoXArgs.from_files([str(tmp_path / "run.yml")])
    for overrides in ([f"wandb_team={HEX}"], {"wandb_team": HEX}):
        with pytest.raises(UserError, match=r"(command line|Python call): wandb_team: .*WANDB_API_KEY") as caught:
            NeoXArgs.from_files([], overrides)
        assert HEX not in str(caught.value)


@pytest.mark.parametrize("line", HARMLESS)
def test_what_only_looks_a_little_like_a_secret_passes(line: str) -> None:
    assert list(find_secrets(line)) == [] and hide_secrets(line) == line


@pytest.mark.parametrize("line", EXPLAINED)
def test_a_comment_may_say_where_a_password_is(line: str) -> None:
    assert not list(find_secrets(f"db_passwords: {{}}\n{line}\nseed: 2"))
    assert [one.line for one in find_secrets(f"# x\n{line.replace('#', '')}")] == [2]


REPEATED = [
    *("_", "a_", "a.", "-", "A", "0", " ", "aA0-", "://", "://a:", "sk-", "sk-a-", "?sig=", "-----BEGIN A "),
    *("token=", "token=aA0-", "password=", "# password" + ": abcdefgh ", "wandb_key --", "wandb_key:" + " " * 50),
    *("comet_key=a.", "aws_secret.", "api_key=abc-", "hf_a"),
]


@pytest.mark.parametrize("unit", REPEATED, ids=lambda unit: unit.strip() or "spaces")
def test_a_long_text_takes_time_by_its_length_only(unit: str) -> None:
    """Every line of a log passes here, and a run may be called anything: 50 KB, of processor time."""
    text = unit * (50_000 // len(unit))
    began = time.process_time()
    hide_secrets(text)
    list(find_secrets(text))
    assert time.process_time() - began < 2


def test_no_launcher_has_a_secret_on_its_command_line() -> None:
    """Neither by name, nor by what a harmless name holds, nor from .deepspeed_env."""
    secret = {
        "WANDB_API_KEY": HEX,
        "HF_TOKEN": SECRETS["hub"],
        "DS_NETRC": "machine x",
        **dict.fromkeys(("HF_HUB_PASSWD", "NCCL_CREDENTIALS"), FISH),
        "HF_ENDPOINT": f"https://{LOGIN}hub.example",
        "DEEPY_X": SECRETS["aws"],
    }
    from_file = {"AWS_SECRET_ACCESS_KEY": SECRETS["aws_secret"], "PLAIN": "1"}
    exports, kept = select_exports({**secret, "NCCL_DEBUG": "INFO"}, from_file)
    assert exports == {"NCCL_DEBUG": "INFO", "PLAIN": "1"} and kept == sorted([*secret, "AWS_SECRET_ACCESS_KEY"])
    job = MultiNodeJob({"a": [0], "b": [0]}, "t.py", "r.json", "{}", "python", "/x", "a", 1, exports, from_file)
    for name, launcher in LAUNCHERS.items():
        text = "\0".join(launcher.command(job))
        assert not any(value in text for value in [*SECRETS.values(), FISH, "machine x"]), name
    assert command_environment("slurm", job, {})["AWS_SECRET_ACCESS_KEY"] == SECRETS["aws_secret"]
    assert all(is_secret_variable(name) for name in ("NETRC", "GIT_ASKPASS_TOKEN", "MY_PASSWORD", "x_key"))


OF_SECRETS = """WANDB_API_KEY hf_token AWS_ACCESS_KEY_ID MASTER_KEY apiKey accessToken PGPASSWORD MYSQL_PWD SSHPASS
    WANDB_APIKEY db-password API_KEYS GOOGLE_APPLICATION_CREDENTIALS client_secret GITLAB_TOKEN_2 SESSION_COOKIE"""
OF_NO_SECRETS = """TOKENIZERS_PARALLELISM HF_TOKENIZER_PATH KEYBOARD UCX_IB_PKEY NCCL_IB_PKEY OMPI_MCA_btl_openib_pkey
    SSH_AUTH_SOCK PWD OLDPWD HF_TOKEN_PATH FI_MR_KEY_SIZE eos_token pad_token_id moe_token_dispatcher_type MAX_TOKENS"""


def test_names_of_secrets_are_known_by_whole_words() -> None:
    """One rule for the launchers, which carry the rest to other hosts, and for profiles of clusters."""
    assert [name for name in OF_SECRETS.split() if not is_secret_variable(name)] == []
    assert [name for name in OF_NO_SECRETS.split() if is_secret_variable(name)] == []
    assert not is_secret_variable("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1") and is_secret_variable("HF_TOKEN", "x1")
    assert is_secret_variable("TOKENIZERS_X", SECRETS["hub"])
    harmless = {"TOKENIZERS_PARALLELISM": "false", "UCX_IB_PKEY": "0x1"}
    assert select_exports({}, harmless) == (harmless, [])


def test_messages_hide_what_they_quote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a server, a command or a library said, on stderr and in a log file."""
    log.configure(file=tmp_path / "a.log")
    log.get_logger("x").warning(f"403 of https://{LOGIN}hub.example with Authorization token={SECRETS['hub']}!")
    shown = capsys.readouterr().err + (tmp_path / "a.log").read_text()
    assert shown.count("403 of https://" + "me:***@hub.example") == 2
    assert FISH not in shown and SECRETS["hub"] not in shown
    code = f"from megatron.errors import *\ndef f(): raise UserError('git said: {SECRETS['github']}')\nrun_cli(f)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: git said: ***\n")


RUN = """\
num_layers: 1
hidden_size: 16
num_attention_heads: 2
seq_length: 16
optimizer: {type: adam, params: {lr: 1.0e-3}}
train_batch_size: 2
train_micro_batch_size_per_gpu: 2
train_iters: 2
eval_iters: 0
log_interval: 1
tokenizer_type: CharLevelTokenizer
data_path: tokens
save: run
checkpoint_factor: 1
use_wandb: true
use_comet: true
tensorboard_dir: run/tb
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_a_run_writes_holds_none_of_its_environment(tmp_path: Path) -> None:
    """A real run with secrets in every place where they may be, all trackers on, in a clone with a password in it."""
    (tmp_path / "run.yml").write_text(RUN)
    with IndexedDatasetBuilder(tmp_path / "tokens", np.uint16) as builder:
        for _ in range(20):
            builder.add_document(np.arange(60) % 50)
        builder.finalize()
    home = tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {HEX}\n")
    (home / ".deepspeed_env").write_text(f"AWS_SECRET_ACCESS_KEY={SECRETS['aws_secret']}\n")
    remote = f"https://me:{SECRETS['github']}@git.example/x"
    for command in (["init", "-q"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "COMET_START_ONLINE": "0",
        "COMET_API_KEY": SECRETS["comet"],
        "WANDB_API_KEY": SECRETS["wandb"],
        "HF_TOKEN": SECRETS["hub"],
        "AWS_ACCESS_KEY_ID": SECRETS["aws"],
        "AWS_SECRET_ACCESS_KEY": SECRETS["aws_secret"],
        "GITHUB_TOKEN": SECRETS["github"],
    }
    command = [sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py"), "run.yml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    written = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    written[Path("output")] = (done.stdout + done.stderr).encode()
    names = {path.name for path in written}
    assert {"resolved.yml", "status.json", "metrics.jsonl", "run.yml"} <= names
    kinds = (r"run-\w+\.wandb", r"events\.out\..*", r".*\.zip", r"rank_0\.log|latest")
    assert all(any(re.fullmatch(kind, name) for name in names) for kind in kinds), sorted(names)
    for path, content in written.items():
        shown = content + b"".join(_unzipped(path))
        leaked = [name for name, value in SECRETS.items() if value.encode() in shown]
        assert not leaked, f"{path} holds {leaked}"
        if path.suffix in (".yml", ".json", ".jsonl", ".txt", ".log", ""):
            assert not list(find_secrets(content.decode("utf-8", "replace"))), path
    assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 2


def _unzipped(path: Path) -> Iterator[bytes]:
    """The files inside an archive (Comet's, and the tensors of a checkpoint)."""
    import zipfile

    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) for name in archive.namelist())
