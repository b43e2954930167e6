"""What every attention implementation takes and gives. Knows no implementation and no platform."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

# A write index that no pool reaches: this token's K and V are dropped.
DROPPED = 2**31 - 1


class PagedBatch(NamedTuple):
    """Where the tokens of one step lie, in the step's token axis and in the cache.

    The tokens of row r are [query_start[r], query_start[r] + query_len[r]). They are the last ones
    of its context: token i of the row is at position context_len[r] - query_len[r] + i and sees the
    keys at positions up to its own. Rows never overlap; tokens of no row are padding.
    """

    positions: jax.Array  # int32[tokens]
    write_index: jax.Array  # int32[tokens] page * page_size + offset in the page; DROPPED for none
    query_start: jax.Array  # int32[rows]
    query_len: jax.Array  # int32[rows] 0: padding row
    context_len: jax.Array  # int32[rows] tokens in the cache once this step has written; 0: padding
    block_tables: jax.Array  # int32[rows, pages] entries past the row's context are never used


class AttentionImpl(Protocol):
    """Paged attention over one layer's pages: those that start at `page_offset` in `pool`.

    All three run inside the jitted step. `page_offset` is an int32 scalar, traced or not: with one
    pool for all layers it is layer * num_pages, with a pool per layer 0.
    """

    @property
    def name(self) -> str: ...

    def prepare(self, batch: PagedBatch, *, decode: bool) -> Any:
        """What `attend` needs of a batch in every layer, computed once, outside the layer loop.

        `decode` promises one token a row: tokens == rows and query_start == arange(rows), padding
        rows included.
        """
        ...

    def write(
        self, pool: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, page_offset: Any
    ) -> jax.Array:
        """The pool with k and v ([tokens, kv_heads, head_dim]) stored at `write_index`.

        In place when the pool is donated. DROPPED, and every index whose page, counted from
        page_offset, is past the end of the pool, writes nothing.
        """
        ...

    def attend(
        self,
        q: jax.Array,
        pool: jax.Array,
        batch: PagedBatch,
        prepared: Any,
        page_offset: Any,
        scale: float,
    ) -> jax.Array:
        """softmax(scale * q k) v for every token, after `write`: [tokens, heads, head_dim], as q.

        Heads are grouped: query head h reads KV head h // (heads // kv_heads). Scores and sums are
        float32. Padding tokens give zeros. What lies in pages, or in parts of pages, that no
        context covers never matters, NaN included.
        """
        ...
