"""PagePool: who holds which KV page. Knows page numbers and counts, not what is in them.

Page 0 is reserved (padding of block tables points at it), so a pool of `num_pages` hands out pages
1..num_pages and the device arrays have one page more.

A freed page may be taken again at once: the device runs steps in the order in which they were
submitted, each on the cache that the one before it returned, so a later owner's writes can't
overtake an earlier owner's reads.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

import numpy as np


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold num_tokens tokens, rounded up."""
    return -(-num_tokens // page_size)


class PagePool:
    """Reference-counted pages. A page without references is free, or cached while its content may
    still be hit; cached pages are evicted in the order in which they became so."""

    def __init__(self, num_pages: int, page_size: int):
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * (num_pages + 1)  # by page
        self._references[0] = 1  # reserved
        self._free: deque[int] = deque(range(1, num_pages + 1))
        # an ordered set; a dict would walk over all that was deleted before its first entry
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced pages whose content may still be hit."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def references(self, page: int) -> int:
        return self._references[page]

    def oldest_cached(self) -> int | None:
        """The page that take() would evict; None while there are free ones."""
        return None if self._free else next(iter(self._cached), None)

    def take(self) -> int:
        """One page, to be written by its taker: a free one, else the oldest cached one, whose
        content is lost. The caller has checked num_available."""
        if self._free:
            page = self._free.popleft()
        else:
            page = next(iter(self._cached))
            del self._cached[page]
        assert self._references[page] == 0
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more reference on a page that is held or cached."""
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def free(self, page: int, *, cached: bool = False) -> None:
        """Drop one reference; without any left the page can be taken again. cached: its content
        may be hit until then."""
        assert page != 0, "page 0 is nobody's"
        assert self._references[page] > 0, f"page {page} freed twice"
        self._references[page] -= 1
        if self._references[page] == 0:
            if cached:
                self._cached[page] = None
            else:
                self._free.append(page)

    def uncache(self) -> None:
        """No content may be hit any more."""
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self, owners: Iterable[Iterable[int]]) -> None:
        """Assert the ledger: references are exactly what the owners hold, and every page is
        accounted for."""
        expected = np.zeros(self.num_pages + 1, np.int64)
        expected[0] = 1
        for pages in owners:
            np.add.at(expected, np.asarray(list(pages), np.int64), 1)
        assert expected.tolist() == self._references, "page references differ from the owners'"
        unheld = [*self._free, *self._cached]
        assert len(set(unheld)) == len(unheld), "a page is twice in the free list"
        assert all(self._references[page] == 0 for page in unheld), "a held page is in a free list"
        assert self.num_free + self.num_cached + self.num_held == self.num_pages
        assert self.num_held == sum(count > 0 for count in self._references[1:])
