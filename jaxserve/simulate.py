"""`jaxserve simulate`: a trace, or a generated load, against a fitted step-time model; no device.

Prints a table; writes JSON and a plot if asked to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.terminal import progress
from scheduler.admission import ADMISSION
from scheduler.arrivals import (
    Independent,
    Lengths,
    Lognormal,
    Phase,
    Resampled,
    gamma_arrivals,
    generate,
)
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler
from scheduler.lengths import LENGTH_MODELS, Oracle
from scheduler.policy import POLICIES
from scheduler.report import Percentiles, Report, Slo, engines_needed
from scheduler.simulator import Outcome, Simulator
from scheduler.steptime import StepTimeError, StepTimeModel
from scheduler.workload import MAX_TOKENS, Trace, TraceError, read_trace

LOGNORMAL = "MEAN,SIGMA,LOW,HIGH"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `simulate` takes beyond the engine's settings."""
    add = parser.add_argument
    add("--model-time", metavar="FILE", required=True, help="step times, from `bench --fit`")
    load = parser.add_argument_group("the load: a trace, or --rate with generated arrivals")
    add = load.add_argument
    add("--trace", metavar="FILE", help="CSV: arrival_s, prompt_tokens, output_tokens and more")
    add("--rate", type=float, help="generate gamma arrivals, so many a second")
    add("--cv", type=float, default=1.0, help="variation of their gaps (default: 1, Poisson)")
    add("--requests", type=int, help="how many (default: one pass of the phases)")
    add(
        "--phases", metavar="SxF,...", help="seconds and rate factor of each, such as 30x0.6,20x2.5"
    )
    add("--prompt", metavar=LOGNORMAL, help="lengths instead of the trace's: lognormal")
    add("--output", metavar=LOGNORMAL, help="likewise")
    add("--seed", type=int, default=0)
    add("--scale-prompt", type=float, default=1.0, help="multiply the trace's prompt lengths")
    add("--scale-output", type=float, default=1.0, help="multiply the trace's output lengths")
    add("--scale-time", type=float, default=1.0, help="multiply the trace's arrival times")
    add("--cut-prompt", type=int, default=MAX_TOKENS, metavar="N", help="longest prompt")
    add("--cut-output", type=int, default=MAX_TOKENS, metavar="N", help="longest output")
    add("--max-tokens", type=int, help="what requests declare (default: all that fits)")
    add("--temperature", type=float, default=0.0, help="above 0 the sampler runs (default: 0)")
    judge = parser.add_argument_group("what is asked of it")
    add = judge.add_argument
    add("--oracle", action="store_true", help="the length model knows every output's length")
    add("--engines", default="1", metavar="N|auto", help="share the load; auto: how many it needs")
    add("--attainment", type=float, default=0.99, help="share within the SLO, for --engines auto")
    add("--slo-ttft", type=float, default=1.0, help="seconds to the first token (default: 1)")
    add("--slo-ttft-factor", type=float, default=0.0, help="or so many times the unloaded time")
    add("--slo-token", type=float, default=0.1, help="mean seconds a further token (default: 0.1)")
    add("--json", metavar="FILE", help="write all figures here")
    add("--plot", metavar="FILE.svg", help="draw pool and queue over time (needs matplotlib)")


def main(args: argparse.Namespace) -> int:
    """Engine settings are those in the model-time file, unless `args` has them. Raises ConfigError,
    or OSError."""
    if args.plot is not None:
        _pyplot()  # before the work, not after it
    try:
        times = StepTimeModel.load(args.model_time)
        trace = make_trace(args)
    except StepTimeError as error:
        raise ConfigError("model_time", str(error)) from error
    except TraceError as error:
        raise ConfigError("trace", f"{args.trace}: {error}") from error
    if trace.unused:
        print(f"columns without a use here: {', '.join(trace.unused)}", file=sys.stderr)
    config = engine_config(times, args)
    limits = scheduler_config(config)
    slo = Slo(args.slo_ttft, args.slo_token, args.slo_ttft_factor)

    with progress() as show:

        def run(count: int) -> Report:
            name = f"simulate, {count} engine{'s' if count > 1 else ''}"
            outcomes: list[Outcome] = []
            for index in range(count):
                part = trace.share(index, count)
                simulator = Simulator(
                    make_scheduler(config, limits, times, part, oracle=args.oracle),
                    part,
                    times,
                    lookahead=config.lookahead,
                    max_tokens=args.max_tokens,
                    temperature=args.temperature,
                )
                before = sum(len(outcome.arrival) for outcome in outcomes)
                outcomes.append(
                    simulator.run(
                        lambda done, _, before=before: show(name, before + done, len(trace), "")
                    )
                )
            show(name, len(trace), len(trace), "")
            return Report.of(outcomes, slo)

        report = (
            _auto(args, run, len(trace)) if args.engines == "auto" else run(_count(args, trace))
        )
    _print(report)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(report, args.plot)
    return 0


def _count(args: argparse.Namespace, trace: Trace) -> int:
    try:
        count = int(args.engines)
    except ValueError:
        count = 0
    if not 1 <= count <= len(trace):
        raise ConfigError("engines", f"must be auto, or between 1 and {len(trace)}")
    return count


def _auto(args: argparse.Namespace, run: Any, most: int) -> Report:
    if not 0 < args.attainment <= 1:
        raise ConfigError("attainment", f"must be above 0 and at most 1, got {args.attainment}")
    count, reports = engines_needed(run, args.attainment, most)
    for tried, report in sorted(reports.items()):
        print(f"{tried:>5} engines: {report.attainment:8.2%} within the SLO")
    if count is None:
        print(f"{max(reports)} engines do not reach {args.attainment:.2%}")
        return reports[max(reports)]
    print(f"{count} engine{'s reach' if count > 1 else ' reaches'} {args.attainment:.2%}")
    return reports[count]


# ---- from settings to a scheduler and a load ----


def engine_config(times: StepTimeModel, args: argparse.Namespace) -> EngineConfig:
    """The settings of the engine that was measured, and those of `args` that are set."""
    names = [field.name for field in fields(EngineConfig)]
    for name in times.engine:
        if name not in names:
            raise ConfigError(name, "is not a setting (in the model-time file)")
    given = {name: getattr(args, name, None) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    return EngineConfig(**(dict(times.engine) | given))


def scheduler_config(config: EngineConfig) -> SchedulerConfig:
    for name in ("num_pages", "max_model_len"):
        if getattr(config, name) is None:
            raise ConfigError(name, "is needed: there is no device that would decide it")
    limits: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(SchedulerConfig)}
    limits["num_host_pages"] = config.num_host_pages or 0
    return SchedulerConfig(**limits)


def make_scheduler(
    config: EngineConfig,
    limits: SchedulerConfig,
    times: StepTimeModel,
    trace: Trace,
    *,
    oracle: bool = False,
) -> Scheduler:
    # a plan's shapes are the runner's to choose; jax, which it brings, is not used
    from jaxserve.runtime.runner import build_grid

    lengths = Oracle(_TrueLengths(trace)) if oracle else LENGTH_MODELS[config.lengths]()
    return Scheduler(
        limits,
        build_grid(config, limits, times.platform),
        policy=POLICIES[config.policy](lengths),
        admission=ADMISSION[config.admission](lengths, config.admission_bound),
        lengths=lengths,
        costs=times.costs,
    )


class _TrueLengths(Mapping[str, int]):
    """Output lengths by request id, without a dict of a million names."""

    def __init__(self, trace: Trace):
        self._tokens = trace.output_tokens

    def __getitem__(self, request_id: str) -> int:
        return int(self._tokens[int(request_id)])

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self)))


def make_trace(args: argparse.Namespace) -> Trace:
    """The trace as it is; or arrivals at a rate, with lengths drawn from it or from lognormals."""
    trace = None
    if args.trace is not None:
        trace = read_trace(args.trace, arrivals=args.rate is None).scaled(
            prompt=_positive(args, "scale_prompt"),
            output=_positive(args, "scale_output"),
            time=_positive(args, "scale_time"),
            max_prompt=_positive(args, "cut_prompt"),
            max_output=_positive(args, "cut_output"),
        )
    if args.rate is None:
        if trace is None:
            raise ConfigError("trace", "give --trace FILE, or --rate with lengths")
        return trace if args.requests is None else trace.head(_positive(args, "requests"))
    lengths: Lengths
    if args.prompt is not None and args.output is not None:
        lengths = Independent(_lognormal("prompt", args.prompt), _lognormal("output", args.output))
    elif trace is not None:
        lengths = Resampled(trace)
    else:
        raise ConfigError("rate", "needs lengths: --trace FILE, or --prompt and --output")
    if not 0 <= args.cv <= 100:
        raise ConfigError("cv", f"must be between 0 and 100, got {args.cv}")
    phases = _phases(args.phases) if args.phases else ()
    if args.requests is None and not phases:
        raise ConfigError("requests", "is needed with --rate, unless there are --phases")
    rng = np.random.default_rng(args.seed)
    arrival = gamma_arrivals(
        rng,
        _positive(args, "rate"),
        args.cv,
        count=None if args.requests is None else _positive(args, "requests"),
        seconds=sum(phase.seconds for phase in phases) if args.requests is None else None,
        phases=phases,
    )
    if not len(arrival):
        raise ConfigError("rate", "is so low that nothing arrives")
    return generate(rng, arrival, lengths)


def _positive(args: argparse.Namespace, name: str) -> Any:
    value = getattr(args, name)
    if not 0 < value < 1e12:
        raise ConfigError(name, f"must be above 0, got {value}")
    return value


def _lognormal(name: str, text: str) -> Lognormal:
    try:
        mean, sigma, low, high = text.split(",")
        found = Lognormal(float(mean), float(sigma), int(low), int(high))
    except ValueError:
        raise ConfigError(name, f"must be {LOGNORMAL}, got {text!r}") from None
    if not (found.mean > 0 and found.sigma >= 0 and 1 <= found.low <= found.high <= MAX_TOKENS):
        raise ConfigError(name, f"must be {LOGNORMAL} with 1 <= LOW <= HIGH, got {text!r}")
    return found


def _phases(text: str) -> tuple[Phase, ...]:
    phases: list[Phase] = []
    for part in text.split(","):
        try:
            seconds, factor = map(float, part.split("x"))
        except ValueError:
            raise ConfigError("phases", f"must be like 30x0.6,20x2.5, got {part!r}") from None
        if not (0 < seconds < 1e9 and 0 <= factor < 1e6):
            raise ConfigError("phases", f"seconds must be above 0, factors not below, got {part!r}")
        phases.append(Phase(seconds, factor))
    if not any(phase.factor for phase in phases):
        raise ConfigError("phases", "some factor must be above 0")
    return tuple(phases)


# ---- what is shown ----


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in figures(report):
        table.add_row(name, value)
    Console().print(table)


def figures(report: Report) -> list[tuple[str, str]]:
    """The table's lines: (name, value)."""

    def seconds(values: Percentiles) -> str:
        shown = [f"{value:.3g}" for value in values]
        return "p50 {} s, p90 {} s, p99 {} s, longest {} s".format(*shown)

    def counts(table: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {name}" for name, count in table.items() if count) or "none"

    slo = report.slo
    first = f"first token within {slo.ttft:g} s"
    if slo.ttft_factor:
        first += f" or {slo.ttft_factor:g} x unloaded"
    return [
        ("engines", str(report.engines)),
        ("requests", f"{report.requests}: {counts(report.endings)}"),
        ("simulated time", f"{report.seconds:.1f} s, {report.steps} steps"),
        ("SLO", f"{first}, {slo.per_token:g} s a token"),
        ("within the SLO", f"{report.attainment:.2%} of requests"),
        ("goodput", f"{report.goodput:.1f} output tokens/s"),
        ("throughput", f"{report.throughput:.1f} output tokens/s"),
        ("time to first token", seconds(report.ttft)),
        ("between tokens", seconds(report.inter_token)),
        ("preemptions", f"{counts(report.preemptions)}; most of one {report.most_preemptions}"),
        ("computed again", f"{report.recomputed_share:.2%} of all computed tokens"),
        ("prefix hits", f"{report.prefix_hit_share:.2%} of prompt tokens"),
        ("pages copied", counts(report.pages_copied)),
        ("pool", f"{report.num_pages} pages, at most {max(s.held for s in report.series)} held"),
    ]


def plot(report: Report, path: str) -> None:
    """Pool and queue over time, as SVG. Raises ConfigError without matplotlib."""
    pyplot = _pyplot()
    series = report.to_dict()["series"]
    figure, (pool, queue) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6))
    pool.stackplot(series["at"], series["held"], series["cached"], labels=["held", "cached"])
    pool.axhline(report.num_pages, color="black", linewidth=0.8, label="pool")
    pool.set_ylabel("pages")
    pool.set_ylim(0, 1.05 * report.num_pages)
    queue.plot(series["at"], series["running"], label="running")
    queue.plot(series["at"], series["waiting"], label="waiting")
    queue.set_ylabel("sequences")
    queue.set_xlabel("seconds")
    queue.set_ylim(bottom=0)
    for axes in (pool, queue):
        axes.legend(loc="upper right")
        axes.margins(x=0)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "plot", "needs matplotlib, which is not installed: pip install 'jaxserve[plots]'"
        ) from error
    matplotlib.use("Agg")  # a file, never a window
    from matplotlib import pyplot

    return pyplot
