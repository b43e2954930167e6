"""Simulator: the engine's loop without an engine. The same Scheduler, unchanged, is driven by a
trace and by the time that a StepTimeModel gives each step.

It does what jaxserve.engine and the server around it do, on a clock of its own: requests are
checked when they arrive and added between steps; with lookahead a step is planned while the one
before it runs; the output of a row ends where the trace says. What a row needs of its request is
read from the plan, as a device would, in numpy: no Python runs for a single token here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler.core import Scheduler
from scheduler.errors import QueueFull, RequestError
from scheduler.pages import pages_for
from scheduler.plan import DROPPED
from scheduler.report import GapHistogram, PoolSeries
from scheduler.request import Request, SamplingParams, Sequence, Status
from scheduler.stats import Stats
from scheduler.step import Step
from scheduler.steptime import StepTimeModel, load_of, load_of_chunk, plan_words
from scheduler.workload import END, MAX_TOKENS, Trace

# How a request ended, as a code in Outcome.ending.
ENDINGS = ("unfinished", "stop", "length", "timeout", "refused", "unservable")
REFUSED, UNSERVABLE = ENDINGS.index("refused"), ENDINGS.index("unservable")

Progress = Callable[[int, int], None]  # (requests that have arrived, of how many)


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of every request of a trace on one engine, in the trace's order."""

    arrival: np.ndarray  # float64[n] seconds
    first_at: np.ndarray  # float64[n] when its first token was known; NaN: none
    last_at: np.ndarray  # float64[n]
    made: np.ndarray  # int64[n] output tokens
    ending: np.ndarray  # int8[n] index into ENDINGS
    preempted: np.ndarray  # int16[n] times
    unloaded: np.ndarray  # float64[n] seconds to its first token on an idle engine
    gaps: GapHistogram  # between a request's tokens
    series: PoolSeries
    stats: Stats
    num_pages: int
    end: float = 0.0  # seconds, of the last step

    @classmethod
    def empty(
        cls, trace: Trace, scheduler: Scheduler, times: StepTimeModel, every: float
    ) -> Outcome:
        count = len(trace)
        return cls(
            arrival=trace.arrival,
            first_at=np.full(count, np.nan),
            last_at=np.full(count, np.nan),
            made=np.zeros(count, np.int64),
            ending=np.zeros(count, np.int8),
            preempted=np.zeros(count, np.int16),
            unloaded=unloaded_ttft(trace.prompt_tokens, scheduler, times),
            gaps=GapHistogram(),
            series=PoolSeries(every),
            stats=scheduler.stats,
            num_pages=scheduler.config.num_pages,
        )

    @property
    def complete(self) -> np.ndarray:
        """bool[n]: it has all its tokens."""
        return (self.ending == ENDINGS.index("stop")) | (self.ending == ENDINGS.index("length"))

    def endings(self) -> dict[str, int]:
        counts = np.bincount(self.ending, minlength=len(ENDINGS)).tolist()
        return dict(zip(ENDINGS, counts, strict=True))


def unloaded_ttft(prompts: np.ndarray, scheduler: Scheduler, times: StepTimeModel) -> np.ndarray:
    """float64[n] seconds from arrival to first token of prompts (int64[n] tokens) that run alone:
    the host's part once, as later chunks are planned ahead."""
    config, grid = scheduler.config, scheduler.grid
    most = min(config.max_num_batched_tokens, config.max_chunk_tokens or MAX_TOKENS)

    def seconds(prompt: int) -> float:
        total = times.host
        prompt = min(prompt, config.max_tokens_per_sequence)
        for done in range(0, prompt, most):
            length = min(most, prompt - done)
            key = grid.mixed_key(length, pages_for(done + length, config.page_size))
            total += times.seconds(key, load_of_chunk(length, done + length))
        return total

    different, which = np.unique(prompts, return_inverse=True)
    return np.array([seconds(prompt) for prompt in different.tolist()])[which]


class _Sampled(NamedTuple):
    tokens: np.ndarray  # int32[rows]


class _InFlight(NamedTuple):
    step: Step
    end: float  # seconds, when the device is done


class Simulator:
    """One run of one trace over one scheduler, which must be new.

    lookahead: plan a step while another runs, as the engine does by default. max_tokens: what
    requests declare that the trace says nothing of; None: all that the context leaves.
    sample_every: seconds between two samples of pool and queue; None: 500 over the trace.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        trace: Trace,
        times: StepTimeModel,
        *,
        lookahead: bool = True,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        sample_every: float | None = None,
    ):
        self.scheduler = scheduler
        self.trace = trace
        self.times = times
        self._lookahead = lookahead
        self._max_tokens = max_tokens
        # the limit of each request is in Request.max_tokens; ids other than END never end it
        self._params = SamplingParams(temperature=temperature, max_tokens=None)
        # position of the token that ends it, by request
        self._last_position = trace.prompt_tokens + trace.output_tokens - 1
        self._arrived = 0
        self._inbox: list[Request] = []  # let in, and added before the next step
        self._inbox_tokens = 0
        self._device_free = 0.0
        self.outcome = Outcome.empty(
            trace, scheduler, times, sample_every or trace.span / 500 or 1.0
        )

    def run(self, progress: Progress | None = None) -> Outcome:
        """Until every request has ended."""
        scheduler, outcome, series = self.scheduler, self.outcome, self.outcome.series
        deadlines = len(self.trace.timeout) > 0
        now = 0.0
        in_flight: _InFlight | None = None
        steps = 0
        while True:
            self._receive(now)
            for request in self._inbox:
                scheduler.add(request)
            self._inbox.clear()
            self._inbox_tokens = 0
            if deadlines:
                for sequence in scheduler.expire(now):
                    self._ended(sequence)
            step = scheduler.schedule(now)
            series.sample(now, scheduler.stats)
            previous, in_flight = in_flight, self._submit(step, now) if step else None
            if not self._lookahead:
                previous, in_flight = in_flight, None
            if step is not None:
                now += self.times.host
            if previous is not None:
                now = max(now, previous.end)
                self._receive(now)  # they met the queue as it is before this commit
                self._commit(previous.step, now)
            elif step is None:
                idle = not scheduler.running and not scheduler.waiting
                assert idle, "requests wait, but nothing can run"
                if self._arrived == len(self.trace):
                    break
                now = max(now, float(self.trace.arrival[self._arrived]))
            steps += 1
            if progress is not None and steps % 1000 == 0:
                progress(self._arrived, len(self.trace))
        outcome.end = now
        series.sample(now, scheduler.stats, last=True)
        return outcome

    def _receive(self, now: float) -> None:
        """Check those that have arrived by now, as the server does at once, and queue them for the
        engine's thread."""
        trace, scheduler = self.trace, self.scheduler
        while self._arrived < len(trace) and trace.arrival[self._arrived] <= now:
            index = self._arrived
            self._arrived += 1
            prompt = int(trace.prompt_tokens[index])
            arrival = float(trace.arrival[index])
            try:
                scheduler.check_prompt(prompt)
                scheduler.check_queue(1 + len(self._inbox), self._inbox_tokens + prompt, arrival)
            except QueueFull:
                self.outcome.ending[index] = REFUSED
                continue
            except RequestError:
                self.outcome.ending[index] = UNSERVABLE
                continue
            declared = int(trace.max_tokens[index]) if len(trace.max_tokens) else 0
            limit = scheduler.max_output(prompt, declared or self._max_tokens)
            self._inbox.append(trace.request(index, limit, self._params))
            self._inbox_tokens += prompt

    def _submit(self, step: Step, now: float) -> _InFlight:
        """The device runs steps in order, each as soon as the host has given it."""
        copies = step.copies
        seconds = self.times.seconds(step.plan.key, load_of(step.plan, step.use_sampler))
        seconds += self.times.copy_seconds(len(copies.out), len(copies.back))
        self._device_free = max(now + self.times.host, self._device_free) + seconds
        return _InFlight(step, self._device_free)

    def _commit(self, step: Step, now: float) -> None:
        plan, outcome = step.plan, self.outcome
        rows = np.flatnonzero(plan_words(plan, "sample_slot") != DROPPED)
        request = plan_words(plan, "key")[::2][rows]  # int32[samples]: a request's key is its index
        position = plan_words(plan, "context_len")[rows]
        # a token that stands for its request alone, so that no cached page is shared by chance
        tokens = np.zeros(plan.key.rows, np.int32)
        own = request + self.trace.own_id(0)
        tokens[rows] = np.where(position == self._last_position[request], END, own)
        progress = self.scheduler.commit(step, _Sampled(tokens), now)
        if len(progress) < len(rows):  # some had ended while they were in flight
            kept = np.fromiter((p.row for p in progress), np.int64, len(progress))
            request = request[np.searchsorted(rows, kept)]
        later = outcome.made[request] > 0
        outcome.gaps.add(now - outcome.last_at[request[later]])
        outcome.first_at[request[~later]] = now
        outcome.last_at[request] = now
        outcome.made[request] += 1
        for p in progress:
            if p.sequence.status is Status.FINISHED:
                self._ended(p.sequence)

    def _ended(self, sequence: Sequence) -> None:
        index = sequence.request.key[0]
        self.outcome.ending[index] = ENDINGS.index(sequence.finish_reason or "")
        self.outcome.preempted[index] = sequence.num_preemptions
