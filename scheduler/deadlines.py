"""Deadlines: which requests have run out of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from scheduler.request import Sequence


class Deadlines:
    """A heap of deadlines. `live`: the sequences that have not ended, by request id."""

    def __init__(self, live: Mapping[str, Sequence]):
        self._live = live
        self._heap: list[tuple[float, int, str]] = []  # (engine's clock, order, request id)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        deadline = sequence.request.deadline
        if deadline is None:
            return
        heapq.heappush(self._heap, (deadline, sequence.order, sequence.request.request_id))
        if len(self._heap) > 2 * len(self._live) + 64:  # most have ended before theirs
            self._heap = [entry for entry in self._heap if self._find(entry) is not None]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> Iterator[Sequence]:
        """Those whose deadline has passed; each is given once."""
        while self._heap and self._heap[0][0] <= now:
            sequence = self._find(heapq.heappop(self._heap))
            if sequence is not None:
                yield sequence

    def _find(self, entry: tuple[float, int, str]) -> Sequence | None:
        """None if it has ended, even if its name is in use again."""
        sequence = self._live.get(entry[2])
        return sequence if sequence is not None and sequence.order == entry[1] else None
