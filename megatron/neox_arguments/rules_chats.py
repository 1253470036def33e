"""The batch of a run on `chats` whose config names none."""

from __future__ import annotations

from megatron.neox_arguments.draft import Draft

CHATS = 128  # of a step, as Alpaca is published (plan/chats.py)
STEPS = 10  # of an epoch at least


def chats_batch(draft: Draft, micro: int | None) -> int | None:
    """Rows of a step that hold about `CHATS` chats, and leave `STEPS` steps an epoch: a multiple of what the ranks take
    at a time. None where the config names a batch, or no chats."""
    found = draft["chats_found"]
    if found is None or micro is None or draft.is_set("gradient_accumulation_steps"):
        return None
    if not all(type(found.get(name)) is int and found[name] > 0 for name in ("chats", "tokens")):
        draft.fail("chats_found", "is written by the start; leave it out")
    rows = max(1, found["tokens"] // draft["seq_length"])
    unit = micro * draft["data_parallel_size"]
    wanted = min(CHATS * rows // found["chats"], rows // STEPS)
    batch = max(unit, wanted // unit * unit)
    lr = (draft["optimizer"] or {}).get("params", {}).get("lr")
    draft.note(
        f"chats: {found['chats']:,} chats, {found['tokens']:,} tokens in about {rows:,} rows; what the config does not "
        f"say follows published fine-tuning (documentation/chat_data.md): {batch} row{'s' * (batch > 1)}, about "
        f"{batch * found['chats'] / rows:.0f} chats, a step; learning rate {lr}"
    )
    return batch
