"""Typed reading of untrusted metadata (config.json, GGUF). Knows types of values, not meanings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.weights.errors import CorruptCheckpoint, UnsupportedModel


class Fields:
    """Values by key, read with a type; `source` is the file that messages name.

    A null value counts as absent. A key without a default must be there. Wrong types, and numbers
    that are not positive, raise CorruptCheckpoint.
    """

    def __init__(self, source: str, values: Mapping[str, Any]):
        self.source = source
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """True also for null."""
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.corrupt(key, "is not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.corrupt(key, "is not a number")
        if not math.isfinite(value) or value <= 0:
            raise self.corrupt(key, "is not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.corrupt(key, "is not true or false")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """The object under this key; empty when absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.corrupt(key, "is not an object")
        return value

    def get_list(self, key: str) -> list[Any]:
        """The list under this key; empty when absent."""
        value = self._value(key, [])
        if not isinstance(value, list):
            raise self.corrupt(key, "is not a list")
        return value

    def token_ids(self, key: str) -> list[int]:
        """One token id, a list of them, or nothing."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise self.corrupt(key, "is not a token id, nor a list of them")
        return ids

    def require_neutral(self, neutral: Mapping[str, Iterable[Any]]) -> None:
        """Refuse keys that ask for what is not computed: absent, null, or a listed value passes."""
        for key, accepted in neutral.items():
            value = self.get(key)
            if value is not None and value not in accepted:
                raise self.unsupported(key)

    def unsupported(self, key: str, why: str = "is not supported") -> UnsupportedModel:
        return UnsupportedModel(self._say(key, why))

    def corrupt(self, key: str, why: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(self._say(key, why))

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise CorruptCheckpoint(f"{self.source}: {key} is missing")
        return value

    def _say(self, key: str, why: str) -> str:
        value = repr(self.get(key))
        shown = value if len(value) <= 200 else value[:200] + "..."
        return f"{self.source}: {key} = {shown} {why}"
