"""Rules: where profiles and copies of checkpoints go."""

from __future__ import annotations

import os
import re

from megatron.neox_arguments.bucket_places import PLACE, step_in
from megatron.neox_arguments.draft import Draft

_REPO = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)
_S3_PART = 5 << 20  # bytes: what S3 takes at least, but for the last part


def profiling(draft: Draft) -> None:
    """Which steps are profiled, and that there is a folder for the files."""
    draft.not_negative("profile_step_start")
    for name in ("profile", "memory_profiling"):
        if not draft[name]:
            continue
        start, stop = draft["profile_step_start"], draft["profile_step_stop"]
        if stop <= start:
            draft.report("profile_step_stop", f"is {stop}, not after profile_step_start, which is {start}")
        folders = ["tensorboard_dir", "save", "log_dir", *(["memory_profiling_path"] if name != "profile" else [])]
        if not any(draft[folder] for folder in folders):
            draft.report(name, f"has no folder to write to; set {folders[-1] if name != 'profile' else folders[0]}")


def samples(draft: Draft) -> None:
    """sample_every has prompts."""
    if draft["sample_every"] > 0 and draft["sample_prompts"] is None:
        draft.report("sample_every", "there are no prompts to continue; set sample_prompts to a text file of them")


def evaluation_jobs(draft: Draft) -> None:
    """eval_jobs has something to evaluate, and a place to find it."""
    if draft["eval_jobs"] is None:
        return
    if not (draft["eval_tasks"] or draft["eval_suite"]):
        draft.report("eval_jobs", "neither eval_tasks nor eval_suite says what to evaluate; set one of them")
    if not draft["save"]:
        draft.report("eval_jobs", "save is not set, so there are no checkpoints to evaluate; set save")
    if draft["eval_jobs_most"] < 1:
        draft.report("eval_jobs_most", f"is {draft['eval_jobs_most']}; at least 1 (eval_jobs: null switches them off)")
    for flag in draft["eval_jobs_sbatch"] or ():
        if not flag.startswith("-"):
            draft.report("eval_jobs_sbatch", f"{flag!r} is no flag; write [--partition=low, --time=1:00:00]")


def exports(draft: Draft) -> None:
    """hf_save_interval has checkpoints to export, and hf_upload_repo exports to send."""
    if draft["hf_save_interval"] > 0 and draft["save"] is None:
        draft.report("hf_save_interval", "save is not set, so there are no checkpoints to export; set save")
    if (repo := draft["hf_upload_repo"]) is not None and not _REPO.fullmatch(repo):
        draft.report("hf_upload_repo", f"expected NAME or OWNER/NAME, got {repo!r}")
    elif repo is not None and draft["hf_save_interval"] <= 0:
        draft.report("hf_upload_repo", "hf_save_interval is not set, so there are no exports to send; set it")


def object_store(draft: Draft) -> None:
    """s3_path and s3_load name buckets, and there are folders that go with them."""
    path, load, part = draft["s3_path"], draft["s3_load"], draft["s3_chunk_size"]
    for name in ("s3_path", "s3_load"):
        if draft[name] is not None and not PLACE.fullmatch(draft[name]):
            draft.report(name, f"expected s3://bucket/path, got {draft[name]!r}")
    if path is not None and draft["save"] is None:
        draft.report("s3_path", "save is not set, so there are no checkpoints to send; set save")
    if load is not None and draft["load"] is None:
        draft.report("s3_load", "load is not set: name the folder to fetch into, or leave s3_load out")
    elif load is not None and (step := step_in(load)) and os.path.basename(draft["load"].rstrip("/")) != step:
        draft.report("s3_load", f"names {step}, and load does not: {draft['load']}; end both alike")
    if (path or load) and part < _S3_PART:
        draft.report("s3_chunk_size", f"is {part}; S3 takes parts of {_S3_PART} bytes and more")
