"""Rules: where profiles and copies of checkpoints go."""

from __future__ import annotations

import re

from megatron.neox_arguments.draft import Draft

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


def evaluation_jobs(draft: Draft) -> None:
    """eval_jobs has something to evaluate, and a place to find it."""
    if draft["eval_jobs"] is None:
        return
    for name, why in (("eval_tasks", "what to evaluate"), ("save", "checkpoints to evaluate")):
        if not draft[name]:
            draft.report("eval_jobs", f"{name} is not set, so it does not know {why}; set {name}")
    if draft["eval_jobs_most"] < 1:
        draft.report("eval_jobs_most", f"is {draft['eval_jobs_most']}; at least 1 (eval_jobs: null switches them off)")
    for flag in draft["eval_jobs_sbatch"] or ():
        if not flag.startswith("-"):
            draft.report("eval_jobs_sbatch", f"{flag!r} is no flag; write [--partition=low, --time=1:00:00]")


def object_store(draft: Draft) -> None:
    """s3_path names a bucket, and there is something to copy to it."""
    path, part = draft["s3_path"], draft["s3_chunk_size"]
    if path is None:
        return
    if not re.fullmatch(r"s3://[A-Za-z0-9][A-Za-z0-9.-]+(/.*)?", path):
        draft.report("s3_path", f"expected s3://bucket/path, got {path!r}")
    if draft["save"] is None:
        draft.report("s3_path", "save is not set, so there are no checkpoints to send; set save")
    if part < _S3_PART:
        draft.report("s3_chunk_size", f"is {part}; S3 takes parts of {_S3_PART} bytes and more")
