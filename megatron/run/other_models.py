"""The models that a run needs beside its own (a teacher, a reward model): the same ones after each restart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.agreement import broadcast, together
from megatron.checkpoint.find import Checkpoint, find_checkpoint, identity, open_checkpoint
from megatron.checkpoint.hugging_face import hub_id, names_published_model
from megatron.checkpoint.start import Start
from megatron.convert.hf.run_config import described
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback

logger = get_logger(__name__)


class OtherModels(Callback):
    """Keeps with each checkpoint which ones they are: the folder of a run gets newer ones.

    Args:
        args: has the keys that name them.
        start: of this run, whose checkpoint knows those that it has had so far.
    """

    def __init__(self, args: NeoXArgs, start: Start, state: ParallelState) -> None:
        self.args, self.state = args, state
        own = start.checkpoint.callbacks if start.checkpoint is not None and start.resumes else {}
        self._models: dict[str, dict[str, Any]] = dict(own.get(type(self).__name__) or {})

    def state_dict(self) -> dict[str, Any]:
        return self._models

    def find(self, key: str) -> Checkpoint:
        """The checkpoint that `key` names. Collective: rank 0 looks.

        Raises `UserError` when there is none, or another one in the place of the run's so far.
        """
        found: Checkpoint | None = None
        named = str(self.args.get(key))
        with together(f"opening {key}", self.state):
            if self.state.rank == 0:
                found = described(self._find(key, named))
                kept = {"named": os.path.realpath(named), "path": str(found.path), "crc32": identity(found.path)}
                self._models[key] = kept  # rank 0 saves it
        found = broadcast(found, self.state)
        assert found is not None
        return found

    def _find(self, key: str, named: str) -> Checkpoint:
        before = self._models.get(key)
        if before is None:
            return find_checkpoint(named, key=key)
        root, step = Path(named), Path(before["path"]).name
        # Also where the folder was moved to.
        whole = layout.step_of(root.name) is not None or names_published_model(named)
        place = (Path(before["path"]) if hub_id(named) else root) if whole else root / step
        there = identity(place)
        if there is not None and there == before["crc32"]:
            return open_checkpoint(place, key)
        if os.path.realpath(named) == before["named"] and not self.args.checkpoint.allow_config_changes:
            state = "is not there any more" if there is None else "is another one now"
            raise UserError(
                f"{key}: {place}, which this run has used so far, {state}; bring it back, or set allow_config_changes: "
                f"true to go on with what {named} holds"
            )
        found = find_checkpoint(named, key=key)
        logger.info(f"{key}: from here on {found.path}, not {before['path']}")
        return found
