"""Rules: where profiles go."""

from __future__ import annotations

from megatron.neox_arguments.draft import Draft


def profiling(draft: Draft) -> None:
    """Which steps are profiled, and that there is a folder for the files."""
    draft.not_negative("profile_step_start")
    for name in ("profile", "memory_profiling"):
        if not draft[name]:
            continue
        start, stop = draft["profile_step_start"], draft["profile_step_stop"]
        if stop <= start:
            draft.fail("profile_step_stop", f"is {stop}, not after profile_step_start, which is {start}")
        folders = ["tensorboard_dir", "save", "log_dir", *(["memory_profiling_path"] if name != "profile" else [])]
        if not any(draft[folder] for folder in folders):
            draft.fail(name, f"has no folder to write to; set {folders[-1] if name != 'profile' else folders[0]}")
