import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.heap import Heap

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "pop", "remove", "move"]), st.integers(0, 9))
)


@given(OPERATIONS)
def test_it_is_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    heap: Heap[str] = Heap()
    model: dict[int, int] = {}  # rank -> key
    for count, (operation, number) in enumerate(operations):
        ordered = sorted(model, key=lambda rank: (model[rank], rank))
        if operation == "push":
            rank = (count * 7919) % 10_007  # not in the order of the pushes
            heap.push(number, rank, str(rank))
            model[rank] = number
        elif ordered and operation == "pop":
            assert heap.pop() == str(ordered[0])
            del model[ordered[0]]
        elif ordered and operation == "remove":
            rank = ordered[number % len(ordered)]
            assert heap.remove(rank) == str(rank)
            del model[rank]
        elif ordered:
            rank = ordered[number % len(ordered)]
            heap.move(rank, 9 - model[rank])
            model[rank] = 9 - model[rank]
        assert len(heap) == len(model)
        assert sorted(heap) == sorted(str(rank) for rank in model)
        assert all(rank in heap and heap.key(rank) == key for rank, key in model.items())
        assert len(heap._entries) <= 2 * len(model), "what is removed is not kept"
        first = min(model, key=lambda rank: (model[rank], rank), default=None)
        assert heap.peek() == (None if first is None else str(first))
    assert [heap.pop() for _ in range(len(heap))] == [
        str(rank) for rank in sorted(model, key=lambda rank: (model[rank], rank))
    ]


def test_a_rank_that_comes_back_has_its_new_key_only() -> None:
    heap: Heap[str] = Heap()
    for rank, key in enumerate([5, 1, 3, 4]):
        heap.push(key, rank, "abcd"[rank])
    heap.remove(1)
    heap.push(6, 1, "b")
    assert [heap.pop() for _ in range(4)] == ["c", "d", "a", "b"]


def test_a_rank_is_there_once() -> None:
    heap: Heap[str] = Heap()
    heap.push(0, 7, "a")
    with pytest.raises(AssertionError):
        heap.push(1, 7, "a")
    heap.remove(7)
    with pytest.raises(KeyError):
        heap.remove(7)
    with pytest.raises(AssertionError):
        heap.pop()


def test_what_is_popped_or_removed_is_let_go() -> None:
    heap: Heap[int] = Heap()
    ranks = list(range(1000))
    random.Random(0).shuffle(ranks)
    for rank in ranks:
        heap.push(rank, rank, rank)
    for rank in range(500, 1000):
        heap.remove(rank)
    assert [heap.pop() for _ in range(500)] == list(range(500))
    assert heap._entries == []
