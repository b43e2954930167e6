"""PagePool: who holds which KV page. Knows page numbers and counts, not what is in them.

Page 0 is reserved (padding of block tables points at it), so a pool of `num_pages` hands out pages
1..num_pages and the device arrays have one page more.

A freed page may be taken again at once: the device runs steps in the order in which they were
submitted, each on the cache that the one before it returned, so a later owner's writes can't
overtake an earlier owner's reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold num_tokens tokens, rounded up."""
    return -(-num_tokens // page_size)


class PagePool:
    """Reference-counted pages with a free list in eviction order (longest free first)."""

    def __init__(self, num_pages: int, page_size: int):
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = np.zeros(num_pages + 1, np.int32)  # int32[pages]
        self._references[0] = 1  # reserved
        self._free: deque[int] = deque(range(1, num_pages + 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced pages whose content may still be hit."""
        return 0

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    def take(self) -> int:
        """One page, to be written by its taker. The caller has checked num_free."""
        page = self._free.popleft()
        assert self._references[page] == 0
        self._references[page] = 1
        return page

    def free(self, pages: Iterable[int]) -> None:
        """Drop one reference on each page; those without any left can be taken again."""
        for page in pages:
            assert page != 0, "page 0 is nobody's"
            assert self._references[page] > 0, f"page {page} freed twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check(self, owners: Iterable[Iterable[int]]) -> None:
        """Assert the ledger: references are exactly what the owners hold, and every page is
        accounted for."""
        expected = np.zeros_like(self._references)
        expected[0] = 1
        for pages in owners:
            for page in pages:
                expected[page] += 1
        assert np.array_equal(expected, self._references), "page references differ from the owners'"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert all(self._references[page] == 0 for page in free), "a held page is in the free list"
        assert self.num_free + self.num_cached + self.num_held == self.num_pages
        assert self.num_held == int((self._references[1:] > 0).sum())
