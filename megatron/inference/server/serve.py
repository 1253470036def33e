"""From a rank that has started to a model that answers, until a stop signal."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from megatron.checkpoint.find import Checkpoint
from megatron.errors import UserError
from megatron.inference.build import build_stage
from megatron.inference.chats import Chats
from megatron.inference.exported_text import as_exported
from megatron.inference.inputs import inherit_tokens, requested_checkpoint
from megatron.inference.modes import find_ends
from megatron.inference.server.decoder import Decoder
from megatron.inference.server.desk import Desk
from megatron.inference.server.http import HttpThread, Interface, Served
from megatron.inference.stage import Stage
from megatron.inference.team import Control
from megatron.log import get_logger, result
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.schema_train import GenerationConfig
from megatron.signals import handle_stop_signals
from megatron.training.setup import Process

logger = get_logger(__name__)

UNIX = "unix:"
MOST_WAITING = 1000  # texts
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def serve(process: Process) -> int:
    """Answer requests as configured (`serve_host`, ...) until a stop signal, and return the exit code. The same call on
    every rank."""
    args, state, tokenizer = process.args, process.state, process.tokenizer
    options, control = args.generation, Control(process.state)
    listening: list[socket.socket] = []  # on rank 0

    def inputs() -> tuple[Checkpoint, frozenset[int]]:
        checkpoint = requested_checkpoint(args)
        ends = find_ends(args, tokenizer, checkpoint)
        listening.append(listen(options))
        return checkpoint, ends

    # Before the weights are read: they are what users get wrong.
    checkpoint, ends = control.on_rank_zero(inputs)
    stage = build_stage(args, state, tokenizer, checkpoint)
    decoder = Decoder(stage, tokenizer.detokenize, ends, tokenizer.require_eod("generation"))
    desk = Desk(control, stage, decoder, options.serve_batch_size, MOST_WAITING)
    # Rank 0 tells the others when to end.
    handle_stop_signals(lambda number, frame: desk.stop())

    def lead() -> None:
        is_own = options.serve_host in _LOOPBACK or options.serve_host.startswith(UNIX)
        served = describe(process, checkpoint, stage)
        http = HttpThread(Interface(served, desk, is_own).application(), listening[0])
        http.start()
        if not is_own:
            logger.warning(f"serve_host: {options.serve_host}: everybody who reaches this machine can use the model")
        result(f"serving {served.name} at {_address(options, listening[0])} (Ctrl-C ends it)")
        try:
            desk.lead()
        finally:
            http.end()
            if options.serve_host.startswith(UNIX):
                Path(options.serve_host.removeprefix(UNIX)).unlink(missing_ok=True)

    desk.team.run(lead)
    logger.info("the server has ended")
    return 0


def describe(process: Process, checkpoint: Checkpoint, stage: Stage) -> Served:
    """The checkpoint's model, as clients see it."""
    args, tokenizer = process.args, process.tokenizer
    exported = as_exported(tokenizer, inherit_tokens(args, checkpoint))
    has_template = getattr(exported.tokenizer, "chat_template", None) is not None
    path = checkpoint.path.absolute()
    return Served(
        name=f"{path.parent.name}/{path.name}",
        created=int(time.time()),
        tokenizer=tokenizer,
        positions=stage.max_positions,
        most_tokens=args.generation.maximum_tokens if args.is_set("maximum_tokens") else None,
        chats=Chats(exported, every=False, system=None) if has_template else None,
        defaults=request_defaults(args),
    )


def request_defaults(args: NeoXArgs) -> dict[str, Any]:
    """What the config sets of sampling, as fields of a request; OpenAI's `top_p` is off at 1, ours at 0."""
    options = args.generation
    fields = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p or 1.0}
    found: dict[str, Any] = {name: value for name, value in fields.items() if args.is_set(name)}
    return found | ({"stop": list(options.stop_strings)} if options.stop_strings else {})


def listen(options: GenerationConfig) -> socket.socket:
    """The socket of `serve_host` and `serve_port`. Raises `UserError` where it cannot be had."""
    host, port = options.serve_host, options.serve_port
    try:
        if host.startswith(UNIX):
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(file := host.removeprefix(UNIX))
            os.chmod(file, 0o600)
            listening.listen()
            return listening
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        where = f"serve_host: {host}" if host.startswith(UNIX) else f"serve_port: {host}:{port}"
        raise UserError(f"{where} cannot be listened at: {error}; choose another") from error


def _address(options: GenerationConfig, listening: socket.socket) -> str:
    if options.serve_host.startswith(UNIX):
        return options.serve_host
    host = f"[{options.serve_host}]" if ":" in options.serve_host else options.serve_host
    return f"http://{host}:{listening.getsockname()[1]}"
