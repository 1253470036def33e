"""JSON over HTTP: rewards from a service, completions from data servers. What comes in is only ever parsed."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from megatron.errors import DeepyError
from megatron.inference.rewards import Judge, Rollout, usable
from megatron.log import get_logger

logger = get_logger(__name__)

LARGEST = 1 << 30  # bytes of an answer


class ServiceError(DeepyError):
    """A service did not answer, or not with what was asked for."""


def ask(url: str, question: Any, timeout: float) -> Any:
    """POST a JSON value and return the JSON value of the answer. Raises `ServiceError` naming the address.

    `timeout`: seconds without a byte after which it has failed.
    """
    body = json.dumps(question).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    # Between the ranks of a job: no proxy of the environment has a part in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            content = answer.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ServiceError(f"{url}: the answer has more than {LARGEST} bytes")
        return json.loads(content)
    except urllib.error.HTTPError as error:
        raise ServiceError(f"{url}: HTTP {error.code} {error.reason}") from error
    except OSError as error:
        raise ServiceError(f"{url}: {getattr(error, 'reason', error)}") from error
    except HTTPException as error:
        raise ServiceError(f"{url}: the answer is not HTTP, or was cut off ({error!r})") from error
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"{url}: the answer is not JSON ({error})") from error


def judge_at(url: str, timeout: float) -> Judge:
    """Judgements of a service. It is sent `{"rollouts": [{"prompt", "completion", "finished", "fields"}, ...]}` and
    answers `{"rewards": [number or null, ...]}` in the same order."""

    def judge(rollouts: Sequence[Rollout]) -> list[float | None]:
        try:
            answer = ask(url, {"rollouts": [vars(rollout) for rollout in rollouts]}, timeout)
            rewards = answer.get("rewards") if isinstance(answer, dict) else None
            if not isinstance(rewards, list) or len(rewards) != len(rollouts):
                raise ServiceError(f"{url}: expected `rewards`, a list of {len(rollouts)} numbers")
            return [usable(reward) if isinstance(reward, (int, float)) else None for reward in rewards]
        except ServiceError as error:
            logger.warning(f"the rewards of {len(rollouts)} completions failed: {error}")
            return [None] * len(rollouts)

    return judge
