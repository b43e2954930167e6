"""Reading one JSON object so that nothing is ignored: every field is taken, refused, or unknown."""

from __future__ import annotations

import json
from typing import Any, NoReturn, cast

from jaxserve.server.errors import MalformedBody, UnrecognizedArgument
from scheduler.errors import InvalidParameter, UnsupportedParameter


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body; MalformedBody if it is anything else."""
    try:
        body: object = json.loads(raw, parse_constant=_refuse_constant)
        if b"\\ud" in raw.lower():  # a lone surrogate is a str that no tokenizer can encode
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedBody("The body has an unpaired surrogate escape in a string.") from None
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise MalformedBody("The body must be a JSON object.")
    return cast(dict[str, Any], body)


class Fields:
    """What is left of an object. null counts as absent. `path` prefixes the names in errors."""

    def __init__(self, values: dict[str, Any], path: str = ""):
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def take(self, name: str) -> Any:
        """The value, unchecked; None if absent."""
        return self._values.pop(name, None)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidParameter(self._path + name, f"must be a boolean, got {short(value)}")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise InvalidParameter(self._path + name, f"must be a string, got {short(value)}")
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParameter(self._path + name, f"must be an integer, got {short(value)}")
        if value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"between {low} and {high}"
            raise InvalidParameter(self._path + name, f"must be {limit}, got {value}")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidParameter(self._path + name, f"must be a number, got {short(value)}")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise InvalidParameter(self._path + name, f"must be an object, got {short(value)}")
        return cast("dict[str, Any] | None", value)

    def only(self, name: str, *accepted: object) -> None:
        """Accept the values that change nothing, and refuse all others by name."""
        value = self.take(name)
        if value is not None and not any(same(value, known) for known in accepted):
            known = ", ".join(["null", *(json.dumps(value) for value in accepted)])
            raise UnsupportedParameter(
                self._path + name, f"only {known} is supported by this server, got {short(value)}"
            )

    def finish(self) -> None:
        """Refuse the first field that nobody took."""
        for name in self._values:
            raise UnrecognizedArgument(self._path + name)


def same(a: object, b: object) -> bool:
    """Equal as JSON: 0 is 0.0, but True is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def short(value: object) -> str:
    """A value as JSON, cut for an error message."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else text[:77] + "..."
