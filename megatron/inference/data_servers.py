"""Completions that others write: GPT-NeoX's online data servers, over HTTP with JSON (GPT-NeoX unpickles a socket).

A server is sent `{"split": "train", "step": n, "samples": m}` and answers a list of groups of completions of a prompt,
`{"prefix": [ids], "completions": [[ids], ...], "rewards": [numbers]}`, with m completions in all. The step tells a
server that a resumed run asks again for what it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

from megatron.inference.json_service import ServiceError, ask
from megatron.inference.rewards import usable
from megatron.inference.rollouts import Completed
from megatron.log import get_logger

logger = get_logger(__name__)


class DataServers:
    """The servers of a run.

    Args:
        ips, ports: one of each server, or one for all.
        timeout: see `json_service.ask`.
        vocab_size: of the tokenizer: ids are below it.
    """

    def __init__(self, ips: str | Sequence[str], ports: int | Sequence[int], timeout: float, vocab_size: int) -> None:
        hosts = [ips] if isinstance(ips, str) else list(ips)
        numbers = [ports] if isinstance(ports, int) else list(ports)
        count = max(len(hosts), len(numbers))
        hosts, numbers = hosts * (count if len(hosts) == 1 else 1), numbers * (count if len(numbers) == 1 else 1)
        self.urls = [f"http://{host}:{port}/" for host, port in zip(hosts, numbers, strict=True)]
        self.timeout, self.vocab_size = timeout, vocab_size

    def fetch(self, split: str, step: int, samples: int) -> list[list[Completed]]:
        """`samples` completions by prompt, from all servers in their order; fewer where one did not answer."""
        count = len(self.urls)
        shares = [samples // count + (i < samples % count) for i in range(count)]
        with ThreadPoolExecutor(count) as pool:
            found = pool.map(self._fetch, self.urls, repeat(split), repeat(step), shares)
            return [group for groups in found for group in groups]

    def _fetch(self, url: str, split: str, step: int, samples: int) -> list[list[Completed]]:
        if samples == 0:
            return []
        try:
            answer = ask(url, {"split": split, "step": step, "samples": samples}, self.timeout)
            if not isinstance(answer, list) or not answer:
                raise ServiceError(f"{url}: expected a list of groups of completions")
            groups = [self._group(one, f"{url}: group {number}") for number, one in enumerate(answer)]
            if (given := sum(map(len, groups))) != samples:
                raise ServiceError(f"{url}: {given} completions, {samples} were asked for")
            return groups
        except ServiceError as error:
            logger.warning(f"{samples} completions failed: {error}")
            return []

    def _group(self, group: Any, where: str) -> list[Completed]:
        """The completions of one prompt. Raises `ServiceError`."""
        if not isinstance(group, dict):
            raise ServiceError(f"{where} is no object")
        prefix, completions, rewards = group.get("prefix"), group.get("completions"), group.get("rewards")
        if not self._are_ids(prefix):
            raise ServiceError(f"{where}: prefix is no list of ids in [0, {self.vocab_size})")
        if not isinstance(completions, list) or not completions or not all(map(self._are_ids, completions)):
            raise ServiceError(f"{where}: completions is no list of lists of ids in [0, {self.vocab_size})")
        if not isinstance(rewards, list) or len(rewards) != len(completions):
            raise ServiceError(f"{where}: rewards is no list of {len(completions)} numbers")
        numbers = [usable(reward) if isinstance(reward, (int, float)) else None for reward in rewards]
        return [Completed(prefix, ids, reward) for ids, reward in zip(completions, numbers, strict=True)]

    def _are_ids(self, ids: Any) -> bool:
        return isinstance(ids, list) and bool(ids) and all(type(i) is int and 0 <= i < self.vocab_size for i in ids)
