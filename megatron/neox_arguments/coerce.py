"""Turn a YAML value into the type of its key, or report what is expected and what the value is."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any, get_args, get_origin

from megatron.errors import nearest
from megatron.neox_arguments.keys import LARGEST, KeyInfo, union_members

LONGEST_SHOWN = 200  # characters of a value in a message


class WrongValue(ValueError):
    """The value does not fit the key; the message says what is expected and what the value is."""


def coerce(value: Any, info: KeyInfo) -> Any:
    """The value of `info`'s key in its declared type. None (null) means the default. Raises `WrongValue`."""
    if value == "None" and (info.type is not str or info.choices) and "none" not in info.choices:
        value = None
    if value is None:
        return info.default
    if isinstance(value, str):
        value = _spelling(value, info)
    value = coerce_type(value, info.accepts(info.choices))
    if type(value) is int and value > info.most:
        raise WrongValue(f"expected {type_name(int)} of at most {info.most}, got {describe(value)}")
    if info.path:
        for one in value if isinstance(value, tuple) else (value,):
            check_path(one)
    return value


def check_path(path: str | None) -> None:
    """Raise `WrongValue` for a text that no file can have as its name: to look for it would raise an `OSError`."""
    name = (path or "").encode(errors="replace")
    if max(map(len, name.split(b"/"))) > 255 or len(name) > 4095 or b"\0" in name:
        raise WrongValue(
            f"no file can have the name {describe(path)}: a path has at most 4095 bytes, a name in it 255, none is zero"
        )


def coerce_type(value: Any, annotation: Any) -> Any:
    """`value` as `annotation` (plain types, unions, Literal, tuples and dicts). Raises `WrongValue`."""
    if value is None and NoneType in union_members(annotation):
        return None
    members = [member for member in union_members(annotation) if member is not NoneType]
    for member in members:  # an exact fit first: `int | float` keeps 3 an int and 0.5 a float
        if isinstance(member, type) and type(value) is member:
            return _coerce_number(value, member) if member in (int, float) else value
    problem = WrongValue(f"expected {type_name(annotation)}, got {describe(value)}")
    for member in members:
        try:
            return _coerce_member(value, member)
        except WrongValue as error:
            problem = error
    raise problem


def _spelling(value: str, info: KeyInfo) -> str:
    """The canonical spelling of a choice: choices are matched without regard to case."""
    names = {str(choice).lower(): choice for choice in info.choices} | info.spellings
    return names.get(value.lower(), value)


def _coerce_member(value: Any, member: Any) -> Any:
    origin = get_origin(member)
    if origin is tuple:
        return _coerce_tuple(value, member)
    if member is dict or origin is dict:
        if isinstance(value, dict):
            _check_plain(value)
            return value
    elif member is bool or member is str:
        if type(value) is member:
            return value
    elif member in (int, float):
        return _coerce_number(value, member)
    elif get_args(member):  # Literal
        return _coerce_choice(value, member)
    elif member is Any:
        return value
    raise WrongValue(f"expected {type_name(member)}, got {describe(value)}" + _advice(value, member))


def _check_plain(value: Any) -> None:
    """Refuse what YAML can say inside a mapping and JSON, in which the ranks get it, cannot: dates, bytes, sets."""
    if isinstance(value, dict):
        for part in (*value, *value.values()):
            _check_plain(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check_plain(part)
    elif not isinstance(value, str | int | float | None):
        raise WrongValue(f"expected text, numbers, true, false, lists and mappings inside, got {describe(value)}")


def _coerce_number(value: Any, kind: type) -> int | float:
    number = value
    if isinstance(value, str):  # YAML reads 1e-4 as text
        try:
            number = float(value)
        except ValueError:
            number = None
    if number is None or isinstance(number, bool) or not isinstance(number, (int, float)):
        raise WrongValue(f"expected {type_name(kind)}, got {describe(value)}")
    if isinstance(number, float) and not math.isfinite(number):
        raise WrongValue(f"expected a finite number, got {describe(value)}")
    if abs(number) > LARGEST and (kind is int or isinstance(number, int)):
        raise WrongValue(f"expected {type_name(kind)} of at most 2^63, got {describe(value)}")
    if kind is float:
        return float(number)
    if number != int(number):
        raise WrongValue(f"expected {type_name(int)}, got {describe(value)}")
    return int(number)


def _coerce_tuple(value: Any, member: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        if "," in value:
            items = ", ".join(part.strip() for part in value.strip("[]").split(","))
            raise WrongValue(f"expected a list, got {describe(value)}: did you mean [{items}]?")
        value = [value]
    if not isinstance(value, (list, tuple)):
        value = [value]
    inner = get_args(member)
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(freeze(coerce_type(item, inner[0])) for item in value)
    if len(inner) != len(value):
        raise WrongValue(f"expected {len(inner)} values, got a list of {len(value)}")
    return tuple(coerce_type(item, kind) for item, kind in zip(value, inner, strict=True))


def _coerce_choice(value: Any, member: Any) -> Any:
    choices = get_args(member)
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    listed = ", ".join(str(choice) for choice in choices)
    hint = nearest(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
    raise WrongValue(f"{value!r} is not one of: {listed}.{hint}")


def freeze(value: Any) -> Any:
    """Lists as tuples, at any depth (dicts are left as they are)."""
    return tuple(freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


def thaw(value: Any) -> Any:
    """Tuples as lists, at any depth: what YAML and JSON can hold."""
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    if isinstance(value, dict):
        return {name: thaw(item) for name, item in value.items()}
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping {key: value}"}


def type_name(annotation: Any) -> str:
    """A type in words: `float | None` is 'a number'."""
    words = []
    for member in union_members(annotation):
        if member is NoneType:
            continue
        origin = get_origin(member)
        if origin is tuple:
            items = dict.fromkeys(
                type_name(item).removeprefix("a ") for item in get_args(member) if item is not Ellipsis
            )
            item = _plural(next(iter(items)))
            if len(items) > 1:  # the parts of a tuple of fixed length differ
                words.append(f"[{', '.join(items)}]")
            else:
                words.append("a list" if item == "anything" else f"a list of {item}")
        elif origin is dict:
            words.append(_NAMES[dict])
        elif get_args(member):
            words.append("one of " + ", ".join(str(choice) for choice in get_args(member)))
        else:
            words.append(_NAMES.get(member, "anything"))
    return " or ".join(words)


def _plural(word: str) -> str:
    return {"whole number": "whole numbers", "number": "numbers", "text": "texts"}.get(word, word)


def describe(value: Any) -> str:
    """A value for a message: `'1x'`, `3`, `true`, `a list of 2`; the start of a long text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


def _advice(value: Any, member: Any) -> str:
    if member is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f': put quotes around it ("{value}")'
    if member is bool and str(value).lower() in ("true", "false", "yes", "no", "1", "0", "on", "off"):
        return ": write it without quotes"
    return ""
