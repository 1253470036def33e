"""Rules of runs that train on completions of the model's own or of a data server: reinforce, rloo, grpo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from megatron.neox_arguments.draft import Draft, nearest_multiples
from megatron.rows import row

_REWARDS = ("reward", "reward_url", "reward_model")
_OWN_BATCHES = ("batch_size_schedule", "rampup_batch_size", "seq_length_ramp")
_DATA = ("data_path", "train_data_paths", "valid_data_paths", "test_data_paths", "mixture", "valid_sets")


def trains_on_rollouts(value: Callable[[str], Any]) -> bool:
    """Whether a configuration, by its flat keys, does."""
    return row("train_impl", value("train_impl")).get("data") == "rollouts"


def keeps_reference(value: Callable[[str], Any]) -> bool:
    """Whether the weights that the run begins with are kept beside those that it trains."""
    if value("train_impl") == "unlearn":
        return value("ga_loss") == "rmu"
    return trains_on_rollouts(value) and value("kl_div_beta") > 0


def rollouts(draft: Draft) -> None:
    """Where prompts and rewards come from, and what cannot go with them."""
    online, prompts = draft["dataset_impl"] == "online", draft["rollout_prompts"] is not None
    impl = draft["train_impl"]
    if not trains_on_rollouts(draft.__getitem__):
        for key in ("rollout_prompts", "rollout_valid_prompts", *_REWARDS):
            if draft[key] is not None:
                draft.report(key, f"is not read by train_impl: {impl}; set train_impl: grpo, rloo or reinforce")
        if online:
            draft.fail("dataset_impl", f"online gives completions with rewards, which train_impl: {impl} does not read")
        return
    if online == prompts:
        both = (
            "dataset_impl: online is set, too; give one of them" if online else "must be set, or dataset_impl: online"
        )
        draft.fail("rollout_prompts", f"{both} (what train_impl: {impl} trains on)")
    given = [key for key in _REWARDS if draft[key] is not None]
    if online and given:
        draft.report(given[0], "completions of dataset_impl: online come with their rewards; leave it out")
    if online and draft["rollout_valid_prompts"] is not None:
        draft.report("rollout_valid_prompts", "dataset_impl: online says nothing of what such completions are worth")
    if not online and len(given) != 1:
        others = " and ".join(given)
        draft.report(
            "reward", f"one is enough: {others} are set" if given else "must be set, or reward_url, reward_model"
        )
    if draft["reward_url"] is not None and not _is_service(draft["reward_url"]):
        draft.report("reward_url", f"{draft['reward_url']!r} is no address of a service; write http://host:port/path")
    ips, ports = draft["online_dataserver_ips"], draft["online_dataserver_ports"]
    if online and isinstance(ips, tuple) and isinstance(ports, tuple) and len({1, len(ips), len(ports)}) > 2:
        draft.report("online_dataserver_ports", f"has {len(ports)} for {len(ips)} online_dataserver_ips; give each one")
    for key in (*_OWN_BATCHES, *_DATA):
        if draft[key] is not None:
            draft.report(
                key, f"train_impl: {impl} trains on completions, and takes as many in every step; leave it out"
            )
    if draft["train_epochs"] is not None:
        draft.report("train_epochs", f"counts training data, of which train_impl: {impl} reads none; set train_iters")
    _numbers(draft)
    _divergence(draft)


def _is_service(url: str) -> bool:
    """Whether a text is the address of a service over HTTP."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, of half a bracket
        return False


def _numbers(draft: Draft) -> None:
    draft.positive("rollouts_per_prompt", "rollout_tokens", "rollout_temperature", "rollout_steps", "reward_timeout")
    draft.positive("rollout_batch_size", "grpo_epsilon", "grpo_epsilon_high")
    draft.not_negative("rollout_log", "kl_div_beta")
    each, samples = draft["rollouts_per_prompt"], draft["train_batch_size"]
    if draft["dataset_impl"] != "online" and samples is not None and samples % each:
        near = nearest_multiples(samples, each)
        draft.report("rollouts_per_prompt", f"is {each}; train_batch_size: {samples} is no multiple of it, {near} are")
    compares = draft["train_impl"] != "reinforce" or draft["reinforce_leave_one_out"]
    if compares and each < 2:
        draft.report("rollouts_per_prompt", "the completions of a prompt are compared with each other: set 2 or more")
    if draft["rollout_tokens"] > draft["seq_length"]:
        draft.report("rollout_tokens", f"a prompt and its completion must fit into seq_length: {draft['seq_length']}")
    if draft["final_logit_softcapping"] and draft["rollout_temperature"] != 1:
        draft.report("rollout_temperature", "must be 1 with final_logit_softcapping")


def _divergence(draft: Draft) -> None:
    if draft["train_impl"] == "rloo" and draft.is_set("kl_impl"):
        draft.report("kl_impl", "is not read by rloo: kl_div_beta times the log-ratio is subtracted from the reward")
    if draft["kl_div_beta"] > 0 and draft["ema_decay"] is not None:
        draft.report(
            "ema_decay", "the reference of kl_div_beta is kept in the place of the average; set kl_div_beta: 0, or none"
        )
    if draft["kl_div_beta"] > 0 and draft["moe_bias_balancing_rate"] > 0:
        draft.report(
            "moe_bias_balancing_rate",
            "moves biases that the reference of kl_div_beta does not keep; set moe_aux_loss_coeff, or kl_div_beta: 0",
        )
    if draft["kl_div_beta"] > 0 and draft["kl_impl"] == "full" and draft["expert_parallel_size"] > 1:
        draft.report("kl_impl", "full needs a rank's own copy of the model: expert_parallel_size: 1, or k3")
