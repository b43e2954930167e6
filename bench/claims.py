"""What the collapse test claims of an engine, and whether the figures bear it out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.experiment import OWN, Interference, Measured, Plan, Setting
from bench.judge import Run
from scheduler.preemption import MAX_PREEMPTIONS

DELIBERATE = (200, 429, 503, 504)
SHARE_OF_PEAK = 0.9
SHARE_AGAIN = 0.05
DRAINED = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Claim:
    name: str
    wanted: str
    found: str
    holds: bool
    is_timed: bool = False  # it depends on how quiet the machine is


def claims(
    measured: Measured, setting: Setting, plan: Plan, interference: Interference | None
) -> list[Claim]:
    found = [
        *_safe(measured.own_runs(), setting),
        *_unguarded(list(measured.policies.values()), setting),
        *_timed(measured, plan),
    ]
    if interference is not None:
        beside, limit = 1e3 * interference.beside, 1e3 * interference.limit
        found.append(
            Claim(
                f"{setting.streams} streams beside a prompt of {setting.long_prompt} tokens every "
                f"{plan.long_every:g} s: p99 of the gaps between tokens",
                f"<= {limit:.0f} ms ({1e3 * interference.alone:.0f} alone + 1.5 x "
                f"{1e3 * interference.chunk:.0f} a chunk)",
                f"{beside:.0f} ms",
                beside <= limit,
                is_timed=True,
            )
        )
    return found


def _safe(runs: Sequence[Run], setting: Setting) -> Iterator[Claim]:
    """What must hold however slow the machine is."""
    answers = [answer for run in runs for answer in run.answers]
    streams = [answer for answer in answers if answer.status == 200]
    broken = [answer for answer in streams if answer.broken]
    faults = f": {broken[0].fault or 'not the scripted text'}" if broken else ""
    yield _none("streams that broke", len(broken), f" of {len(streams)}{faults}")
    others = Counter(answer.status for answer in answers if answer.status not in DELIBERATE)
    statuses = Counter(answer.status for answer in answers)
    yield _none(
        "answers with another status than 200, 429, 503, 504",
        others.total(),
        f" ({', '.join(f'{count} x {status}' for status, count in sorted(statuses.items()))})",
    )
    refused = [answer for answer in answers if answer.status == 429]
    silent = [answer for answer in refused if not answer.retry_after]
    yield _none("refusals without Retry-After", len(silent), f" of {len(refused)}")
    hanging = [answer for answer in answers if math.isnan(answer.ended)]
    yield _none("requests that hang", len(hanging), f" of {len(answers)}")
    yield _preempted("preemptions of one request, at most", runs)
    again = sum(run.counters["tokens_again"] for run in runs)
    share = again / sum(run.counters["tokens_computed"] for run in runs)
    yield Claim(
        "recomputed tokens, of all", f"<= {SHARE_AGAIN:.0%}", f"{share:.2%}", share <= SHARE_AGAIN
    )
    yield _pages("pages at the end of each load", runs, setting)
    yield _none("compilations while serving", int(sum(run.counters["compiled"] for run in runs)))


def _unguarded(runs: Sequence[Run], setting: Setting) -> Iterator[Claim]:
    """The policies' runs, where all are let in, and rows outgrow the pool."""
    if not runs:
        return
    answers = [answer for run in runs for answer in run.answers]
    bad = sum(not answer.whole for answer in answers)
    yield _none(
        "without a limit on the queue: requests not answered whole", bad, f" of {len(answers)}"
    )
    yield _preempted("there: preemptions of one request, at most", runs)
    yield _pages("there: pages at the end", runs, setting)


def _preempted(name: str, runs: Sequence[Run]) -> Claim:
    most = max(run.most_preemptions for run in runs)
    number = sum(run.counters["recomputed"] + run.counters["swapped"] for run in runs)
    found = f"{most} ({number:.0f} in all)"
    return Claim(name, f"<= {MAX_PREEMPTIONS}", found, most <= MAX_PREEMPTIONS)


def _pages(name: str, runs: Sequence[Run], setting: Setting) -> Claim:
    ends = [
        tuple(int(run.last[f"kv_pages{{{state}}}"]) for state in ("free", "cached", "held"))
        for run in runs
    ]
    bad = [end for end in ends if sum(end) != setting.num_pages or end[-1]]
    free, cached, held = (bad or ends)[-1]
    return Claim(
        name,
        f"free + cached + held = {setting.num_pages}, none held",
        f"{free} + {cached} + {held}" + (f" ({len(bad)} loads)" if bad else ""),
        not bad,
    )


def _timed(measured: Measured, plan: Plan) -> Iterator[Claim]:
    goodput = {
        point.factor: run.goodput(point.window, measured.limits)
        for point, run in measured.sweep[OWN].items()
    }
    best = max(goodput, key=goodput.__getitem__)
    share = goodput[2.0] / goodput[best] if goodput[best] else 0.0
    yield Claim(
        "goodput at twice the saturated rate, of the peak",
        f">= {SHARE_OF_PEAK}",
        f"{share:.2f} ({goodput[2.0]:.1f} of {goodput[best]:.1f} tokens/s at {best:g})",
        share >= SHARE_OF_PEAK,
        is_timed=True,
    )
    seconds = drained_after(measured.stages[OWN], plan)
    yield Claim(
        "the queue is empty so long after the burst",
        f"<= {DRAINED:g} s",
        f"{seconds:.1f} s",
        seconds <= DRAINED,
        is_timed=True,
    )


def drained_after(stages: Run, plan: Plan) -> float:
    """Seconds from the end of the burst to the first look that finds nobody waiting; inf: never."""
    burst = plan.stages[0].seconds + plan.stages[1].seconds
    at, waiting = np.array(stages.series["at"]), np.array(stages.series["waiting"])
    empty = at[(at >= burst) & (waiting == 0)]
    return float(empty[0]) - burst if len(empty) else math.inf


def _none(name: str, count: int, more: str = "") -> Claim:
    return Claim(name, "0", f"{count}{more}", count == 0)
