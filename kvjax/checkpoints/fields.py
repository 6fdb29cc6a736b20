"""Reading a foreign config strictly: every key is taken, known to be harmless, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from kvjax.config import near

ANY = object()  # in a table of harmless keys: whatever the value
REQUIRED = object()


class Fields:
    """The keys of a config, each taken once; `finish` refuses the keys that nobody took."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.where = where
        self._left = dict(data)
        self._known = {*data}

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = REQUIRED) -> Any:
        """The value of `key` and of type `kind`; None counts as absent."""
        self._known.add(key)
        value = self._left.pop(key, None)
        if value is None:
            if default is REQUIRED:
                raise ValueError(f"{self.where}: {key}: expected a value, got none. Add the key.")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if kinds == (float,):
            kinds = (float, int)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise ValueError(f"{self.where}: {key}: expected {names}, got {value!r}.")
        return float(cast(float, value)) if kind is float else value

    def has(self, key: str) -> bool:
        """Whether the config has the key, null included."""
        return key in self._left

    def drop(self, harmless: Mapping[str, Any]) -> None:
        """Drops keys that change no results: of `ANY` value, or None or one of a tuple."""
        for key, allowed in harmless.items():
            value = self._left.pop(key, None)
            if value is None or allowed is ANY or value in allowed:
                continue
            raise ValueError(
                f"{self.where}: {key}: expected {' or '.join(map(repr, allowed))}, got {value!r}."
                " kvjax does not implement this value, and it changes the model's results."
            )

    def finish(self, known: Iterable[str]) -> None:
        """Raises ValueError that lists every key left over; a null value means absent."""
        left = sorted(k for k, v in self._left.items() if v is not None)
        if not left:
            return
        words = {*known, *self._known} - {*left}
        hints = (f"{k}={self._left[k]!r}"[:120] + near(k, words) for k in left)
        raise ValueError(
            f"{self.where}: expected only known keys, got {len(left)} unknown: {'; '.join(hints)}."
            " An unknown key may change the model's results, so it is not ignored; remove it from"
            " the config if it does not."
        )
