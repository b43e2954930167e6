"""The virtual token counter: Sheng et al., OSDI 2024, arXiv 2401.00588 ("the paper")."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.fair import FairQueue, FairShare
from scheduler.policy import Fcfs, QueuePolicy, WaitingQueue
from scheduler.request import Request, RequestOptions, SamplingParams, Sequence


def sequence(order: int, tenant: str, prompt: int = 1) -> Sequence:
    request = Request(
        str(order),
        np.ones(prompt, np.int32),
        SamplingParams(),
        max_tokens=1000,
        arrival=0.0,
        options=RequestOptions(tenant=tenant),
    )
    return Sequence(request, [1] * prompt, order=order)


def flood(queue: WaitingQueue, tenants: str) -> list[Sequence]:
    """A waiting sequence for each letter, in this order of arrival."""
    sequences = [sequence(order, tenant) for order, tenant in enumerate(tenants)]
    for s in sequences:
        queue.push(s)
    return sequences


def serve(queue: WaitingQueue, count: int, cost: int = 10) -> str:
    """Start `count` sequences, each of which is served `cost` prompt tokens; their tenants."""
    tenants = ""
    for _ in range(count):
        started = queue.pop()
        queue.charge(started, cost, 0)
        tenants += started.request.options.tenant
    return tenants


# ---- values ----


def test_one_that_floods_waits_for_itself() -> None:
    queue = FairShare().queue()
    flood(queue, "aaaaaabbc")
    assert serve(queue, 9) == "abcabaaaa"


def test_output_costs_twice_as_much_as_input() -> None:
    queue = FairShare().queue()
    a, b, *_ = flood(queue, "abab")
    assert queue.pop() is a
    queue.charge(a, 11, 5)
    assert queue.pop() is b
    queue.charge(b, 10, 5)
    head = queue.peek()
    assert head is not None
    assert head.request.options.tenant == "b", "20 against 21"
    queue.charge(b, 0, 1)
    head = queue.peek()
    assert head is not None
    assert head.request.options.tenant == "a", "22 against 21"


def test_weights_can_be_chosen() -> None:
    queue = FairShare(input_weight=3, output_weight=1).queue()
    a, b, *_ = flood(queue, "abab")
    assert queue.pop() is a
    queue.charge(a, 1, 0)
    assert queue.pop() is b
    queue.charge(b, 0, 2)
    assert queue.pop().request.options.tenant == "b"


def test_equal_counters_go_by_who_began_to_wait_first() -> None:
    queue = FairShare().queue()
    flood(queue, "cabcab")
    assert serve(queue, 6) == "cabcab"


def test_a_preempted_sequence_keeps_its_place_inside_its_tenant() -> None:
    queue = FairShare().queue()
    flood(queue, "aaabbb")
    first, second = queue.pop(), queue.pop()
    assert (first.order, second.order) == (0, 1), "nothing was charged yet"
    queue.charge(first, 5, 0)
    queue.push(second)
    queue.push(first)
    started = [queue.pop().order for _ in range(3)]
    assert started == [3, 4, 5], "its tenant has been served more than the other"
    assert [queue.pop().order for _ in range(3)] == [0, 1, 2]


def test_pushing_back_charges_nothing() -> None:
    queue = FairShare().queue()
    flood(queue, "aabb")
    for _ in range(10):
        queue.push(queue.pop())
    assert serve(queue, 4) == "abab"


def test_a_tenant_is_charged_for_rows_that_run_while_others_of_its_wait() -> None:
    queue = FairShare().queue()
    flood(queue, "aabb")
    running = queue.pop()
    assert running.request.options.tenant == "a"
    queue.charge(running, 10, 0)
    assert serve(queue, 1, cost=5) == "b"
    queue.charge(running, 0, 1)
    assert serve(queue, 2, cost=5) == "ba"


# ---- coming back ----


def test_idling_earns_no_credit() -> None:
    queue = FairShare().queue()
    sequences = flood(queue, "b" + 50 * "a")
    assert queue.pop() is sequences[0]
    queue.charge(sequences[0], 10, 0)
    assert serve(queue, 40) == 40 * "a", "b has nothing waiting"
    for order in range(100, 110):
        queue.push(sequence(order, "b"))
    assert serve(queue, 8) == "abababab", "not ten of b at once"


def test_who_was_served_more_stays_behind_when_it_comes_back() -> None:
    queue = FairShare().queue()
    sequences = flood(queue, "abbbbbbbbb")
    assert queue.pop() is sequences[0]
    queue.charge(sequences[0], 35, 0)
    queue.push(sequence(100, "a"))
    assert serve(queue, 6) == "bbbbab", "b overtakes 35 with its fourth"


def test_what_is_served_while_nobody_waits_makes_no_debt() -> None:
    """The paper's line 8: the client that left the queue last stands for the others."""
    queue = FairShare().queue()
    sequences = flood(queue, "a")
    assert queue.pop() is sequences[0]
    queue.charge(sequences[0], 100, 400)
    for order in range(10, 16):
        queue.push(sequence(order, "ba"[order % 2]))
    assert serve(queue, 6) == "bababa"


def test_an_abort_of_its_last_waiting_one_makes_a_tenant_idle() -> None:
    queue = FairShare().queue()
    sequences = flood(queue, "abbbbb")
    queue.remove(sequences[0])
    assert sequences[0] not in queue
    assert serve(queue, 3) == "bbb"
    for order in range(10, 13):
        queue.push(sequence(order, "a"))
    assert serve(queue, 4) == "baba", "lifted to 30: what it did not use is gone"


# ---- memory ----


def test_twenty_thousand_tenants_leave_nothing_behind_but_the_last_ones() -> None:
    queue = FairShare(max_idle=10).queue()
    queue.push(sequence(1, "first"))
    queue.push(sequence(0, "long waiting"))
    queue.charge(sequence(0, "long waiting"), 10**9, 0)
    for order in range(2, 20_000):
        queue.push(sequence(order, f"tenant {order}"))
        if order % 2:
            queue.charge(queue.pop(), 1, 1)
    while len(queue) > 1:
        queue.charge(queue.pop(), 1, 1)
    assert isinstance(queue, FairQueue)
    assert len(queue._idle) == 10
    assert list(queue._active) == ["long waiting"]
    assert len(queue._by_counter._entries) <= 2


def test_the_one_served_least_recently_is_forgotten() -> None:
    queue = FairShare(max_idle=2).queue()
    running = flood(queue, "abcxxxx")
    for s, cost in zip(running[:3], (50, 60, 70), strict=True):
        assert queue.pop() is s
        queue.charge(s, cost, 0)
    # c made the third: a is gone. Being served keeps b, so the next one drives out c
    queue.charge(running[1], 1, 0)
    aborted = sequence(10, "d")
    queue.push(aborted)
    queue.remove(aborted)
    for order, tenant in enumerate("bca", start=11):
        queue.push(sequence(order, tenant))
    assert serve(queue, 6, cost=30) == "xcaxxb", "of 50, 61 and 70, only b's 61 is known"


def test_a_charge_to_a_forgotten_tenant_begins_at_the_level() -> None:
    queue = FairShare(max_idle=1).queue()
    running = flood(queue, "abcc")
    assert [queue.pop() for _ in range(2)] == running[:2]
    queue.charge(running[2], 50, 0)
    queue.charge(running[0], 7, 0)  # forgotten when b became idle
    queue.push(sequence(10, "a"))
    queue.push(sequence(11, "d"))
    assert serve(queue, 3) == "cda", "50, 50 and 57"


# ---- against the algorithm as printed ----


@dataclass
class Printed:
    """Algorithm 2 of the paper, with nothing but a dict and a list."""

    counters: dict[str, int] = field(default_factory=dict)
    waiting: list[Sequence] = field(default_factory=list)
    began: dict[str, int] = field(default_factory=dict)  # when who waits began to
    last: str = ""
    clock: int = 0

    def tenants(self) -> set[str]:
        return {s.request.options.tenant for s in self.waiting}

    def push(self, pushed: Sequence) -> None:
        tenant = pushed.request.options.tenant
        counters, present = self.counters, self.tenants()
        if tenant not in present:
            if present:
                level = min(counters[name] for name in present)
            else:
                level = counters.get(self.last, 0)
            counters[tenant] = max(counters.get(tenant, 0), level)
            self.began[tenant] = self.clock = self.clock + 1
        self.waiting.append(pushed)

    def remove(self, removed: Sequence) -> None:
        self.waiting.remove(removed)
        if removed.request.options.tenant not in self.tenants():
            self.last = removed.request.options.tenant

    def peek(self) -> Sequence | None:
        if not self.waiting:
            return None
        tenant = min(self.tenants(), key=lambda name: (self.counters[name], self.began[name]))
        mine = [s for s in self.waiting if s.request.options.tenant == tenant]
        return min(mine, key=lambda s: s.order)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "start", "start", "charge", "preempt", "abort"]),
            st.integers(0, 5),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_it_is_the_printed_algorithm(operations: list[tuple[str, int, int]]) -> None:
    queue, model = FairShare().queue(), Printed()
    running: list[Sequence] = []
    for order, (operation, number, tokens) in enumerate(operations):
        if operation == "add":
            added = sequence(order, "abc"[number % 3])
            queue.push(added)
            model.push(added)
        elif operation == "start" and model.waiting:
            started = queue.pop()
            assert started is model.peek()
            model.remove(started)
            running.append(started)
        elif operation == "charge" and running:
            served = running[number % len(running)]
            queue.charge(served, tokens, number)
            model.counters[served.request.options.tenant] += tokens + 2 * number
        elif operation == "preempt" and running:
            preempted = running.pop(number % len(running))
            queue.push(preempted)
            model.push(preempted)
        elif operation == "abort" and model.waiting:
            aborted = model.waiting[number % len(model.waiting)]
            queue.remove(aborted)
            model.remove(aborted)
        assert queue.peek() is model.peek()
        assert len(queue) == len(model.waiting)
        assert {s.order for s in queue} == {s.order for s in model.waiting}
        assert all(s in queue for s in model.waiting)
        assert not any(s in queue for s in running)


# ---- the paper's bound ----

Size = tuple[int, int]  # prompt tokens, output tokens


def served_apart(
    policy: QueuePolicy, rows: int, sizes: dict[str, list[Size]], guest: Size, at_start: bool
) -> int:
    """A server with `rows` rows, one output token a row and step. The tenants of `sizes` always
    have something waiting, sizes in turn; guests of one request each come and go. By how much what
    "a" was served, less what "b" was, moved: at most twice the paper's U."""
    queue = policy.queue()
    served = dict.fromkeys([*sizes, "guest"], 0)
    left: dict[Sequence, int] = {}
    apart = [0]
    orders = iter(range(10**6))
    outputs: dict[int, int] = {}

    def add(tenant: str, size: Size) -> None:
        added = sequence(next(orders), tenant, size[0])
        outputs[added.order] = size[1]
        queue.push(added)

    def charge(s: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        queue.charge(s, prompt_tokens, output_tokens)
        served[s.request.options.tenant] += prompt_tokens + 2 * output_tokens
        apart.append(served["a"] - served["b"])

    turns = dict.fromkeys(sizes, 0)
    for tenant, mine in sizes.items():
        add(tenant, mine[0])
        add(tenant, mine[-1])
    for step in range(150):
        if step % 7 == 0:
            add("guest", guest)
        started: list[Sequence] = []
        while len(left) < rows:
            started.append(queue.pop())
            left[started[-1]] = outputs[started[-1].order]
            tenant = started[-1].request.options.tenant
            if tenant in sizes:
                turns[tenant] += 1
                add(tenant, sizes[tenant][turns[tenant] % len(sizes[tenant])])
            if at_start:
                charge(started[-1], started[-1].num_prompt, 0)
        for s in list(left):
            charge(s, s.num_prompt if s in started and not at_start else 0, 1)
            left[s] -= 1
            if not left[s]:
                del left[s]
    return max(apart) - min(apart)


LONGEST_PROMPT, LONGEST_OUTPUT = 40, 12
sizes = st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_OUTPUT))
turns = st.lists(sizes, min_size=1, max_size=4)


@given(rows=st.integers(1, 6), a=turns, b=turns, guest=sizes)
def test_two_backlogged_tenants_are_served_alike(
    rows: int, a: list[Size], b: list[Size], guest: Size
) -> None:
    """The paper's theorem 4.4, for prompts charged when they start and when they are committed."""
    outputs = 2 * rows * LONGEST_OUTPUT
    apart = served_apart(FairShare(), rows, {"a": a, "b": b}, guest, at_start=True)
    assert apart <= 2 * (LONGEST_PROMPT + outputs)
    apart = served_apart(FairShare(), rows, {"a": a, "b": b}, guest, at_start=False)
    assert apart <= 2 * (rows * LONGEST_PROMPT + outputs)


def test_first_come_first_served_breaks_that_bound() -> None:
    work: dict[str, list[Size]] = {"a": [(40, 12)], "b": [(1, 1)]}
    bound = 2 * (LONGEST_PROMPT + 2 * 2 * LONGEST_OUTPUT)
    assert served_apart(FairShare(), 2, work, (1, 1), at_start=True) <= bound
    assert served_apart(Fcfs(), 2, work, (1, 1), at_start=True) > 4 * bound


@pytest.mark.parametrize(("at_start", "tenants"), [(True, "abab"), (False, "aaaa")])
def test_free_slots_are_shared_in_one_round_if_prompts_are_charged_at_the_start(
    at_start: bool, tenants: str
) -> None:
    queue = FairShare().queue()
    flood(queue, "aaaabbbb")
    started = ""
    for _ in range(4):
        s = queue.pop()
        started += s.request.options.tenant
        if at_start:
            queue.charge(s, s.num_prompt, 0)
    assert started == tenants
