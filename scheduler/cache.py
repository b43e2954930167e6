"""KVCache: the device's pages, the names of their content, and the host's copies, as one thing.

A sequence that starts gets what is still there of its tokens: pages of the device are shared,
pages of the host copied back. Preemption needs no state of its own: the pages of a preempted
sequence stay where they are until somebody takes them, and go to the host then if it has claimed
room there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.pages import PagePool
from scheduler.preemption import PreemptionCosts
from scheduler.prefix import PrefixIndex, extend_chain, root_hash
from scheduler.request import Sequence
from scheduler.tiers import NO_COPIES, HostTier, PageCopies


@dataclass(frozen=True, slots=True)
class Match:
    """The leading pages of a sequence that need not be computed: of each its page on the device, or
    else its name, for the host has it."""

    pages: tuple[int | bytes, ...]
    num_device: int
    num_idle: int  # of those on the device, the ones that nobody holds: sharing makes them held

    @property
    def num_host(self) -> int:
        return len(self.pages) - self.num_device


class KVCache:
    def __init__(self, config: SchedulerConfig, costs: PreemptionCosts):
        self.pool = PagePool(config.num_pages, config.page_size)
        self.index = PrefixIndex()
        self.host = HostTier(config.num_host_pages)
        self.costs = costs
        self._page_size = config.page_size
        self._share = config.prefix_cache
        self._out: list[tuple[int, int]] = []
        self._back: list[tuple[int, int]] = []

    @property
    def num_available(self) -> int:
        return self.pool.num_available

    def enter(self, sequence: Sequence) -> None:
        """Before anything else: with whom may it share?"""
        request = sequence.request
        # without sharing a sequence meets its own pages only
        salt = f"salt:{request.options.cache_salt}" if self._share else f"id:{request.request_id}"
        sequence.hashes = [root_hash(salt)]

    def match(self, sequence: Sequence) -> Match:
        """What is there of a waiting sequence's tokens, all but the last, which must be computed
        for there to be a next one."""
        found: list[int | bytes] = []
        num_device = num_idle = 0
        for place in range((len(sequence.tokens) - 1) // self._page_size):
            name = extend_chain(sequence, place + 1, self._page_size)[place + 1]
            page = self.index.find(name)
            if page is not None:
                found.append(page)
                num_device += 1
                num_idle += self.pool.references(page) == 0
            elif self.host.find(name) is not None:
                found.append(name)
            else:
                break
        return Match(tuple(found), num_device, num_idle)

    def start(self, sequence: Sequence, match: Match) -> list[int]:
        """Hold the matched pages for a sequence; returns them in order. The caller has checked
        that there is room for those to be copied back."""
        for page in match.pages:  # first, so that none of them is evicted for another
            if isinstance(page, int):
                self.pool.share(page)
                self.index.mark_hit(page)
        # where they lie, before any eviction below moves something into their place
        hosts = {name: self.host.find(name) for name in match.pages if isinstance(name, bytes)}
        pages: list[int] = []
        for page in match.pages:
            if isinstance(page, bytes):
                host = hosts[page]
                assert host is not None
                page = self.take()
                self._back.append((host, page))
            pages.append(page)
        for name in hosts:
            if self.host.find(name) is not None:
                self.host.touch(name)
        self.drop_claims(sequence)
        return pages

    def take(self) -> int:
        """One page to be written. What it held goes to the host if that is worth it."""
        evicted = self.pool.oldest_cached()
        if evicted is not None:
            name, was_hit = self.index.remove(evicted)
            # what nobody has ever asked for again is not worth the copy
            kept = was_hit and self._share and self.costs.prefers_swap(1, self._page_size)
            if self.host.num_pages and (kept or self.host.is_claimed(name)):
                host = self.host.put(name)
                if host is not None:
                    self._out.append((evicted, host))
        return self.pool.take()

    def learn(self, sequence: Sequence, num_computed: int) -> None:
        """A step has finished that brought the sequence to num_computed tokens: its full pages can
        be shared."""
        full = num_computed // self._page_size
        hashes = extend_chain(sequence, full, self._page_size)
        for place in range(sequence.num_learnt, full):
            self.index.add(hashes[place + 1], sequence.pages[place])
        sequence.num_learnt = max(sequence.num_learnt, full)

    def free(self, sequence: Sequence, *, ended: bool) -> None:
        """Drop a sequence's pages. The end of a chain is evicted before its beginning."""
        keep = self._share or not ended  # nobody else could ever hit them
        for page in reversed(sequence.pages):
            known = page in self.index
            if known and not keep and self.pool.references(page) == 1:
                self.index.remove(page)
                known = False
            self.pool.free(page, cached=known)
        sequence.pages = []
        sequence.num_learnt = 0

    def claim(self, sequence: Sequence) -> bool:
        """Before a running sequence is preempted: is it cheaper to copy its pages out and back
        than to compute them again, and has the host room? Then they will be there."""
        private = [
            name
            for name, page in zip(sequence.hashes[1:], sequence.pages, strict=False)
            if page in self.index and self.pool.references(page) == 1
        ]
        if not private or not self.costs.prefers_swap(len(private), self._page_size):
            return False
        if not self.host.claim(private):
            return False
        sequence.claims = private
        return True

    def drop_claims(self, sequence: Sequence) -> None:
        self.host.release(sequence.claims)
        sequence.claims = []

    def copies(self) -> PageCopies:
        """What the step that is being planned has to copy first."""
        self.host.planned()
        if not self._out and not self._back:
            return NO_COPIES
        copies = PageCopies(tuple(self._out), tuple(self._back))
        self._out, self._back = [], []
        return copies

    def clear(self) -> None:
        """The device's content is lost, and copies may not have happened."""
        self.index.clear()
        self.pool.uncache()
        self.host.clear()
        self._out, self._back = [], []

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Assert the ledgers of both tiers, and that cached pages are those with a name."""
        running, waiting = list(running), list(waiting)
        self.pool.check(sequence.pages for sequence in running)
        self.host.check(name for sequence in waiting for name in sequence.claims)
        assert not any(sequence.claims for sequence in running)
        idle = [page for _, page in self.index.items() if self.pool.references(page) == 0]
        assert len(idle) == self.pool.num_cached, "a cached page has no name"
