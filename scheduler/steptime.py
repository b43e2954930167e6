"""StepTimeModel: how many seconds a step takes, as a few coefficients of what is in its plan.

Fitted from an engine's measured steps (`fit`), kept as a small TOML file, used by the simulator.
Knows plans and numbers; neither devices nor models.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from scheduler.plan import BatchPlan, Kind, PlanKey, plan_layout
from scheduler.preemption import PreemptionCosts
from scheduler.request import GREEDY_BELOW

KINDS: tuple[Kind, ...] = ("decode", "mixed")


class StepTimeError(ValueError):
    """A file of step times that can't be used; the message names the field."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.name = name


class Load(NamedTuple):
    """What a step's time depends on beyond its PlanKey."""

    reads: float = 0.0  # tokens of cache that rows of one token read, over all such rows
    products: float = 0.0  # (token of a chunk, token of cache it sees) pairs, over all chunks
    sampled: int | None = None  # rows that draw at random; None: the sampler does not run


def plan_words(plan: BatchPlan, name: str) -> np.ndarray:
    """int32[words] of one lane, without building the others."""
    return plan.buffer[slice(*plan_layout(plan.key).offsets[name])]


def load_of(plan: BatchPlan, use_sampler: bool) -> Load:
    """Read the load out of a filled plan."""
    length = plan_words(plan, "query_len")[: plan.num_rows].astype(np.int64)
    context = plan_words(plan, "context_len")[: plan.num_rows].astype(np.int64)
    single = length == 1
    pairs = length * context - length * (length - 1) // 2
    reads = int(context[single].sum())
    sampled = None
    if use_sampler:
        temperature = plan_words(plan, "temperature").view(np.float32)
        sampled = int((temperature >= GREEDY_BELOW).sum())
    return Load(reads, int(pairs.sum()) - reads, sampled)


def load_of_chunk(length: int, context: int) -> Load:
    """Of one row that computes `length` tokens and has `context` then."""
    if length == 1:
        return Load(reads=context)
    return Load(products=length * context - length * (length - 1) // 2)


@dataclass(frozen=True, slots=True)
class KindTimes:
    """Seconds of one kind of step: once, and for each unit of its bucket and of its real load."""

    step: float = 0.0
    token: float = 0.0  # a token of the bucket
    row: float = 0.0  # a row of the bucket
    page: float = 0.0  # an entry of the bucket's block tables
    read: float = 0.0  # see Load.reads
    product: float = 0.0  # see Load.products

    @staticmethod
    def units(key: PlanKey, load: Load) -> tuple[float, ...]:
        """How many of each: float[fields]."""
        return 1.0, key.tokens, key.rows, key.rows * key.pages, load.reads, load.products

    def seconds(self, key: PlanKey, load: Load) -> float:
        return (
            self.step
            + self.token * key.tokens
            + self.row * key.rows
            + self.page * key.rows * key.pages
            + self.read * load.reads
            + self.product * load.products
        )


@dataclass(frozen=True, slots=True)
class SamplerTimes:
    """Seconds of the sampler, where a step runs it."""

    step: float = 0.0
    row: float = 0.0  # a row of the bucket
    sampled: float = 0.0  # a row that draws at random

    @staticmethod
    def units(key: PlanKey, load: Load) -> tuple[float, ...]:
        return 1.0, key.rows, load.sampled or 0

    def seconds(self, key: PlanKey, load: Load) -> float:
        if load.sampled is None:
            return 0.0
        return self.step + self.row * key.rows + self.sampled * load.sampled


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """All times in seconds.

    host: what the host needs for an iteration before the device has its step; hidden behind the
    step in flight when there is lookahead. costs: those of page copies, and of prompt tokens as
    the preemption policy counts them. engine: settings of the engine that was measured, by name,
    and `platform`, where it ran; for whoever builds a scheduler like it.
    """

    decode: KindTimes
    mixed: KindTimes
    sampler: SamplerTimes = SamplerTimes()
    costs: PreemptionCosts = field(default_factory=PreemptionCosts)
    host: float = 0.0
    platform: str = "cpu"
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def seconds(self, key: PlanKey, load: Load) -> float:
        """A step's time on the device, without page copies."""
        kind = self.decode if key.kind == "decode" else self.mixed
        return kind.seconds(key, load) + self.sampler.seconds(key, load)

    def copy_seconds(self, out: int, back: int) -> float:
        """Time of the page copies in front of a step; counts are pages."""
        costs, seconds = self.costs, 0.0
        if out:
            seconds += costs.copy_base + out * costs.copy_out
        if back:
            seconds += costs.copy_base + back * costs.copy_back
        return seconds

    @classmethod
    def load(cls, path: str | Path) -> StepTimeModel:
        """Read a TOML file. Raises StepTimeError, or OSError."""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise StepTimeError(str(path), f"is not valid TOML: {error}") from error
        return cls.from_table(table)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> StepTimeModel:
        """Raises StepTimeError for an unknown, missing or bad field."""
        _refuse_unknown("", table, [f.name for f in fields(cls)])
        for kind in KINDS:
            if kind not in table:
                raise StepTimeError(kind, "is missing: a table with at least `step`")
        platform = table.get("platform", "cpu")
        if not isinstance(platform, str):
            raise StepTimeError("platform", f"must be a name such as 'cpu', got {platform!r}")
        return cls(
            decode=KindTimes(**_numbers(KindTimes, table, "decode")),
            mixed=KindTimes(**_numbers(KindTimes, table, "mixed")),
            sampler=SamplerTimes(**_numbers(SamplerTimes, table, "sampler")),
            costs=PreemptionCosts(**_numbers(PreemptionCosts, table, "costs")),
            host=_number("host", table.get("host", 0.0)),
            platform=platform,
            engine=_table(table, "engine"),
        )

    def to_toml(self, comment: str = "") -> str:
        """The file's text; comment lines come first."""
        lines = [f"# {line}".rstrip() for line in comment.splitlines()]
        lines += [f"host = {self.host:.4g}", f'platform = "{self.platform}"']
        tables: dict[str, Mapping[str, Any]] = {"engine": self.engine}
        for name in (*KINDS, "sampler", "costs"):
            tables[name] = asdict(getattr(self, name))
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, dict):
        raise StepTimeError(name, f"must be a table, got {value!r}")
    return cast(dict[str, Any], value)


def _numbers(kind: type[Any], tables: Mapping[str, Any], name: str) -> dict[str, float]:
    table = _table(tables, name)
    _refuse_unknown(f"{name}.", table, [f.name for f in fields(kind)])
    return {key: _number(f"{name}.{key}", value) for key, value in table.items()}


def _number(name: str, value: Any) -> float:
    # infinite: what an engine can't do, such as copies without host pages
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise StepTimeError(name, f"must be seconds of at least 0, got {value!r}")
    return float(value)


def _refuse_unknown(prefix: str, table: Mapping[str, Any], known: list[str]) -> None:
    for name in table:
        if name not in known:
            raise StepTimeError(prefix + name, f"is unknown; there are {', '.join(known)}")


# ---- fitting ----


class Measurement(NamedTuple):
    """One measured step. For the sampler: what it added to the same step without it."""

    key: PlanKey
    load: Load
    seconds: float
    whole: float | None = None  # what an error is relative to; None: `seconds`


class Fit(NamedTuple):
    """Fitted coefficients, and the relative error of each measurement: predicted - measured."""

    times: Any  # KindTimes or SamplerTimes
    errors: np.ndarray  # float64[measurements]


def fit_kind(measurements: Iterable[Measurement]) -> Fit:
    """Fit the steps of one kind."""
    return _fit(KindTimes, list(measurements))


def fit_sampler(measurements: Iterable[Measurement]) -> Fit:
    return _fit(SamplerTimes, list(measurements))


def _fit(times: type[KindTimes] | type[SamplerTimes], measurements: list[Measurement]) -> Fit:
    if not measurements:
        return Fit(times(), np.zeros(0))
    units = np.array([times.units(m.key, m.load) for m in measurements])
    seconds = np.array([m.seconds for m in measurements])
    whole = np.array([m.seconds if m.whole is None else m.whole for m in measurements])
    found = non_negative_fit(units / whole[:, None], seconds / whole)
    names = [f.name for f in fields(times)]
    return Fit(
        times(**dict(zip(names, found.tolist(), strict=True))), (units @ found - seconds) / whole
    )


def non_negative_fit(units: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Coefficients float64[n] >= 0 with the least squared error of units @ coefficients.

    units: float64[measurements, n], target: float64[measurements]. Every set of columns is tried,
    which is exact and quick for so few. A further column must lower the error by a hundredth, so
    that columns which say the same (rows and tokens of decode plans) do not share one cost; earlier
    columns are preferred.
    """
    best, least = np.zeros(units.shape[1]), float((target**2).sum())
    for size in range(1, units.shape[1] + 1):
        for columns in map(list, combinations(range(units.shape[1]), size)):
            part = units[:, columns]
            norm = np.linalg.norm(part, axis=0)
            if not norm.all():
                continue
            found = np.linalg.lstsq(part / norm, target)[0] / norm
            error = float(((part @ found - target) ** 2).sum())
            if (found >= 0).all() and error < 0.99 * least - 1e-12:
                best, least = np.zeros(units.shape[1]), error
                best[columns] = found
    return best
