from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.fair import FairShare
from scheduler.lengths import Oracle
from scheduler.policy import POLICIES, Fcfs, Priority, QueuePolicy, ShortestPredicted, WaitingQueue
from scheduler.request import Request, RequestOptions, SamplingParams, Sequence


def sequence(
    order: int,
    *,
    prompt: int = 1,
    output: int = 0,
    arrival: float = 0.0,
    priority: int = 0,
    tenant: str = "",
) -> Sequence:
    """With `output` tokens made, none of them computed: as after a preemption."""
    request = Request(
        str(order),
        np.ones(prompt, np.int32),
        SamplingParams(),
        max_tokens=1000,
        arrival=arrival,
        options=RequestOptions(priority=priority, tenant=tenant),
    )
    return Sequence(request, [1] * (prompt + output), order=order)


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().order for _ in range(len(queue))]


def known(lengths: dict[str, int] | None = None) -> Oracle:
    """Knows these output lengths, by request id; the others make no token."""
    return Oracle(defaultdict(int, lengths or {}))


@pytest.fixture(params=["fcfs", "priority", "shortest", "fair"])
def policy(request: pytest.FixtureRequest) -> QueuePolicy:
    return POLICIES[request.param](known())


# ---- what every policy's queue does ----


def test_policies_have_names() -> None:
    model = known()
    made = {name: factory(model) for name, factory in POLICIES.items()}
    assert made == {
        "fcfs": Fcfs(),
        "priority": Priority(),
        "shortest": ShortestPredicted(model),
        "fair": FairShare(),
    }


def test_equals_go_by_arrival_whatever_the_order_of_pushes(policy: QueuePolicy) -> None:
    queue = policy.queue()
    assert queue.peek() is None
    for order in (3, 1, 4, 0, 2):
        queue.push(sequence(order))
    assert len(queue) == 5
    assert sorted(s.order for s in queue) == [0, 1, 2, 3, 4]
    head = queue.peek()
    assert head is not None
    assert head.order == 0
    assert drain(queue) == [0, 1, 2, 3, 4]
    assert len(queue) == 0
    assert queue.peek() is None


def test_queues_share_nothing(policy: QueuePolicy) -> None:
    first, second = policy.queue(), policy.queue()
    first.push(sequence(0))
    assert len(second) == 0


def test_a_preempted_sequence_comes_back_to_its_place(policy: QueuePolicy) -> None:
    queue = policy.queue()
    for order in range(4):
        queue.push(sequence(order))
    first, second = queue.pop(), queue.pop()
    queue.push(second)
    queue.push(first)
    assert drain(queue) == [0, 1, 2, 3]


def test_removal(policy: QueuePolicy) -> None:
    queue = policy.queue()
    sequences = [sequence(order) for order in range(4)]
    for s in sequences:
        queue.push(s)
    queue.remove(sequences[0])
    queue.remove(sequences[2])
    assert [s in queue for s in sequences] == [False, True, False, True]
    assert len(queue) == 2
    assert [s.order for s in queue] == [1, 3]
    assert drain(queue) == [1, 3]


def test_a_sequence_waits_once(policy: QueuePolicy) -> None:
    queue = policy.queue()
    waiting = sequence(0)
    queue.push(waiting)
    with pytest.raises(AssertionError):
        queue.push(waiting)
    queue.remove(waiting)
    with pytest.raises(KeyError):
        queue.remove(waiting)
    with pytest.raises(AssertionError):
        queue.pop()


def test_the_queue_may_change_while_it_is_read(policy: QueuePolicy) -> None:
    queue = policy.queue()
    for order in range(4):
        queue.push(sequence(order, tenant=str(order % 2)))
    for waiting in queue:
        queue.remove(waiting)
    assert len(queue) == 0


@given(
    name=st.sampled_from(["fcfs", "priority", "shortest"]),
    pushed=st.permutations(range(12)),
    facts=st.lists(
        st.tuples(st.integers(-2, 2), st.integers(1, 4), st.integers(0, 3)),
        min_size=12,
        max_size=12,
    ),
    removed=st.sets(st.integers(0, 11)),
)
def test_what_is_left_after_removals_comes_out_sorted(
    name: str, pushed: list[int], facts: list[tuple[int, int, int]], removed: set[int]
) -> None:
    keys: dict[str, Callable[[int], tuple[float, int]]] = {
        "fcfs": lambda order: (0, order),
        "priority": lambda order: (facts[order][0], order),
        "shortest": lambda order: (facts[order][1] + 100 * facts[order][2], order),
    }
    queue = POLICIES[name](known()).queue()
    sequences = [
        sequence(order, priority=priority, prompt=prompt, arrival=arrival)
        for order, (priority, prompt, arrival) in enumerate(facts)
    ]
    for order in pushed:
        queue.push(sequences[order])
    for order in removed:
        queue.remove(sequences[order])
    assert drain(queue) == sorted(set(range(12)) - removed, key=keys[name])


@pytest.mark.parametrize("name", ["fcfs", "shortest", "fair"])
def test_only_priority_preempts(name: str) -> None:
    policy = POLICIES[name](known())
    urgent, idle = sequence(1, priority=-5, tenant="a"), sequence(0, priority=5, prompt=9)
    assert not policy.outranks(urgent, idle)
    assert not policy.outranks(idle, urgent)


# ---- priority ----


def test_lower_values_go_first_and_equal_ones_by_arrival() -> None:
    queue = Priority().queue()
    for order, priority in enumerate([0, 5, -1, 0, -1]):
        queue.push(sequence(order, priority=priority))
    assert drain(queue) == [2, 4, 0, 3, 1]


def test_equal_priority_never_preempts() -> None:
    """vllm#40004: equal priorities pushed each other out in turns."""
    policy = Priority()
    old, young, urgent = sequence(0), sequence(1), sequence(2, priority=-1)
    assert policy.outranks(urgent, old)
    assert policy.outranks(urgent, young)
    assert not policy.outranks(old, urgent)
    assert not policy.outranks(old, young)
    assert not policy.outranks(young, old)


def test_a_preempted_sequence_keeps_its_arrival_place_in_its_priority() -> None:
    queue = Priority().queue()
    sequences = [sequence(order, priority=order % 2) for order in range(6)]
    for s in sequences:
        queue.push(s)
    assert [queue.pop().order for _ in range(4)] == [0, 2, 4, 1]
    queue.push(sequences[1])
    queue.push(sequences[2])
    assert drain(queue) == [2, 1, 3, 5]


# ---- shortest predicted first ----


def test_less_predicted_work_goes_first() -> None:
    model = known({"0": 30, "1": 5, "2": 20, "3": 5})
    queue = ShortestPredicted(model).queue()
    for order, prompt in enumerate((10, 40, 15, 1)):
        queue.push(sequence(order, prompt=prompt))
    assert drain(queue) == [3, 2, 0, 1], "work 40, 45, 35, 6"


def test_a_preempted_sequence_counts_what_is_left_to_do() -> None:
    queue = ShortestPredicted(known({"0": 35, "1": 30, "2": 30})).queue()
    queue.push(sequence(0, prompt=10))
    recomputed = sequence(1, prompt=10, output=29)
    queue.push(recomputed)  # 39 tokens again, and one more
    swapped = sequence(2, prompt=10, output=29)
    swapped.num_computed = 38
    queue.push(swapped)  # one token, and one more
    assert drain(queue) == [2, 1, 0], "work 45, 40, 2"


def test_the_prediction_is_taken_when_it_is_pushed() -> None:
    lengths = {"0": 30, "1": 20}
    queue = ShortestPredicted(Oracle(lengths)).queue()
    queue.push(sequence(0))
    queue.push(sequence(1))
    lengths["0"] = 1
    assert drain(queue) == [1, 0]


def test_a_second_of_waiting_is_worth_as_many_tokens_as_ageing_says() -> None:
    queue = ShortestPredicted(known(), ageing=10.0).queue()
    queue.push(sequence(0, prompt=50, arrival=100.0))
    queue.push(sequence(1, prompt=19, arrival=103.0))  # 31 less, and 3 s younger
    queue.push(sequence(2, prompt=21, arrival=103.0))  # 29 less
    queue.push(sequence(3, prompt=20, arrival=103.0))  # 30 less: equal, arrival decides
    assert drain(queue) == [1, 0, 3, 2]


def test_ageing_is_not_optional() -> None:
    with pytest.raises(AssertionError):
        ShortestPredicted(known(), ageing=0.0)


def test_endless_short_requests_do_not_starve_a_long_one() -> None:
    """One starts each 0.1 s and one arrives each 0.1 s: without ageing the long one never runs."""
    queue = ShortestPredicted(known(), ageing=10.0).queue()
    long = sequence(0, prompt=200)
    queue.push(long)
    for order in range(1, 1000):
        queue.push(sequence(order, prompt=1, arrival=order / 10))
        if queue.pop() is long:
            assert order == 199, "who arrives after 19.9 s has lost what it is shorter by"
            return
    raise AssertionError("starved")


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 50), st.booleans()), max_size=40),
    st.sampled_from([1.0, 10.0, 100.0]),
)
def test_nobody_is_overtaken_by_who_arrives_later_than_its_work_allows(
    events: list[tuple[float, int, bool]], ageing: float
) -> None:
    queue = ShortestPredicted(known(), ageing).queue()
    now = 0.0
    for order, (gap, prompt, start) in enumerate(events):
        now += gap
        queue.push(sequence(order, prompt=prompt, arrival=now))
        if start:
            first = queue.pop()
            for other in queue:
                behind = first.request.arrival - other.request.arrival
                assert behind <= other.num_prompt / ageing + 1e-9


# ---- size ----


@pytest.mark.parametrize("name", ["fcfs", "priority", "shortest", "fair"])
def test_ten_thousand_with_removals(name: str) -> None:
    queue = POLICIES[name](known()).queue()
    sequences = [sequence(order) for order in range(10_000)]
    shuffled = sequences.copy()
    random.Random(0).shuffle(shuffled)
    for s in shuffled:
        queue.push(s)
    for s in shuffled[:9_000]:
        queue.remove(s)
    assert len(queue) == 1_000
    assert drain(queue) == sorted(s.order for s in shuffled[9_000:])
