"""PrefixIndex: which page holds which tokens, so that equal prompt prefixes share their pages.

A full page is named by a hash of its tokens and of all tokens before it (chained, so that equal
names mean equal prefixes; vLLM and nano-vllm do alike). BLAKE2b of 128 bits: a tenant can't make a
collision, so no tokens need to be compared.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from scheduler.request import Sequence

_DIGEST = 16  # bytes


def root_hash(salt: str) -> bytes:
    """What a chain starts from: chains of different salts never meet."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()


def extend_chain(sequence: Sequence, num_pages: int, page_size: int) -> list[bytes]:
    """The sequence's hashes, at least those of its first num_pages pages, whose tokens the host
    knows."""
    hashes = sequence.hashes
    for page in range(len(hashes) - 1, num_pages):
        tokens = array("i", sequence.tokens[page * page_size : (page + 1) * page_size])
        assert len(tokens) == page_size, "only full pages of known tokens have a name"
        hashes.append(blake2b(hashes[-1] + tokens.tobytes(), digest_size=_DIGEST).digest())
    return hashes


class PrefixIndex:
    """Both ways between names and pages. A page has at most one name, a name at most one page."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._hit: set[int] = set()  # pages that somebody has found here

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._name_of

    def find(self, name: bytes) -> int | None:
        return self._page_of.get(name)

    def add(self, name: bytes, page: int) -> None:
        """A page that was written in full. If the name is taken, the first page keeps it."""
        if name not in self._page_of:
            assert page not in self._name_of
            self._page_of[name] = page
            self._name_of[page] = name

    def mark_hit(self, page: int) -> None:
        self._hit.add(page)

    def remove(self, page: int) -> tuple[bytes, bool]:
        """The page is about to be overwritten; returns its name, and whether it was ever hit."""
        name = self._name_of.pop(page)
        del self._page_of[name]
        was_hit = page in self._hit
        self._hit.discard(page)
        return name, was_hit

    def clear(self) -> None:
        self._page_of.clear()
        self._name_of.clear()
        self._hit.clear()

    def items(self) -> list[tuple[bytes, int]]:
        return list(self._page_of.items())
