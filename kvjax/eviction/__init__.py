"""Fewer tokens: which tokens of a prompt stay in the cache. One policy a file.

`parse("snapkv:1024")`, `parse("expected:25%/window=16")`: a name, a budget in tokens or per cent of
the prompt, and options. `docs/eviction.md` says how to add a policy.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from kvjax.checks import near, need
from kvjax.eviction.base import Budget, Policy, Prompt, describe, select
from kvjax.eviction.expected import Expected
from kvjax.eviction.h2o import H2O
from kvjax.eviction.keydiff import KeyDiff
from kvjax.eviction.knorm import KeyNorm
from kvjax.eviction.observed import Observed
from kvjax.eviction.pyramidkv import PyramidKV
from kvjax.eviction.recent import Recent
from kvjax.eviction.snapkv import SnapKV
from kvjax.eviction.streaming import Streaming

#: every policy by its name on the command line
POLICIES: dict[str, type[Policy]] = {
    cls.name: cls for cls in (SnapKV, PyramidKV, H2O, Observed, Expected, KeyDiff, KeyNorm, Recent)
}


def names() -> list[str]:
    """Every prompt policy's name."""
    return list(POLICIES)


@functools.cache
def parse(text: str) -> Policy | Streaming:
    """The policy of `--evict NAME:BUDGET[/OPTION=VALUE...]`.

    Raises ValueError on unknown names and options, and on budgets that do not fit.
    """
    need(isinstance(text, str), "evict", "text, such as snapkv:1024", text)
    head, *options = text.split("/")
    name, colon, budget = head.partition(":")
    known = [*POLICIES, Streaming.name]
    need(name in known, "evict", f"one of {', '.join(known)}", name, near(name, known).strip())
    example = "4+1020" if name == Streaming.name else f"1024 or {name}:25%"
    need(bool(colon), "evict", f"{name}:BUDGET, such as {name}:{example}", text)
    given: dict[str, str] = {}
    for option in options:
        field, equals, value = option.partition("=")
        need(bool(equals), f"evict {name}", "options as field=value", option)
        need(field not in given, f"evict {name}", "each option once", option)
        given[field] = value
    if name == Streaming.name:
        return Streaming.parse(budget, **given)
    fields = {f.name: f for f in dataclasses.fields(POLICIES[name]) if f.name != "budget"}
    for field in given:
        hint = near(field, fields).strip()
        need(field in fields, f"evict {name}", f"one of {', '.join(fields)}", field, hint)
    values = {f: _value(name, f, text, fields[f].default) for f, text in given.items()}
    return POLICIES[name](budget=Budget.parse(budget), **values)


def _value(name: str, field: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        need(text in ("true", "false"), f"evict {name} {field}", "true or false", text)
        return text == "true"
    if isinstance(default, str):
        return text
    kind = int if default is None else type(default)
    try:
        return kind(text)
    except ValueError:
        need(False, f"evict {name} {field}", f"a number ({kind.__name__})", text)


__all__ = [
    "Budget",
    "Policy",
    "Prompt",
    "describe",
    "names",
    "parse",
    "select",
    "POLICIES",
    "Streaming",
]
