"""Which attention implementation serves a model on a platform: where kernels register.

Must not know models, schedulers or steps. A new implementation is one entry in CANDIDATES, before
the portable form, with the function that builds it or says that it cannot serve.
"""

from __future__ import annotations

from collections.abc import Callable

from pallas_kernels.interface import DROPPED, AttentionImpl, PagedBatch
from pallas_kernels.layout import LayoutError, PageLayout
from pallas_kernels.xla import XlaAttention

__all__ = [
    "CANDIDATES",
    "DROPPED",
    "AttentionImpl",
    "LayoutError",
    "PageLayout",
    "PagedBatch",
    "select",
]

# (platform, layout, query heads of the same chip) -> an implementation, or None: "not mine".
Candidate = Callable[[str, PageLayout, int], AttentionImpl | None]


def _xla(platform: str, layout: PageLayout, num_heads: int) -> AttentionImpl:
    return XlaAttention(layout, num_heads)


# The first that serves wins; the portable form serves everything and stays last.
CANDIDATES: tuple[Candidate, ...] = (_xla,)


def select(
    platform: str,
    layout: PageLayout,
    num_heads: int,
    candidates: tuple[Candidate, ...] = CANDIDATES,
) -> AttentionImpl:
    """The implementation for `num_heads` query heads over `layout`; platform as in jax ("cpu").

    Raises LayoutError if the query heads are not a multiple of the KV heads.
    """
    if num_heads < 1 or num_heads % layout.num_kv_heads:
        raise LayoutError(
            "num_heads",
            f"must be a multiple of the {layout.num_kv_heads} KV heads, got {num_heads}",
        )
    for candidate in candidates:
        if (implementation := candidate(platform, layout, num_heads)) is not None:
            return implementation
    raise LayoutError("platform", f"no attention implementation serves {platform!r}")
