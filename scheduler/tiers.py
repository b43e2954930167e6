"""HostTier: which KV pages have a copy in host memory. Decides what is kept; the runner copies.

A page that the device pool evicts may go on living here under its name (see scheduler.prefix), and
come back when a sequence needs it: so a preempted sequence returns without computing its tokens
again, and a prefix outlives the device's memory. Pages that preempted sequences will want are
claimed; unclaimed ones make room for them, longest unused first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class PageCopies(NamedTuple):
    """What the runner copies before a step, in this order: every `back` reads its host page, every
    `out` its device page; then `out` writes the host, `back` the device.

    So a host page may be read and overwritten by one step, and a device page as well.
    """

    out: tuple[tuple[int, int], ...] = ()  # (device page, host page)
    back: tuple[tuple[int, int], ...] = ()  # (host page, device page)


NO_COPIES = PageCopies()


class HostTier:
    """num_pages pages of host memory, 0..num_pages-1; none: everything is refused."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        # unclaimed pages by name, longest unused first
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        self._claimed: dict[bytes, int] = {}
        self._writing: dict[bytes, int] = {}  # copies of the step that is being planned
        self._claims: Counter[bytes] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages that claims or copies keep here."""
        return len(self._claimed) + len(self._writing)

    def find(self, name: bytes) -> int | None:
        """The host page, from the step after the one that writes it."""
        page = self._cached.get(name)
        return self._claimed.get(name) if page is None else page

    def touch(self, name: bytes) -> None:
        """It was used: others go first now."""
        if name in self._cached:
            self._cached.move_to_end(name)

    def claim(self, names: Iterable[bytes]) -> bool:
        """Promise room for these pages until `release`. All or none: False if it is too little."""
        names = list(names)
        fresh = sum(1 for name in names if name not in self._claims)
        if len(self._claims) + fresh > self.num_pages:
            return False
        self._claims.update(names)
        for name in names:
            if name in self._cached:
                self._claimed[name] = self._cached.pop(name)
        return True

    def release(self, names: Iterable[bytes]) -> None:
        """Claims end; the pages stay until something else needs the room."""
        for name in names:
            self._claims[name] -= 1
            if self._claims[name] == 0:
                del self._claims[name]
                if name in self._claimed:
                    self._cached[name] = self._claimed.pop(name)

    def is_claimed(self, name: bytes) -> bool:
        return name in self._claims

    def put(self, name: bytes) -> int | None:
        """A host page to copy the device page `name` to. None: it is here already, or there is no
        room."""
        if name in self._writing or self.find(name) is not None:
            return None
        if not self._free:
            oldest = next(iter(self._cached), None)
            if oldest is None:
                return None
            self._free.append(self._cached.pop(oldest))
        page = self._writing[name] = self._free.pop()
        return page

    def planned(self) -> None:
        """The copies go to the runner with this step: later ones can read the pages."""
        for name, page in self._writing.items():
            (self._claimed if name in self._claims else self._cached)[name] = page
        self._writing.clear()

    def clear(self) -> None:
        """The content can't be trusted any more. Claims go as well."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        for names in (self._cached, self._claimed, self._writing, self._claims):
            names.clear()

    def check(self, claims: Iterable[bytes]) -> None:
        """Assert the ledger; claims: all that waiting sequences have made."""
        assert Counter(claims) == self._claims, "claims differ from the sequences'"
        assert len(self._claims) <= self.num_pages
        tiers = (self._cached, self._claimed, self._writing)
        used = [*self._free, *(page for pages in tiers for page in pages.values())]
        assert sorted(used) == list(range(self.num_pages)), "a host page is lost or used twice"
        assert len({name for pages in tiers for name in pages}) == sum(map(len, tiers))
        assert self._claimed.keys() <= self._claims.keys()
        assert not self._cached.keys() & self._claims.keys()
