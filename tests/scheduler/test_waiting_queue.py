import random

import numpy as np
import pytest

from scheduler.policy import POLICIES, Fcfs, WaitingQueue
from scheduler.request import Request, SamplingParams, Sequence


def sequence(order: int) -> Sequence:
    request = Request(str(order), np.ones(1, np.int32), SamplingParams(), 16, arrival=0.0)
    return Sequence(request, [1], order=order)


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().order for _ in range(len(queue))]


def test_first_come_first_served_whatever_the_order_of_pushes() -> None:
    queue = WaitingQueue(Fcfs())
    for order in (3, 1, 4, 0, 2):
        queue.push(sequence(order))
    assert len(queue) == 5
    assert [s.order for s in queue] == [3, 1, 4, 0, 2]
    head = queue.peek()
    assert head is not None
    assert head.order == 0
    assert drain(queue) == [0, 1, 2, 3, 4]
    assert not queue
    assert queue.peek() is None


def test_a_preempted_sequence_comes_back_to_its_place() -> None:
    queue = WaitingQueue(Fcfs())
    sequences = [sequence(order) for order in range(4)]
    for s in sequences:
        queue.push(s)
    first, second = queue.pop(), queue.pop()
    queue.push(second)
    queue.push(first)
    assert drain(queue) == [0, 1, 2, 3]


def test_the_policy_decides() -> None:
    class Shortest:
        def key(self, sequence: Sequence) -> tuple[float, ...]:
            return (len(sequence.tokens),)

    queue = WaitingQueue(Shortest())
    for order, length in enumerate((5, 2, 5, 1)):
        waiting = sequence(order)
        waiting.tokens = [1] * length
        queue.push(waiting)
    assert drain(queue) == [3, 1, 0, 2], "equal keys go by arrival"


def test_policies_have_names() -> None:
    assert {"fcfs": Fcfs()} == POLICIES


def test_removal() -> None:
    queue = WaitingQueue(Fcfs())
    sequences = [sequence(order) for order in range(4)]
    for s in sequences:
        queue.push(s)
    queue.remove(sequences[0])
    queue.remove(sequences[2])
    assert sequences[0] not in queue
    assert sequences[1] in queue
    assert len(queue) == 2
    assert [s.order for s in queue] == [1, 3]
    assert drain(queue) == [1, 3]


def test_it_holds_a_sequence_once() -> None:
    queue = WaitingQueue(Fcfs())
    waiting = sequence(0)
    queue.push(waiting)
    with pytest.raises(AssertionError):
        queue.push(waiting)
    queue.remove(waiting)
    with pytest.raises(KeyError):
        queue.remove(waiting)
    with pytest.raises(AssertionError):
        queue.pop()


def test_ten_thousand_with_removals() -> None:
    queue = WaitingQueue(Fcfs())
    sequences = [sequence(order) for order in range(10_000)]
    shuffled = sequences.copy()
    random.Random(0).shuffle(shuffled)
    for s in shuffled:
        queue.push(s)
    for s in shuffled[:9_000]:
        queue.remove(s)
    assert len(queue) == 1_000
    assert len(queue._heap) <= 2 * 1_000 + 64, "removed entries are not kept for ever"
    assert drain(queue) == sorted(s.order for s in shuffled[9_000:])
