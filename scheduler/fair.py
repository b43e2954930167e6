"""Fair share of tokens between tenants: the virtual token counter (VTC; Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024, arXiv 2401.00588, algorithm 2)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.heap import Heap
from scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class FairShare:
    """The tenant that has been served least goes first; first come, first served within a tenant.

    Each tenant (`options.tenant`) has a counter of the tokens that it was served, weighted by what
    they cost. A tenant that has had nothing waiting comes back with its counter lifted to the
    smallest one of those that wait: idling earns no credit. Nobody preempts anybody.

    Bound: while two tenants both have something waiting, what they are served differs by at most
    2 * (input_weight * longest prompt + output_weight * output tokens of all rows together) if
    a prompt is charged when it starts, as in the paper. Charged later, when its tokens are
    committed, the prompts of all rows count in it, and the slots that are free in one round all go
    to one tenant.

    max_idle: how many tenants without waiting requests are remembered. Beyond it the one served
    least recently is forgotten, and with it what it was ahead of the others. Keep it above the
    number of rows, so that nobody is forgotten while running.
    """

    input_weight: int = 1
    output_weight: int = 2
    max_idle: int = 10_000

    def queue(self) -> FairQueue:
        return FairQueue(self)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    counter: int = 0  # weighted tokens; never falls
    rank: int = -1  # who began to wait first decides between equal counters
    waiting: Heap[Sequence] = field(default_factory=Heap[Sequence])


class FairQueue:
    """Every operation is O(log n) amortised: a charge outdates at most one entry in the heap of
    tenants, and is paid for when that entry comes up."""

    def __init__(self, share: FairShare):
        self._share = share
        self._active: dict[str, _Tenant] = {}  # something waits
        self._idle: OrderedDict[str, _Tenant] = OrderedDict()  # served least recently first
        self._by_counter: Heap[_Tenant] = Heap()  # active ones; keys may lag behind the counters
        self._last: _Tenant | None = None  # the last one that ceased to wait
        self._num_activations = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, sequence: Sequence) -> bool:
        tenant = self._active.get(sequence.request.options.tenant)
        return tenant is not None and sequence.order in tenant.waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter([s for tenant in self._active.values() for s in tenant.waiting])

    def push(self, sequence: Sequence) -> None:
        name = sequence.request.options.tenant
        tenant = self._active.get(name) or self._activate(name)
        tenant.waiting.push(0, sequence.order, sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = self._active[sequence.request.options.tenant]
        tenant.waiting.remove(sequence.order)
        self._left(tenant)

    def peek(self) -> Sequence | None:
        tenant = self._least_served()
        return tenant.waiting.peek() if tenant is not None else None

    def pop(self) -> Sequence:
        tenant = self._least_served()
        assert tenant is not None
        sequence = tenant.waiting.pop()
        self._left(tenant)
        return sequence

    def charge(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        """Count tokens that the sequence has been served, whether its tenant waits or not."""
        name = sequence.request.options.tenant
        tenant = self._active.get(name)
        if tenant is None:
            tenant = self._idle.pop(name, None) or _Tenant(name, self._level())
            self._rest(tenant)
        share = self._share
        tenant.counter += share.input_weight * prompt_tokens + share.output_weight * output_tokens

    def _least_served(self) -> _Tenant | None:
        heap = self._by_counter
        while (tenant := heap.peek()) is not None and heap.key(tenant.rank) != tenant.counter:
            heap.move(tenant.rank, tenant.counter)
        return tenant

    def _level(self) -> int:
        """What a returning tenant is lifted to. When nobody waits, the tenant that waited last
        stands for the others: what it was served since then took nothing from anybody."""
        tenant = self._least_served() or self._last
        return tenant.counter if tenant is not None else 0

    def _activate(self, name: str) -> _Tenant:
        tenant = self._idle.pop(name, None) or _Tenant(name)
        tenant.counter = max(tenant.counter, self._level())
        tenant.rank = self._num_activations
        self._num_activations += 1
        self._active[name] = tenant
        self._by_counter.push(tenant.counter, tenant.rank, tenant)
        return tenant

    def _left(self, tenant: _Tenant) -> None:
        self._num_waiting -= 1
        if not tenant.waiting:
            del self._active[tenant.name]
            self._by_counter.remove(tenant.rank)
            self._last = tenant
            self._rest(tenant)

    def _rest(self, tenant: _Tenant) -> None:
        self._idle[tenant.name] = tenant
        if len(self._idle) > self._share.max_idle:
            self._idle.popitem(last=False)
