"""The `callbacks` key: which callbacks a run has, in which order, with which settings. Imports no torch.

The row of a callback, `@CALLBACKS.register("name", phase="measure", settings={"every": 10})`:

| keyword       | meaning                                                                                          |
|---------------|--------------------------------------------------------------------------------------------------|
| `phase`       | one of `PHASES`; default `measure`                                                               |
| `settings`    | name -> default of what `callbacks: {name: {...}}` may set; a value must have the default's type |
| `keys`        | configuration keys that it reads                                                                 |
| `idle`        | key -> value; when every one of these keys is unset, at this value or below, it has nothing to do |
| `required_by` | keys that are wrong without it: when one is set, it cannot be switched off                       |
| `loses`       | what a run without it lacks                                                                      |
| `console`     | names of its metrics that the console line shows                                                 |

Ours are part of every run in which they have something to do, those of plugins when the key names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.errors import UserError, nearest
from megatron.neox_arguments.coerce import WrongValue, coerce_type
from megatron.neox_arguments.draft import Draft
from megatron.registry import added
from megatron.rows import row, rows

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs

KIND = "callbacks"
FIELDS = ("phase", "settings", "keys", "idle", "required_by", "loses", "console")
PHASES = ("measure", "log", "check", "evaluate", "save", "score", "report", "finish")
"""The order of hooks: a step is measured before it is logged; a validation comes before the checkpoint of the same
step, so that a resumed run does not repeat it; what scores the model takes long and runs code of others, so it comes
after the checkpoint, which does not depend on it; what reports comes after all that there is to report, also at the end
of a run; how the run ended is recorded last."""

Get = Callable[[str], Any]
"""The value of a configuration key."""
Fail = Callable[[str, str], NoReturn]
"""Raises `UserError` for a key, saying where it was set."""


@dataclass(frozen=True)
class Chosen:
    """A callback of a run: its name, its row, its settings with the defaults."""

    name: str
    row: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def phase(self) -> str:
        return self.row.get("phase", PHASES[0])


def choose_callbacks(args: NeoXArgs) -> list[Chosen]:
    """The callbacks of a derived configuration, in the order in which their hooks run."""

    def fail(name: str, message: str) -> NoReturn:
        raise UserError(f"{name}: {message}")

    return _choose(args.get, fail)


def check_callbacks(draft: Draft) -> None:
    """Rule: the key names callbacks that exist, with their settings. What a run loses without one is noted."""
    _choose(draft.__getitem__, draft.fail)
    for name, value in by_name(draft[KIND]).items():
        found = row(KIND, name)
        if value is False and "loses" in found and not _is_idle(found, draft.__getitem__):
            draft.note(f"{draft.source(f'{KIND}.{name}')}: {KIND}.{name} is off: {found['loses']}")


def keys_of(found: Mapping[str, Any]) -> list[str]:
    """The configuration keys that the callback of a row reads."""
    return list(dict.fromkeys([*found.get("idle", ()), *found.get("keys", ())]))


def _choose(get: Get, fail: Fail) -> list[Chosen]:
    asked, ours, plugged = by_name(get(KIND)), list(rows(KIND)), list(added(KIND))
    for name in asked:
        if name not in (known := [*ours, *plugged]):
            hint = nearest(name, known)
            fail(f"{KIND}.{name}", f"there is no callback of this name.{hint} Choices: {', '.join(known)}")
    names = [*ours, *(name for name in asked if name in plugged)]
    found = [one for name in names if (one := _choose_one(name, asked.get(name), get, fail)) is not None]
    return sorted(found, key=lambda one: PHASES.index(one.phase))


def _choose_one(name: str, value: Any, get: Get, fail: Fail) -> Chosen | None:
    """The callback `name` with the value that the key gives it; None when it is off or has nothing to do."""
    found, dotted = row(KIND, name), f"{KIND}.{name}"
    if value is False:
        for key in (key for key in found.get("required_by", ()) if get(key)):
            fail(dotted, f"cannot be switched off while {key} is {get(key)}: {found['loses']}")
        return None
    if _is_idle(found, get):
        if value is not None:
            fail(dotted, f"has nothing to do: set {' or '.join(found['idle'])}")
        return None
    chosen = Chosen(name, found, _settings(dotted, found, value, fail))
    if chosen.phase not in PHASES:
        fail(dotted, f"its phase {chosen.phase!r} is not one of {', '.join(PHASES)}")
    return chosen


def by_name(value: Any) -> dict[str, Any]:
    """The value of the key by name: a list of names switches each on."""
    named = value if isinstance(value, dict) else dict.fromkeys(value or (), True)
    return {str(name).replace("-", "_"): True if inner is None else inner for name, inner in named.items()}


def _is_idle(found: Mapping[str, Any], get: Get) -> bool:
    """Whether the configuration gives a callback nothing to do."""
    idle = found.get("idle", {})
    return bool(idle) and all(_is_off(get(key), off) for key, off in idle.items())


def _is_off(value: Any, off: Any) -> bool:
    return value is None or value == off or (isinstance(value, (int, float)) and off is not None and value <= off)


def _settings(dotted: str, found: Mapping[str, Any], given: Any, fail: Fail) -> dict[str, Any]:
    """The settings of a callback: those given over the defaults."""
    settings = dict(found.get("settings", {}))
    if given is None or given is True:
        return settings
    if not isinstance(given, dict):
        fail(dotted, f"expected true, false or a mapping of its settings, got {given!r}")
    for name, value in given.items():
        if name not in settings:
            hint, keys = nearest(name, list(settings)), ", ".join(keys_of(found))
            known = f"Settings: {', '.join(settings)}" if settings else f"It has none; its keys are: {keys or 'none'}"
            fail(f"{dotted}.{name}", f"there is no setting of this name.{hint} {known}")
        try:
            settings[name] = coerce_type(value, _type_of(found["settings"][name]))
        except WrongValue as error:
            fail(f"{dotted}.{name}", str(error))
    return settings


def _type_of(default: Any) -> Any:
    """The type that a setting must have: that of its default; a list holds what its first item is."""
    if default is None:
        return Any
    if isinstance(default, (list, tuple)):
        return tuple[type(default[0]) if default else Any, ...]  # type: ignore[misc]
    return type(default)
