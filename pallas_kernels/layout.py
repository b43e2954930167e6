"""The shape of a KV page and of the pool that holds the pages. Everything else indexes through it.

Knows one chip's share of one model's heads; must not know models, layers, meshes or schedulers. A
page holds the K and the V of `page_size` consecutive tokens of one sequence in one layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

KEYS, VALUES = 0, 1  # places on the second axis of the pool
DTYPES = ("float32", "bfloat16", "float16")


class LayoutError(ValueError):
    """A page layout that no kernel can serve. `field` names what is wrong."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class PageLayout:
    """`pool: dtype[pages, 2, num_kv_heads, page_size, head_dim]`; second axis: 0 is K, 1 is V.

    Raises LayoutError for a size below one or a dtype outside DTYPES.
    """

    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: Any  # anything numpy takes for a dtype; kept as np.dtype, so equal layouts compare equal

    def __post_init__(self) -> None:
        for field in ("num_kv_heads", "page_size", "head_dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(field, f"must be an integer of at least 1, got {value!r}")
        name = "none" if self.dtype is None else getattr(self.dtype, "__name__", str(self.dtype))
        if name not in DTYPES:
            raise LayoutError("dtype", f"must be one of {', '.join(DTYPES)}, got {name}")
        object.__setattr__(self, "dtype", jnp.dtype(name))

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int]:
        """Shape of a pool of `num_pages` pages. Raises LayoutError if int32 cannot index it."""
        if num_pages < 1:
            raise LayoutError("num_pages", f"must be at least 1, got {num_pages}")
        if num_pages * 2 * self.num_kv_heads * self.page_size > np.iinfo(np.int32).max:
            raise LayoutError(
                "num_pages",
                f"{num_pages} pages of {self.page_size} tokens and {self.num_kv_heads} KV heads are"
                f" more vectors than int32 can index ({np.iinfo(np.int32).max})",
            )
        return (num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, K and V together."""
        return math.prod(self.shape(1)) * self.dtype.itemsize
