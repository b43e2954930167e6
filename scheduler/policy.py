"""The order of the waiting queue, and who may take a running row's place. A policy is a value; it
makes the queue that keeps its order. Knows nothing of pages, slots or time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from scheduler.fair import FairShare
from scheduler.heap import Heap
from scheduler.lengths import LengthModel
from scheduler.request import Sequence


class WaitingQueue(Protocol):
    """Sequences that wait, each once. Any may be removed; `peek` names the one that `pop` takes.

    A preempted sequence is pushed again. Within its class (priority, tenant) it comes back to its
    arrival place, because `Sequence.order` decides there.
    """

    def __len__(self) -> int: ...
    def __contains__(self, sequence: Sequence) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait now, in no order that matters; the queue may change meanwhile."""
        ...

    def push(self, sequence: Sequence) -> None: ...
    def remove(self, sequence: Sequence) -> None: ...
    def peek(self) -> Sequence | None: ...
    def pop(self) -> Sequence: ...

    def charge(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        """Tokens that the sequence has been served. A token is charged once, when it is served for
        the first time: not when preemption makes a prompt or an output be computed again."""
        ...


class QueuePolicy(Protocol):
    def queue(self) -> WaitingQueue:
        """A fresh queue in this order."""
        ...

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """May `waiting` preempt `running`? Never both ways, so two rows can't push each other out
        for ever (vllm#40004)."""
        ...


class KeyedQueue:
    """Smallest key first, equal keys by arrival. The key is taken when a sequence is pushed, and
    stays while it waits. Every operation is O(log n), whatever waits."""

    def __init__(self, key: Callable[[Sequence], float]):
        self._key = key
        self._heap: Heap[Sequence] = Heap()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.order in self._heap

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._heap)

    def push(self, sequence: Sequence) -> None:
        self._heap.push(self._key(sequence), sequence.order, sequence)

    def remove(self, sequence: Sequence) -> None:
        self._heap.remove(sequence.order)

    def peek(self) -> Sequence | None:
        return self._heap.peek()

    def pop(self) -> Sequence:
        return self._heap.pop()

    def charge(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        """No order here depends on what was served."""


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served."""

    def queue(self) -> WaitingQueue:
        return KeyedQueue(lambda sequence: 0)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Priority:
    """Lower `options.priority` first, then arrival. A waiting sequence preempts only rows of
    strictly lower importance. Nothing ages: under a steady load of important requests the others
    wait until their deadlines."""

    def queue(self) -> WaitingQueue:
        return KeyedQueue(lambda sequence: sequence.request.options.priority)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.request.options.priority < running.request.options.priority


@dataclass(frozen=True, slots=True)
class ShortestPredicted:
    """Least predicted work first, in tokens: those still to compute and those still to come.

    `ageing`, in tokens a second, keeps long requests from starving. Each second of waiting is
    worth that many tokens, so the order at any moment is that of `work + ageing * arrival`, which
    does not change while a sequence waits. A request of W tokens can be overtaken only by requests
    that arrive less than W / ageing seconds after it; from then on it is ahead of every newcomer,
    and waits at most for what is ahead of it by then.
    """

    lengths: LengthModel
    ageing: float = 100.0  # tokens a second

    def __post_init__(self) -> None:
        assert self.ageing > 0, "without ageing, long requests starve"

    def queue(self) -> WaitingQueue:
        return KeyedQueue(self._key)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False

    def _key(self, sequence: Sequence) -> float:
        request, lengths = sequence.request, self.lengths
        to_come = lengths.expected(
            lengths.profile(request), sequence.num_output, request.max_tokens
        )
        work = sequence.num_tokens - sequence.num_computed + to_come
        return work + self.ageing * request.arrival


POLICIES: dict[str, Callable[[LengthModel], QueuePolicy]] = {
    "fcfs": lambda lengths: Fcfs(),
    "priority": lambda lengths: Priority(),
    "shortest": ShortestPredicted,
    "fair": lambda lengths: FairShare(),
}
