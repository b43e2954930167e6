"""The order of the waiting queue. A policy gives each sequence a sort key; the queue does the
rest."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

from scheduler.request import Sequence


class QueuePolicy(Protocol):
    """Smaller keys start first. A key must not change while its sequence waits."""

    def key(self, sequence: Sequence) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served. A preempted sequence keeps its arrival place."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.order,)


POLICIES: dict[str, QueuePolicy] = {"fcfs": Fcfs()}


class WaitingQueue:
    """A heap with lazy removal: every operation is O(log n), whatever waits."""

    def __init__(self, policy: QueuePolicy):
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], int, Sequence]] = []
        self._members: dict[int, Sequence] = {}  # by order

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.order in self._members

    def push(self, sequence: Sequence) -> None:
        assert sequence not in self
        self._members[sequence.order] = sequence
        heapq.heappush(self._heap, (self._policy.key(sequence), sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence.order]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None
        heapq.heappop(self._heap)
        del self._members[sequence.order]
        return sequence

    def __iter__(self):
        return iter(list(self._members.values()))
