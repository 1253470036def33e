"""torch's flight recorder: the last collectives of every rank, kept in the run's folder when a run ends by a hang.

`python -m torch.distributed.flight_recorder.fr_trace RUN/flight_recorder` says which ranks did not come to which
collective; with `--allow-incomplete-ranks` where a rank left no file. It reads those of NCCL alone.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Mapping
from pathlib import Path

from torch._C import _distributed_c10d as c10d

ENTRIES = 2000
_SECONDS = 30.0


def prefix_of(folder: str | Path) -> Path:
    """What the names of the ranks' files in the run's folder begin with; the number of the rank follows."""
    return Path(folder) / "flight_recorder" / "rank_"


def settings(env: Mapping[str, str], folder: str | None) -> dict[str, str]:
    """The variables that switch it on, without those that the user has set, under whichever name. `folder`: of the run.

    torch writes the files itself when a collective of NCCL takes longer than its limit.
    """
    wanted = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): str(ENTRIES),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    if folder is not None:
        wanted["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(prefix_of(folder))
    return {names[0]: value for names, value in wanted.items() if not any(name in env for name in names)}


def dump(file: Path) -> None:
    """Write what this rank's recorder holds, for a process that is about to end: one that hangs in it ends as well."""
    recorded = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if recorded is None:
        return
    faulthandler.dump_traceback_later(_SECONDS, exit=True)  # it asks the device, which may not answer
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(recorded())
    faulthandler.cancel_dump_traceback_later()
