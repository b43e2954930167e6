"""Heap: a priority queue from which anything can be removed. Knows keys and ranks, not what it
holds."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Heap[T]:
    """Items by (key, rank), smallest first. A rank names an item and decides between equal keys.

    Removal is lazy: a dead entry stays until it comes up, or until the dead outnumber the live and
    the heap is rebuilt. So push, remove, move and pop cost O(log n) amortised, and memory stays
    O(n) of what is in it.
    """

    __slots__ = ("_entries", "_live")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, T]] = []  # a heap of (key, rank, item)
        self._live: dict[int, tuple[float, int, T]] = {}  # by rank

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, rank: int) -> bool:
        return rank in self._live

    def __iter__(self) -> Iterator[T]:
        """What is in it now, in the order of the pushes; it may change meanwhile."""
        return iter([item for _, _, item in self._live.values()])

    def push(self, key: float, rank: int, item: T) -> None:
        assert rank not in self._live
        entry = self._live[rank] = (key, rank, item)
        heapq.heappush(self._entries, entry)

    def remove(self, rank: int) -> T:
        item = self._live.pop(rank)[2]
        self._sweep()
        return item

    def move(self, rank: int, key: float) -> None:
        """Give an item another key."""
        self.push(key, rank, self.remove(rank))

    def key(self, rank: int) -> float:
        return self._live[rank][0]

    def peek(self) -> T | None:
        entries, live = self._entries, self._live
        while entries and live.get(entries[0][1]) is not entries[0]:
            heapq.heappop(entries)
        return entries[0][2] if entries else None

    def pop(self) -> T:
        item = self.peek()
        assert item is not None
        del self._live[heapq.heappop(self._entries)[1]]
        self._sweep()
        return item

    def _sweep(self) -> None:
        if len(self._entries) > 2 * len(self._live):
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)
