"""Scheduler: decides at every iteration which tokens run. Knows nothing of models, text or devices.

There is no prefill phase and no decode phase: each sequence has `num_computed` tokens that chase
its `num_tokens`. Chunked prompts, recompute after preemption and plain decoding are this one
arithmetic. Time comes in as an argument and nothing here is random, so that the same calls give the
same plans.

With lookahead the engine calls schedule() again before it commits the step in flight: a token that
is sampled but not yet known counts as pending, and its plan entry refers to the slot instead of the
id.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler.buckets import BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.errors import PromptExceedsPool, PromptTooLong, QueueFull
from scheduler.invariants import check_invariants
from scheduler.pages import PagePool, pages_for
from scheduler.plan import BatchPlan
from scheduler.policy import Fcfs, QueuePolicy, WaitingQueue
from scheduler.request import MAX_SUPPRESSED, Request, Sequence, Status
from scheduler.slots import SlotTable
from scheduler.stats import Stats

# (sequence, its new token) -> why the text that the token makes ends the sequence, if it does
TextEnds = Callable[[Sequence, int], str | None]


class StepOutput(Protocol):
    """What a step sampled, in row order. Rows that sample nothing hold garbage."""

    @property
    def tokens(self) -> np.ndarray: ...  # int32[rows]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One iteration's decision. `sampled` names the rows whose token counts: (row, sequence).

    use_sampler: some row wants more than its likeliest token."""

    plan: BatchPlan
    sampled: tuple[tuple[int, Sequence], ...]
    use_sampler: bool = False
    wants_logprobs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """One token that a commit accepted, and the row of the step's output that it came from."""

    sequence: Sequence
    row: int
    token: int


class Scheduler:
    """add and abort requests, schedule() a step, commit() its output. One thread."""

    def __init__(
        self,
        config: SchedulerConfig,
        grid: BucketGrid,
        policy: QueuePolicy | None = None,
        stats: Stats | None = None,
    ):
        self.config = config
        self.grid = grid
        self.stats = stats or Stats()
        self.pool = PagePool(config.num_pages, config.page_size)
        self.slots = SlotTable(config.max_rows, config.max_pages_per_sequence, config.page_size)
        self.running: list[Sequence] = []  # in order of arrival: the last one is the first victim
        self.waiting = WaitingQueue(policy or Fcfs())
        self._by_id: dict[str, Sequence] = {}
        self._num_added = 0
        self._update_gauges()

    # ---- requests ----

    def check(self, num_prompt_tokens: int, num_requests: int = 1) -> None:
        """Refuse at the door what could never run. Raises PromptTooLong, PromptExceedsPool,
        QueueFull."""
        config = self.config
        if num_prompt_tokens >= config.max_model_len:
            raise PromptTooLong(num_prompt_tokens, config.max_model_len)
        if num_prompt_tokens >= config.pool_tokens:
            raise PromptExceedsPool(num_prompt_tokens, config.pool_tokens)
        limit = config.max_waiting
        if limit is None:
            return
        # those that find a free slot do not wait
        room = limit + (0 if self.waiting else self.slots.num_free)
        if len(self.waiting) + num_requests > room:
            raise QueueFull(limit, retry_after=1.0)

    def max_output(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """max_tokens clamped to what the context and the pool leave; None asks for all of it."""
        room = self.config.max_tokens_per_sequence - num_prompt_tokens
        return room if max_tokens is None else min(max_tokens, room)

    def add(self, request: Request) -> Sequence:
        """Queue a request that `check` let through; its max_tokens is already clamped."""
        assert request.request_id not in self._by_id, "request ids are unique"
        assert len(request.prompt) > 0, "prompts are not empty"
        assert 1 <= request.max_tokens <= self.max_output(len(request.prompt), None)
        assert not request.params.min_tokens or len(request.stop_ids) <= MAX_SUPPRESSED
        sequence = Sequence(request, request.prompt.tolist(), order=self._num_added)
        self._num_added += 1
        self._by_id[request.request_id] = sequence
        self.waiting.push(sequence)
        self.stats.prompt_tokens += sequence.num_prompt
        self._update_gauges()
        return sequence

    def abort(self, request_id: str) -> Sequence | None:
        """End a request in any state; its pages are free at once. None if it is not here (any
        more)."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")
        return sequence

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence. A row of it that is still in flight is thrown away when it is
        committed."""
        assert sequence.status is not Status.FINISHED
        if sequence.status is Status.RUNNING:
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        del self._by_id[sequence.request.request_id]
        self.stats.finished[reason] += 1
        self._update_gauges()

    def preempt_all(self) -> list[Sequence]:
        """After a failed step: every running row goes back to the queue, oldest first in the
        result.

        Tokens in flight are forgotten, in waiting rows too: they will be computed and sampled
        again.
        """
        victims = list(self.running)
        for sequence in reversed(victims):
            self._preempt(sequence)
        for sequence in self.waiting:
            sequence.num_pending = 0
        self._update_gauges()
        return victims

    @property
    def has_requests(self) -> bool:
        return bool(self._by_id)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that has not ended."""
        return iter(list(self._by_id.values()))

    # ---- one iteration ----

    def schedule(self, now: float) -> Step | None:
        """Plan the next step, or None when no row can advance until the step in flight is
        committed.

        Rows that need one token come first, then longer ones in chunks within the token budget,
        then new arrivals. Older rows never wait for younger ones: when pages run out, the youngest
        row is preempted. So the oldest row always advances, and nothing can hang.
        """
        budget = self.config.max_num_batched_tokens
        decode = self._take_decode_pages()
        chunks = self._chunk_running(budget - len(decode))
        # preemption for a chunk can have hit a row that was going to decode
        decode = [sequence for sequence in decode if sequence.status is Status.RUNNING]
        spent = len(decode) + sum(length for _, length in chunks)
        self._admit(budget - spent, chunks)
        if not decode and not chunks:
            self._update_gauges()
            return None
        return self._plan(decode, chunks)

    def commit(
        self, step: Step, output: StepOutput, now: float, text_ends: TextEnds | None = None
    ) -> list[Progress]:
        """Put the sampled tokens where their placeholders stand; end the sequences that are
        complete: by an end token, by their text, or by length, in this order."""
        progress: list[Progress] = []
        tokens = output.tokens.tolist()
        stats = self.stats
        # those that have ended while their row was in flight are thrown away
        live = [(row, s) for row, s in step.sampled if s.status is not Status.FINISHED]
        # before anything changes: a commit that fails must leave nothing half done
        assert all(tokens[row] >= 0 for row, _ in live), "a row that samples gave no token"
        for row, sequence in live:
            token = tokens[row]
            sequence.num_pending -= 1
            sequence.tokens.append(token)
            progress.append(Progress(sequence, row, token))
            if sequence.first_token_at is None:
                sequence.first_token_at = now
                stats.time_to_first_token.observe(now - sequence.request.arrival)
            else:
                stats.inter_token_latency.observe(now - sequence.last_token_at)
            sequence.last_token_at = now
            num_output = len(sequence.tokens) - sequence.num_prompt
            request = sequence.request
            reason = None
            if token in request.stop_ids and num_output > request.params.min_tokens:
                reason = "stop"
            elif text_ends is not None:
                reason = text_ends(sequence, token)
            if reason is None and num_output >= request.max_tokens:
                reason = "length"
            if reason is not None:
                self.finish(sequence, reason)
        stats.generation_tokens += len(progress)
        return progress

    # ---- parts of schedule ----

    def _take_decode_pages(self) -> list[Sequence]:
        """Rows that need exactly one token, each with the page that the token falls into."""
        if not self.running:
            return []
        slots = np.fromiter((s.slot for s in self.running), np.int32, len(self.running))
        table = self.slots
        computed, target = table.computed[slots], table.target[slots]
        ready = (target - computed == 1) & (target < table.limit[slots])
        crossing = ready & (computed >= table.num_pages[slots] * self.config.page_size)
        running = self.running
        decode = [running[i] for i in np.flatnonzero(ready).tolist()]
        if not crossing.any():
            return decode
        starved: set[int] = set()
        for sequence in [running[i] for i in np.flatnonzero(crossing).tolist()]:
            if sequence.status is Status.RUNNING and not self._grow(sequence, 1):
                starved.add(sequence.order)
        return [s for s in decode if s.status is Status.RUNNING and s.order not in starved]

    def _chunk_running(self, budget: int) -> list[tuple[Sequence, int]]:
        """Chunks of the running rows that are more than one token behind, oldest first."""
        chunks: list[tuple[Sequence, int]] = []
        for sequence in list(self.running) if budget > 0 else ():
            behind = sequence.num_tokens - sequence.num_computed
            if budget <= 0:
                break
            if behind <= 1 or sequence.status is not Status.RUNNING:
                continue
            length = self._chunk(sequence, min(behind, budget))
            if length:
                chunks.append((sequence, length))
                budget -= length
        # a row can fall victim to an older one only before its own turn, never after
        assert all(sequence.status is Status.RUNNING for sequence, _ in chunks)
        return chunks

    def _admit(self, budget: int, chunks: list[tuple[Sequence, int]]) -> None:
        """Start waiting sequences while a slot, budget and pages for all their present tokens are
        there."""
        page_size = self.config.page_size
        if budget <= 0 or not self.waiting or not self.slots.num_free:
            return
        owed = self._owed()
        while budget > 0 and self.slots.num_free:
            sequence = self.waiting.peek()
            # one with a token still in flight can't be replayed until the host knows the token
            if sequence is None or sequence.num_pending:
                break
            need = pages_for(sequence.num_tokens + 1, page_size)
            if self.pool.num_free - owed < need:
                break
            self.waiting.pop()
            self.slots.enter(sequence)
            sequence.status = Status.RUNNING
            insort(self.running, sequence, key=lambda s: s.order)
            length = self._chunk(sequence, min(sequence.num_tokens, budget))
            assert length > 0
            chunks.append((sequence, length))
            budget -= length
            owed += need - len(sequence.pages)

    def _owed(self) -> int:
        """Pages that running rows still lack for the tokens that they have and the next one: who
        is admitted on less is preempted in the next step."""
        slots = np.fromiter((s.slot for s in self.running), np.int32, len(self.running))
        tokens = np.minimum(self.slots.target[slots] + 1, self.slots.limit[slots])
        need = -(-tokens // self.config.page_size)
        return int(np.maximum(need - self.slots.num_pages[slots], 0).sum())

    def _chunk(self, sequence: Sequence, length: int) -> int:
        """Take pages for up to `length` more tokens; returns how many tokens fit into what was
        had."""
        if self.config.max_chunk_tokens is not None:
            length = min(length, self.config.max_chunk_tokens)
        self._grow(sequence, length)
        return min(length, len(sequence.pages) * self.config.page_size - sequence.num_computed)

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Take pages until `length` more tokens fit, preempting only rows younger than this one."""
        need = pages_for(sequence.num_computed + length, self.config.page_size)
        while len(sequence.pages) < need:
            if not self.pool.num_free:
                victim = self.running[-1]
                if victim.order <= sequence.order:
                    return False
                self._preempt(victim)
                continue
            self.slots.append_page(sequence, self.pool.take())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Send a row back to the queue; its tokens stay and are computed again when it returns."""
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.waiting.push(sequence)
        self.stats.preemptions["recompute"] += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.pages)
        sequence.pages = []
        self.slots.leave(sequence)
        self.running.remove(sequence)

    def _plan(self, decode: list[Sequence], chunks: list[tuple[Sequence, int]]) -> Step:
        table = self.slots
        decode_slots = np.fromiter((s.slot for s in decode), np.int32, len(decode))
        chunk_slots = np.fromiter((s.slot for s, _ in chunks), np.int32, len(chunks))
        slots = np.concatenate([decode_slots, chunk_slots])
        pages = int(table.num_pages[slots].max())
        num_tokens = len(decode) + sum(length for _, length in chunks)
        if chunks:
            key = self.grid.mixed_key(num_tokens, pages)
        else:
            key = self.grid.decode_key(num_tokens, pages)
        plan = table.fill_plan(key, decode_slots, chunks)

        sampled = list(enumerate(decode))
        table.computed[decode_slots] += 1
        for sequence in decode:
            sequence.num_computed += 1
        for row, (sequence, length) in enumerate(chunks, start=len(decode)):
            sequence.num_computed += length
            table.computed[sequence.slot] += length
            if sequence.num_computed == sequence.num_tokens:
                sampled.append((row, sequence))
        sampled_slots = np.fromiter((s.slot for _, s in sampled), np.int32, len(sampled))
        table.target[sampled_slots] += 1
        table.last_token[sampled_slots] = -(sampled_slots + 1)
        for _, sequence in sampled:
            sequence.num_pending += 1

        stats = self.stats
        stats.steps += 1
        stats.plan_tokens["real"] += num_tokens
        stats.plan_tokens["padded"] += key.tokens - num_tokens
        self._update_gauges()
        wants_logprobs = bool((table.num_logprobs[sampled_slots] >= 0).any())
        use_sampler = wants_logprobs or bool(table.needs_sampler(sampled_slots).any())
        return Step(plan, tuple(sampled), use_sampler, wants_logprobs)

    def _update_gauges(self) -> None:
        stats, pool = self.stats, self.pool
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        stats.pages_free, stats.pages_cached = pool.num_free, pool.num_cached
        stats.pages_held = pool.num_held

    def check_invariants(self) -> None:
        """Assert what must hold after every call (see scheduler.invariants)."""
        check_invariants(self)
