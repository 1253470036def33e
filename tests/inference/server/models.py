"""A small model with a chat template, and a server of it: in this process, or on real ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from openai import OpenAI

from megatron.checkpoint.find import open_checkpoint
from megatron.inference.build import build_stage
from megatron.inference.modes import find_ends
from megatron.inference.server.decoder import Decoder
from megatron.inference.server.desk import Desk
from megatron.inference.server.http import HttpThread, Interface
from megatron.inference.server.serve import describe, listen
from megatron.inference.team import Control
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.schema_data import TokenizerConfig
from megatron.tokenizer import build_tokenizer
from tests.data.chat.templates import write_folder
from tests.inference.models import GPT_LLAMA, Layout, inference_args, make_checkpoint

KEYS = {**GPT_LLAMA, "tokenizer_type": "HFTokenizer", "max_position_embeddings": 256, "save": "checkpoints"}


def write_model(folder: Path) -> dict[str, Any]:
    """`checkpoints/global_step1`, `run.yml` and the tokenizer in a folder; the keys of the config."""
    vocab_file = write_folder(folder / "tokenizer", "tools") / "tokenizer.json"
    keys = {**KEYS, "vocab_file": str(vocab_file)}
    size = build_tokenizer(TokenizerConfig(tokenizer_type="HFTokenizer", vocab_file=str(vocab_file))).vocab_size
    make_checkpoint(folder / "checkpoints", keys, Layout(), size)
    (folder / "run.yml").write_text(yaml.safe_dump(keys))
    return keys


@contextmanager
def served(folder: Path, keys: dict[str, Any], **more: Any) -> Iterator[tuple[str, Desk]]:
    """The address of a server with one rank, in threads of this process; and its desk. `more`: keys of the config."""
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HFTokenizer", vocab_file=keys["vocab_file"]))
    args = inference_args({**keys, "serve_port": 0, **more}, Layout(), tokenizer.vocab_size)
    state, checkpoint = ParallelState.single(), open_checkpoint(folder / "checkpoints" / "global_step1")
    stage = build_stage(args, state, tokenizer, checkpoint)
    ends = find_ends(args, tokenizer, checkpoint)
    decoder = Decoder(stage, tokenizer.detokenize, ends, tokenizer.require_eod("tests"))
    desk = Desk(Control(state), stage, decoder, args.generation.serve_batch_size, most_waiting=20)
    model = describe(SimpleNamespace(args=args, tokenizer=tokenizer), checkpoint, stage)  # type: ignore[arg-type]
    socket = listen(args.generation)
    http = HttpThread(Interface(model, desk, own_host=True).application(), socket)
    leading = threading.Thread(target=lambda: desk.team.run(desk.lead))
    http.start()
    leading.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}", desk
    finally:
        desk.stop()
        leading.join()
        http.end()


def client_of(address: str) -> OpenAI:
    """OpenAI's own client of a server."""
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
