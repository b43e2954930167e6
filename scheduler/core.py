"""Scheduler: decides at every iteration which tokens run. Knows nothing of models, text or devices.

There is no prefill phase and no decode phase: each sequence has `num_computed` tokens that chase
its `num_tokens`. Chunked prompts, prefix hits, recompute after preemption and plain decoding are
this one arithmetic. Time comes in as an argument and nothing here is random, so that the same calls
give the same plans.

With lookahead the engine calls schedule() again before it commits the step in flight: a token that
is sampled but not yet known counts as pending, and its plan entry refers to the slot instead of the
id.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scheduler.admission import AdmissionPolicy, AdmissionRound, AdmitIfFits
from scheduler.buckets import BucketGrid
from scheduler.cache import Match
from scheduler.config import SchedulerConfig
from scheduler.deadlines import Deadlines
from scheduler.door import Door
from scheduler.invariants import check_invariants
from scheduler.lengths import Declared, LengthModel
from scheduler.policy import Fcfs, QueuePolicy
from scheduler.preemption import (
    PreemptionCosts,
    choose_victim,
    may_replace,
)
from scheduler.request import MAX_SUPPRESSED, Request, Sequence, Status
from scheduler.rows import RunningRows, slots_of
from scheduler.stats import Stats
from scheduler.step import Filled, Progress, Step, StepOutput, TextEnds

GAUGE_PERIOD = 16  # steps between two looks at what is reserved


class Scheduler:
    """add and abort requests, schedule() a step, commit() its output. One thread; only the
    checks may be called from others."""

    def __init__(
        self,
        config: SchedulerConfig,
        grid: BucketGrid,
        *,
        policy: QueuePolicy | None = None,
        admission: AdmissionPolicy | None = None,
        lengths: LengthModel | None = None,
        costs: PreemptionCosts | None = None,
        stats: Stats | None = None,
    ):
        self.config = config
        self.grid = grid
        self.stats = stats or Stats()
        self.policy = policy or Fcfs()
        self.admission = admission or AdmitIfFits()
        self.lengths = lengths or Declared()
        self.rows = RunningRows(config, costs or PreemptionCosts())
        self.cache = self.rows.cache
        self.slots = self.rows.slots
        self.running = self.rows.sequences  # in order of arrival
        self.waiting = self.policy.queue()
        self._door = Door(config, self.stats)
        self._by_id: dict[str, Sequence] = {}
        self._deadlines = Deadlines(self._by_id)
        self._num_added = 0
        self._update_gauges()

    # ---- requests ----

    def check_prompt(self, num_tokens: int) -> None:
        """Refuse what could never run. Raises PromptTooLong, PromptExceedsPool."""
        self._door.check_prompt(num_tokens)

    def check_queue(self, num_requests: int, num_tokens: int, now: float) -> None:
        """Refuse what is too much for the queue, all or none: so many sequences, so many prompt
        tokens in all. Raises QueueFull."""
        self._door.check_queue(num_requests, num_tokens, self.slots.num_free, now)

    def max_output(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """max_tokens clamped to what the context and the pool leave; None asks for all of it."""
        room = self.config.max_tokens_per_sequence - num_prompt_tokens
        return room if max_tokens is None else min(max_tokens, room)

    def add(self, request: Request) -> Sequence:
        """Queue a request that has passed the checks; its max_tokens is already clamped."""
        assert request.request_id not in self._by_id, "request ids are unique"
        assert len(request.prompt) > 0, "prompts are not empty"
        assert 1 <= request.max_tokens <= self.max_output(len(request.prompt), None)
        assert not request.params.min_tokens or len(request.stop_ids) <= MAX_SUPPRESSED
        sequence = Sequence(request, request.prompt.tolist(), order=self._num_added)
        sequence.profile = self.lengths.profile(request)
        self._num_added += 1
        self._by_id[request.request_id] = sequence
        self.cache.enter(sequence)
        self._push(sequence)
        self._deadlines.add(sequence)
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

    def expire(self, now: float) -> list[Sequence]:
        """End the requests whose deadline has passed, with what they have; returns them."""
        expired = list(self._deadlines.passed(now))
        for sequence in expired:
            self.finish(sequence, "timeout")
        return expired

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence. A row of it that is still in flight is thrown away when it is
        committed."""
        assert sequence.status is not Status.FINISHED
        if sequence.status is Status.RUNNING:
            self.rows.stop(sequence, ended=True)
        else:
            self.waiting.remove(sequence)
            if not self.waiting:
                self._door.drain.emptied()
                self._door.is_blocked = False
            self.stats.queue_tokens -= len(sequence.tokens)
            self.cache.drop_claims(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        del self._by_id[sequence.request.request_id]
        num_output = len(sequence.tokens) - sequence.num_prompt
        self.lengths.observe(
            sequence.request, sequence.profile, num_output, censored=reason != "stop"
        )
        self.stats.finished[reason] += 1
        self._update_gauges()

    def preempt_all(self) -> list[Sequence]:
        """After a failed step: every running row goes back to the queue, oldest first in the
        result, and no cached page is trusted any more.

        Tokens in flight are forgotten, in waiting rows too: they will be computed and sampled
        again.
        """
        victims = list(self.running)
        for sequence in reversed(victims):
            self._requeue(sequence)
            self.stats.preemptions["recompute"] += 1
        for sequence in self.waiting:
            sequence.num_pending = 0
            sequence.claims = []
        self.cache.clear()
        self._update_gauges()
        return victims

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that has not ended."""
        return iter(list(self._by_id.values()))

    # ---- one iteration ----

    def schedule(self, now: float) -> Step | None:
        """Plan the next step, or None when no row can advance until the step in flight is
        committed.

        Rows that need one token come first, then longer ones in chunks within the token budget,
        then new arrivals. A row never waits for younger or less important ones: when pages run out,
        one of those is preempted. So the oldest of the most important rows always advances, and
        nothing can hang.
        """
        requests, tokens = len(self.waiting), self.stats.queue_tokens
        budget = self.config.max_num_batched_tokens
        self._yield_to_waiting()
        decode = self._take_decode_pages()
        chunks: list[tuple[Sequence, int]] = []
        self._admit(budget - len(decode), chunks, before=self._behind())
        self._chunk_running(budget - len(decode) - _length(chunks), chunks)
        # preemption for one row can have hit another that was to have its turn
        decode = [sequence for sequence in decode if sequence.status is Status.RUNNING]
        chunks = [chunk for chunk in chunks if chunk[0].status is Status.RUNNING]
        self._admit(budget - len(decode) - _length(chunks), chunks)
        requests, tokens = requests - len(self.waiting), tokens - self.stats.queue_tokens
        self._door.drain.observe(now, len(self.waiting), requests, tokens)
        self._door.is_blocked = bool(self.waiting)
        self.lengths.watch(self.rows.profiles(self.rows.all_slots))
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
        for filled in step.filled:
            sequence = filled.sequence
            same_pages = sequence.num_preemptions == filled.num_preemptions
            if sequence.status is Status.RUNNING and same_pages:
                self.cache.learn(sequence, filled.num_computed)
        for row, sequence in live:
            token = tokens[row]
            sequence.num_pending -= 1
            sequence.tokens.append(token)
            progress.append(Progress(sequence, row, token))
            if sequence.status is Status.WAITING:
                stats.queue_tokens += 1
            if sequence.first_token_at is None:
                sequence.first_token_at = now
                stats.time_to_first_token.observe(now - sequence.request.arrival)
            else:
                stats.inter_token_latency.observe(now - sequence.last_token_at)
            sequence.last_token_at = now
            self.waiting.charge(sequence, 0, 1)
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

    def _yield_to_waiting(self) -> None:
        """Rows make place for a waiting sequence that is strictly more important, if that helps."""
        head = self.waiting.peek()
        if head is None or head.num_pending:
            return
        yielding = may_replace(self.running, head, self.policy)
        if not yielding:
            return
        config = self.config
        most = config.max_chunk_tokens or config.max_num_batched_tokens
        staying = (s for s in self.running if s not in yielding)
        ahead = sum(min(s.num_tokens - s.num_computed, most) for s in staying)
        if ahead >= config.max_num_batched_tokens:
            return  # a slot alone helps nobody
        if not self.rows.could_start(head, self.admission, without=yielding):
            return  # not even in place of all of them
        for victim in yielding:
            admission = self.rows.round(self.admission)
            if self.slots.num_free and self.rows.finds_room(head, admission):
                return
            self._preempt(victim)

    def _take_decode_pages(self) -> list[Sequence]:
        """Rows that need exactly one token, each with the page that the token falls into."""
        if not self.running:
            return []
        slots, table = self.rows.all_slots, self.slots
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

    def _behind(self) -> list[Sequence]:
        """Running rows that are more than one token behind, the most important ones first, then by
        age."""
        slots, table = self.rows.all_slots, self.slots
        behind = np.flatnonzero(table.target[slots] - table.computed[slots] > 1)
        rows = [self.running[i] for i in behind.tolist()]
        return sorted(rows, key=lambda s: (s.request.options.priority, s.order))

    def _chunk_running(self, budget: int, chunks: list[tuple[Sequence, int]]) -> None:
        """Chunks of the running rows that are more than one token behind."""
        started = {sequence.order for sequence, _ in chunks}
        for sequence in self._behind() if budget > 0 else ():
            if budget <= 0:
                break
            if sequence.status is not Status.RUNNING or sequence.order in started:
                continue
            behind = sequence.num_tokens - sequence.num_computed
            length = self._chunk(sequence, min(behind, budget))
            if length:
                chunks.append((sequence, length))
                budget -= length

    def _admit(
        self,
        budget: int,
        chunks: list[tuple[Sequence, int]],
        before: list[Sequence] | None = None,
    ) -> None:
        """Start waiting sequences, in the order of the queue, while a slot, budget and pages for
        their present tokens are there, and the admission policy expects the pool to hold them.
        before: only those that outrank one of these rows, whose prompts can wait."""
        if budget <= 0 or not self.waiting or not self.slots.num_free:
            return
        admission: AdmissionRound | None = None
        while budget > 0 and self.slots.num_free:
            sequence = self.waiting.peek()
            # one with a token still in flight can't be replayed until the host knows the token
            if sequence is None or sequence.num_pending:
                break
            if before is not None and not any(self.policy.outranks(sequence, s) for s in before):
                return
            admission = admission or self.rows.round(self.admission)
            match = self.rows.finds_room(sequence, admission)
            if match is None:
                break
            self._start(sequence, match)
            length = self._chunk(sequence, min(sequence.num_tokens - sequence.num_computed, budget))
            assert length > 0
            chunks.append((sequence, length))
            budget -= length
        if admission is not None and self.stats.steps % GAUGE_PERIOD == 0:
            # it can cost as much as a decision
            self.stats.pages_reserved = admission.reserved + self.rows.promised

    def _start(self, sequence: Sequence, match: Match) -> None:
        popped = self.waiting.pop()
        assert popped is sequence
        stats = self.stats
        stats.queue_tokens -= len(sequence.tokens)
        self.rows.start(sequence, match)
        if sequence.num_preemptions == 0:
            unseen = max(0, sequence.num_prompt - sequence.num_computed)
            self.waiting.charge(sequence, unseen, 0)
            # one that comes back finds its own pages: that is no news of the cache
            stats.prefix_tokens["queried"] += sequence.num_prompt
            stats.prefix_tokens["hit"] += sequence.num_shared
            stats.prefix_tokens["hit_host"] += sequence.num_computed - sequence.num_shared
        stats.recomputed_tokens += max(0, sequence.most_computed - sequence.num_computed)

    def _chunk(self, sequence: Sequence, length: int) -> int:
        """Take pages for up to `length` more tokens; returns how many tokens fit into what was
        had."""
        if self.config.max_chunk_tokens is not None:
            length = min(length, self.config.max_chunk_tokens)
        self._grow(sequence, length)
        return min(length, len(sequence.pages) * self.config.page_size - sequence.num_computed)

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Take pages until `length` more tokens fit, preempting rows that must give way to it."""
        for _ in range(self.rows.lacks(sequence, length)):
            while not self.rows.may_take(sequence):
                victim = choose_victim(self.running, sequence, self.policy)
                if victim is None:
                    return False
                self._preempt(victim)
            self.rows.take(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its pages go to the host if that beats computing them again."""
        mode = "swap" if self.cache.claim(sequence) else "recompute"
        self.stats.preemptions[mode] += 1
        sequence.num_preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.most_computed = max(sequence.most_computed, sequence.num_computed)
        self.rows.stop(sequence, ended=False)
        sequence.status = Status.WAITING
        sequence.num_computed = sequence.num_shared = 0
        self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)
        self.stats.queue_tokens += len(sequence.tokens)

    def _plan(self, decode: list[Sequence], chunks: list[tuple[Sequence, int]]) -> Step:
        table = self.slots
        decode_slots, chunk_slots = slots_of(decode), slots_of([s for s, _ in chunks])
        slots = np.concatenate([decode_slots, chunk_slots])
        pages = int(table.num_pages[slots].max())
        num_tokens = len(decode) + _length(chunks)
        if chunks:
            key = self.grid.mixed_key(num_tokens, pages)
        else:
            key = self.grid.decode_key(num_tokens, pages)
        plan = table.fill_plan(key, decode_slots, chunks)

        sampled = list(enumerate(decode))
        table.computed[decode_slots] += 1
        for sequence in decode:
            sequence.num_computed += 1
        full = table.computed[decode_slots] % self.config.page_size == 0
        filled = [decode[i] for i in np.flatnonzero(full).tolist()]
        for row, (sequence, length) in enumerate(chunks, start=len(decode)):
            sequence.num_computed += length
            table.computed[sequence.slot] += length
            filled.append(sequence)
            if sequence.num_computed == sequence.num_tokens:
                sampled.append((row, sequence))
        sampled_slots = slots_of([s for _, s in sampled])
        table.target[sampled_slots] += 1
        table.last_token[sampled_slots] = -(sampled_slots + 1)
        for _, sequence in sampled:
            sequence.num_pending += 1

        stats = self.stats
        copies = self.cache.copies()
        stats.steps += 1
        stats.plan_tokens["real"] += num_tokens
        stats.plan_tokens["padded"] += key.tokens - num_tokens
        stats.pages_copied["out"] += len(copies.out)
        stats.pages_copied["back"] += len(copies.back)
        self._update_gauges()
        wants_logprobs = bool((table.num_logprobs[sampled_slots] >= 0).any())
        return Step(
            plan,
            tuple(sampled),
            tuple(Filled(s, s.num_computed, s.num_preemptions) for s in filled),
            copies,
            use_sampler=wants_logprobs or bool(table.needs_sampler(sampled_slots).any()),
            wants_logprobs=wants_logprobs,
        )

    def _update_gauges(self) -> None:
        stats, cache = self.stats, self.cache
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        if not self.running:
            stats.pages_reserved = 0
        stats.pages_free, stats.pages_cached = cache.pool.num_free, cache.pool.num_cached
        stats.pages_held = cache.pool.num_held
        host = cache.host
        stats.host_pages["free"], stats.host_pages["cached"] = host.num_free, host.num_cached
        stats.host_pages["held"] = host.num_held

    def check_invariants(self) -> None:
        """Assert what must hold after every call (see scheduler.invariants)."""
        check_invariants(self)


def _length(chunks: list[tuple[Sequence, int]]) -> int:
    """Tokens of all chunks."""
    return sum(length for _, length in chunks)
