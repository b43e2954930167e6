"""Traces: when requests arrive and how long they are, read from CSV or generated.

No text and no real token ids: ids are made up so that requests share cached pages exactly where
the trace says that they share a prefix.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from scheduler.request import MAX_NAME, MAX_TIMEOUT, Request, RequestOptions, SamplingParams

END = 0  # the id that ends an output; no prompt holds it
MAX_TOKENS = 2**31 - 1


class TraceError(ValueError):
    """A trace that can't be used; the message names the file's line and column."""

    def __init__(self, message: str, *, line: int | None = None, column: str | None = None):
        where = [f"line {line}"] if line else list[str]()
        where += [f"column {column}"] if column else []
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.line = line
        self.column = column


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, one element of every array each.

    Optional arrays are empty where nothing is said. max_tokens 0 and timeout inf mean none.
    prefix: -1, or which prefix the first prefix_tokens of the prompt are taken from.
    """

    arrival: np.ndarray  # float64[n] seconds
    prompt_tokens: np.ndarray  # int64[n]
    output_tokens: np.ndarray  # int64[n] what the model would make, before max_tokens
    max_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    priority: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    timeout: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64[n] seconds
    tenant: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # into `tenants`
    prefix: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    prefix_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    tenants: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()  # columns of the file that say nothing to the simulator

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    def _map(self, change: Callable[[np.ndarray], np.ndarray]) -> Trace:
        names = [name for name in _ARRAYS if len(getattr(self, name))]
        return replace(self, **{name: change(getattr(self, name)) for name in names})

    def share(self, index: int, count: int) -> Trace:
        """What engine `index` of `count` gets when requests go round."""
        return self._map(lambda array: array[index::count])

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        return self._map(lambda array: array[:count])

    def scaled(
        self,
        *,
        prompt: float = 1.0,
        output: float = 1.0,
        time: float = 1.0,
        max_prompt: int = MAX_TOKENS,
        max_output: int = MAX_TOKENS,
    ) -> Trace:
        """Lengths and times multiplied (lengths rounded up), lengths then cut to a maximum."""

        def lengths(tokens: np.ndarray, factor: float, most: int) -> np.ndarray:
            return np.clip(np.ceil(tokens * factor - 1e-9), 1, most).astype(np.int64)

        prefix_tokens = np.ceil(self.prefix_tokens * prompt - 1e-9).astype(np.int64)
        prompts = lengths(self.prompt_tokens, prompt, max_prompt)
        return replace(
            self,
            arrival=self.arrival * time,
            prompt_tokens=prompts,
            output_tokens=lengths(self.output_tokens, output, max_output),
            prefix_tokens=np.minimum(prefix_tokens, prompts)
            if len(prefix_tokens)
            else prefix_tokens,
        )

    def prompt(self, index: int) -> np.ndarray:
        """int32[prompt tokens]: ids of its prefix, then an id that no other request's prompt has.

        Prefix ids differ between prefixes alone, so a longer prefix continues a shorter one.
        """
        ids = np.full(self.prompt_tokens[index], self.own_id(index), np.int32)
        if len(self.prefix) and self.prefix[index] >= 0:
            ids[: self.prefix_tokens[index]] = 1 + self.prefix[index]
        return ids

    def own_id(self, index: int) -> int:
        """The id that stands for all tokens of this request alone."""
        return 1 + self._num_prefixes + index

    @cached_property
    def _num_prefixes(self) -> int:
        return int(self.prefix.max(initial=-1)) + 1

    def request(self, index: int, max_tokens: int, params: SamplingParams) -> Request:
        """Request `index`; its id and its key are the index. max_tokens is clamped already."""
        return Request(
            request_id=str(index),
            prompt=self.prompt(index),
            params=params,
            max_tokens=max_tokens,
            arrival=float(self.arrival[index]),
            stop_ids=_STOP_IDS,
            key=(index, 0),
            options=self.options(index),
        )

    def options(self, index: int) -> RequestOptions:
        timeout = self.timeout[index] if len(self.timeout) else math.inf
        return _options(
            int(self.priority[index]) if len(self.priority) else 0,
            self.tenants[int(self.tenant[index])] if len(self.tenant) else "",
            None if math.isinf(timeout) else float(timeout),
        )


_STOP_IDS = frozenset({END})
_ARRAYS = (
    *("arrival", "prompt_tokens", "output_tokens", "max_tokens", "priority", "timeout"),
    *("tenant", "prefix", "prefix_tokens"),
)


@lru_cache(maxsize=4096)
def _options(priority: int, tenant: str, timeout: float | None) -> RequestOptions:
    return RequestOptions(priority=priority, tenant=tenant, timeout=timeout)


# ---- reading ----


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of a CSV file: how a field is read, and what an empty one means (None: an
    error)."""

    array: str
    parse: Callable[[str], Any]
    empty: Any = None


def _integer(low: int, high: int = MAX_TOKENS) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be an integer, got {text!r}") from None
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}, got {value}")
        return value

    return parse


def _number(low: float, high: float, unit: float = 1.0) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"must be a number, got {text!r}") from None
        if not low <= value <= high:
            raise ValueError(f"must be between {low:g} and {high:g}, got {text}")
        return value * unit

    return parse


def _name(text: str) -> str:
    if len(text) > MAX_NAME:
        raise ValueError(f"must have at most {MAX_NAME} characters, got {len(text)}")
    return text


_COLUMNS = {
    "arrival_s": _Column("arrival", _number(0, 1e9)),
    "arrival_ms": _Column("arrival", _number(0, 1e12, 1e-3)),
    "prompt_tokens": _Column("prompt_tokens", _integer(1)),
    "output_tokens": _Column("output_tokens", _integer(1)),
    "max_tokens": _Column("max_tokens", _integer(1), 0),
    "priority": _Column("priority", _integer(-(2**31)), 0),
    "timeout_s": _Column("timeout", _number(1e-9, MAX_TIMEOUT), math.inf),
    "tenant": _Column("tenant", _name, ""),
    "prefix_id": _Column("prefix", str, ""),
    "prefix_tokens": _Column("prefix_tokens", _integer(0), 0),
}


def read_trace(path: str | Path, *, arrivals: bool = True) -> Trace:
    """Read a CSV file with a header line: arrival_s (or arrival_ms), prompt_tokens, output_tokens,
    and optionally max_tokens, priority, tenant, timeout_s, prefix_id and prefix_tokens.

    Requests with one prefix_id share that many first tokens. Other columns are only named, in
    `unused`. Without `arrivals` the file may hold lengths alone. Raises TraceError, or OSError.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return parse_trace(file, arrivals=arrivals)
    except UnicodeDecodeError as error:
        raise TraceError(f"the file is not UTF-8 text: {error}") from error


def parse_trace(lines: Iterable[str], *, arrivals: bool = True) -> Trace:
    """See read_trace."""
    reader = csv.reader(lines, strict=True)
    try:
        header = [name.strip() for name in next(reader, list[str]())]
        used = _check_header(header, arrivals)
        values: dict[str, list[Any]] = {_COLUMNS[name].array: [] for name in used.values()}
        line_of_row: list[int] = []
        for row in reader:
            if row:
                line_of_row.append(reader.line_num)
                _read_row(row, header, used, values, reader.line_num)
    except csv.Error as error:
        raise TraceError(f"is not CSV: {error}", line=reader.line_num) from error
    if not line_of_row:
        raise TraceError("there are no requests in it")
    for index, line in enumerate(line_of_row if "prefix_tokens" in values else ()):
        if values["prefix_tokens"][index] > values["prompt_tokens"][index]:
            raise TraceError(
                f"must be at most prompt_tokens, got {values['prefix_tokens'][index]}",
                line=line,
                column="prefix_tokens",
            )
    values.setdefault("arrival", [0.0] * len(line_of_row))
    tenants: tuple[str, ...] = ()
    if "tenant" in values:
        codes = {name: code for code, name in enumerate(dict.fromkeys(values["tenant"]))}
        tenants = tuple(codes)
        values["tenant"] = [codes[name] for name in values["tenant"]]
    if "prefix" in values:
        names = filter(None, dict.fromkeys(values["prefix"]))
        codes = {"": -1} | {name: code for code, name in enumerate(names)}
        values["prefix"] = [codes[name] for name in values["prefix"]]
    order = np.argsort(values["arrival"], kind="stable")
    arrays = {name: np.array(listed)[order] for name, listed in values.items()}
    unused = tuple(name for name in header if name not in used.values())
    return Trace(**arrays, tenants=tenants, unused=unused)


def _check_header(header: Sequence[str], arrivals: bool) -> dict[int, str]:
    """Place of each column that is used -> its name."""
    used = {place: name for place, name in enumerate(header) if name in _COLUMNS}
    if len(set(used.values())) < len(used):
        raise TraceError("a column is there twice", line=1)
    names = set(used.values())
    for name in ("prompt_tokens", "output_tokens"):
        if name not in names:
            raise TraceError("is missing in the header", line=1, column=name)
    if arrivals and len(names & {"arrival_s", "arrival_ms"}) != 1:
        raise TraceError("is missing in the header, or is there twice", line=1, column="arrival_s")
    if ("prefix_id" in names) != ("prefix_tokens" in names):
        raise TraceError("prefix_id and prefix_tokens come together", line=1)
    return used


def _read_row(
    row: Sequence[str],
    header: Sequence[str],
    used: Mapping[int, str],
    values: Mapping[str, list[Any]],
    line: int,
) -> None:
    if len(row) != len(header):
        raise TraceError(f"has {len(row)} fields, the header has {len(header)}", line=line)
    for place, name in used.items():
        column, text = _COLUMNS[name], row[place].strip()
        try:
            if not text and column.empty is None:
                raise ValueError("must not be empty")
            values[column.array].append(column.parse(text) if text else column.empty)
        except ValueError as error:
            raise TraceError(str(error), line=line, column=name) from None
