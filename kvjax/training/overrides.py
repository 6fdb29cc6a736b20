"""Typed overrides of nested frozen dataclasses: `--optimizer.lr=1e-3`."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from kvjax.config import near

C = TypeVar("C")
_BOOLS = {"true": True, "false": False}


def override(config: C, arguments: Sequence[str]) -> C:
    """The config with `--a.b=c` applied, all at once: fields that depend are checked together.

    Values have the type of the field: ints, floats, `true` and `false`, text, comma-separated
    tuples (empty for the empty one), `none` where the field allows it. Raises ValueError on an
    unknown key (with near names), a value of another type, and a key given twice.
    """
    known = dict(fields(config))
    changes: dict[str, Any] = {}
    for argument in arguments:
        key, text = _split(argument)
        if key not in known:
            _refuse(key, known)
        if key in changes:
            raise ValueError(f"--{key}: expected once, got twice. Keep one of them.")
        changes[key] = _parse(key, text, known[key])
    return _replace(config, changes)


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every field that can be set."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name]


def values(config: Any) -> Iterator[tuple[str, str]]:
    """(dotted key, value as `override` reads it) of every field."""
    for key, _ in fields(config):
        value = functools.reduce(getattr, key.split("."), config)
        yield key, ",".join(map(str, value)) if isinstance(value, tuple) else _text(value)


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _split(argument: str) -> tuple[str, str]:
    key, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not equals or not key:
        raise ValueError(f"override: expected --a.b=value, got {argument!r}.")
    return key, text


def _refuse(key: str, known: dict[str, Any]) -> None:
    inside = [k for k in known if k.startswith(f"{key}.")]
    if inside:
        raise ValueError(
            f"--{key}: expected one of its fields, got the group: {', '.join(inside)}."
        )
    by_leaf = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    hint = f" Did you mean {' or '.join(map(repr, by_leaf))}?" if by_leaf else near(key, known)
    raise ValueError(
        f"--{key}: expected a known key, got an unknown one.{hint or ' Known: ' + ', '.join(known)}"
    )


def _parse(key: str, text: str, kind: Any) -> Any:
    try:
        return _value(text, kind)
    except ValueError:
        raise ValueError(f"--{key}: expected {_name(kind)}, got {text!r}.") from None


def _value(text: str, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if type(None) in arguments and text.lower() == "none":
            return None
        return _value(text, next(a for a in arguments if a is not type(None)))
    if origin is tuple:
        return tuple(_value(part.strip(), arguments[0]) for part in text.split(",") if part.strip())
    if origin is typing.Literal:
        return _among({str(a): a for a in arguments}, text)
    if kind is bool:
        return _among(_BOOLS, text.lower())
    return kind(text)


def _among(values: dict[str, Any], text: str) -> Any:
    if text not in values:
        raise ValueError(text)
    return values[text]


def _name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("none" if a is type(None) else _name(a) for a in arguments)
    if origin is tuple:
        return f"comma-separated {_name(arguments[0])}s"
    if origin is typing.Literal:
        return f"one of {arguments}"
    return {bool: "true or false", str: "text"}.get(kind, kind.__name__)


def _replace(config: Any, changes: dict[str, Any]) -> Any:
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        head, dot, rest = key.partition(".")
        if dot:
            nested.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    for head, inner in nested.items():
        own[head] = _replace(getattr(config, head), inner)
    return dataclasses.replace(config, **own)
