"""The table of data at the start and in the dry run: what each role and source has, and how much the run takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.data.order.data_plan import DataPlan
from megatron.data.order.splits import NAMES
from megatron.data.order.table import SourceRow
from megatron.data.tokens.manifest import read_manifest
from megatron.data.tokens.shuffle import is_shuffled

HEAD = ("role", "source", "documents", "tokens", "weight", "samples", "epochs", "file")
_NUMBERS = range(2, 7)


def data_cells(rows: Sequence[SourceRow]) -> list[tuple[str, ...]]:
    """The cells under `HEAD`. A weight that changes over time is shown for each phase."""
    return [
        (
            row.role,
            row.name,
            f"{row.documents:,}",
            f"{row.tokens:,}",
            " > ".join(f"{weight:.3g}" for weight in row.weights) or "0",
            f"{row.samples:,}",
            f"{row.epochs:.3g}",
            row.prefix,
        )
        for row in rows
    ]


def phase_lines(rows: Sequence[SourceRow]) -> list[str]:
    """The steps at which weights change, and the changes that the run does not reach; empty when none changes."""
    changing = sorted({(row.role, row.steps) for row in rows if len(row.steps) > 1})
    too_late = sorted({(row.role, row.unreached) for row in rows if row.unreached})
    return [
        *(f"weights of {role} from step {', then '.join(map(str, steps))} on" for role, steps in changing),
        *(
            f"weights of {role}: the run ends before the change at step {' and that at '.join(map(str, steps))}"
            for role, steps in too_late
        ),
    ]


def evaluation_notes(plan: DataPlan, eval_iters: int) -> list[str]:
    """A line for each source of validation or test that one evaluation of `eval_iters` batches reads twice or more, and
    one for what `split` leaves them."""
    rows, notes = plan.table(), _tail_notes(plan)
    for role in ("valid", "test"):
        whole = sum(row.samples for row in rows if row.role == role)
        for row in rows:
            passes = row.epochs * eval_iters * plan.batch / whole if row.role == role and whole else 0
            if passes >= 2:
                enough = max(1, math.ceil(eval_iters / passes))
                notes.append(
                    f"{role}: each evaluation reads {row.prefix} {passes:.1f} times (eval_iters {eval_iters} x batch "
                    f"{plan.batch}, {row.documents:,} documents); eval_iters={enough} is enough"
                )
    return notes


def _tail_notes(plan: DataPlan) -> list[str]:
    """A line where `split` gives validation or test the end of a training file that is not known to be shuffled."""
    found = {name: role.sources[0].source for name, role in plan.roles.items() if name in NAMES and role.sources}
    train = found.pop("train", None)
    held = [name for name, one in found.items() if train is not None and one.data is train.data]
    if train is None or not held or is_shuffled(read_manifest(train.data.prefix)):
        return []
    return [
        f"{' and '.join(held)}: the last {len(train.data) - train.documents[1]:,} of {len(train.data):,} documents of "
        f"{train.data.prefix} (split), which may be another kind of text than those before them. "
        "merge_datasets.py --shuffle SEED mixes them"
    ]


def data_lines(rows: Sequence[SourceRow]) -> list[str]:
    """The table as aligned text."""
    cells = [HEAD, *data_cells(rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return [*lines, *phase_lines(rows)]
