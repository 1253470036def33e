"""Multi-process tests on a CPU in about a second: `run_distributed(fn, world_size)`.

Importing torch and DeepSpeed costs seconds per process, so one server process imports them once and forks the ranks of
every call (`server.py`); `rank.py` is what runs in each fork, `client.py` what the test calls.
"""

from tests.distributed.client import RankFailure, run_distributed

__all__ = ["RankFailure", "run_distributed"]
