"""Which attention back-end a layer uses: what the configuration names, or the best one that can do the task."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.errors import UserError
from megatron.layers import attention_kernels, attention_sdpa  # these fill the table
from megatron.layers.attention_contract import ATTENTION_BACKENDS, Backend, Task
from megatron.layers.attention_packed import use_flash3
from megatron.layers.transformer_engine import attention as transformer_engine_attention

# Importing them is what fills the registry.
PROVIDERS = (attention_kernels, attention_sdpa, transformer_engine_attention)

# By device, best first; what can do everything everywhere ends each list: torch's SDPA, the formula for capped scores.
PLAIN: dict[str, tuple[str, ...]] = {"cuda": ("torch",), "cpu": ("torch",)}
# Sliding windows and packed documents: masks cost O(s²) memory and most of the time a kernel saves.
PACKED: dict[str, tuple[str, ...]] = {"cuda": ("varlen", "flash", "flex", "torch"), "cpu": ("varlen", "torch")}
WINDOWED: dict[str, tuple[str, ...]] = {"cuda": ("varlen", "torch"), "cpu": ("torch",)}
CAPPED: dict[str, tuple[str, ...]] = {"cuda": ("flash", "flex", "manual"), "cpu": ("manual",)}
# flash-attn takes lengths that depend on the data, which a compiled block cannot (training/compile).
CAPPED_PACKED: dict[str, tuple[str, ...]] = {"cuda": ("flex", "flash", "manual"), "cpu": ("manual",)}
# A learned bias on the scores needs its gradient, which is as large as the scores.
BIASED: dict[str, tuple[str, ...]] = {"cuda": ("torch",), "cpu": ("torch",)}
BIASED_CAPPED: dict[str, tuple[str, ...]] = {"cuda": ("manual",), "cpu": ("manual",)}


@dataclass(frozen=True)
class Choice:
    """A back-end, its name, which kernel it has where there are several, and why those before it were not taken."""

    name: str
    backend: Backend
    passed_over: tuple[str, ...] = ()
    kernel: str = ""

    def __str__(self) -> str:
        return (
            self.name
            + (f" by {self.kernel}" if self.kernel else "")
            + (f" ({'; '.join(self.passed_over)})" if self.passed_over else "")
        )


def choose_backend(task: Task, wanted: str = "auto", prefer: tuple[str, ...] = ()) -> Choice:
    """The back-end for `task`; all compute the same numbers. `prefer`: names that "auto" tries before its own list.

    `wanted` (`attention_backend`) is a name, which must be able to do it (`UserError`), or "auto": flash-attn for kind
    "flash" where it is installed, else the first of the device's list that can.
    """
    if wanted != "auto":
        backend = ATTENTION_BACKENDS[wanted]()
        if reason := backend.why_not(task):
            raise UserError(f"attention_backend: {wanted} cannot be used: {reason}; auto takes one that can")
        return Choice(wanted, backend, kernel=_kernel(wanted, task))
    if task.bias:
        table = BIASED_CAPPED if task.softcap else BIASED
    elif task.softcap:
        table = CAPPED_PACKED if task.documents else CAPPED
    else:
        table = PACKED if task.documents else WINDOWED if task.window else PLAIN
    names = table.get(task.device.type, ("manual",) if task.softcap else ("torch",))
    passed_over: list[str] = []
    if task.kind == "flash" and task.device.type != "cuda":
        passed_over.append("flash-attn needs a GPU")
    elif task.kind == "flash" and not task.documents and "flash" not in names:
        names = ("flash", *names)
    for name in (*prefer, *names):
        try:
            backend = ATTENTION_BACKENDS[name]()
            reason = backend.why_not(task)
        except UserError as error:
            reason = str(error)
        if reason is None:
            return Choice(name, backend, tuple(passed_over), _kernel(name, task))
        passed_over.append(reason)
    raise UserError("; ".join(passed_over))


def _kernel(name: str, task: Task) -> str:
    """Which kernel a back-end has that has several; the best of them is switched on here, before any forward pass."""
    if name != "varlen" or task.device.type != "cuda":
        return ""
    return "FlashAttention 3" if use_flash3(task.device) else "FlashAttention 2"
