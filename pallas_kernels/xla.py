"""The portable implementation, in plain XLA: made fast on CPU, right everywhere.

Rows of one token and rows of many go through one inner loop, an online softmax in float32 over
chunks of the cache (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135), one
*block* of queries at a time:

    single   rows of one token, SINGLE_ROWS of them to a block
    chunk    rows of more tokens, CHUNK_TOKENS tokens of one row to a block

`prepare` lists the blocks densely, so how many run, and how many chunks of cache each one reads,
are run-time values: cost follows the real tokens, never the bucket or the width of the tables.
Chunks lie at fixed positions of a context, and a chunk that a row does not reach adds exactly
nothing, so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.interface import PagedBatch
from pallas_kernels.layout import KEYS, VALUES, PageLayout

# Tokens of cache in one round of the inner loop, made up to whole pages. Smaller costs more rounds,
# larger reads further behind the end of short contexts.
CONTEXT_CHUNK = 128
# Larger blocks run better on several cores, and waste more where rows or chunks do not fill them.
SINGLE_ROWS = 16
CHUNK_TOKENS = 64

# Finite, so that a row that has seen nothing yet rescales by exp(0), not by exp(-inf + inf).
LOWEST = -1e30


class Blocks(NamedTuple):
    """Blocks of `rows` x `size` queries, the first `num_blocks` of which are real."""

    num_blocks: jax.Array  # int32[]
    tokens: jax.Array  # int32[blocks, rows, size] index on the token axis; past its end: no query
    positions: jax.Array  # int32[blocks, rows, size] the query's own position; -1: no query
    tables: jax.Array  # int32[blocks, rows, pages] block tables


class Prepared(NamedTuple):
    kinds: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class XlaAttention:
    """See interface.AttentionImpl."""

    layout: PageLayout
    num_heads: int
    name: str = "xla"

    @property
    def chunk_pages(self) -> int:
        return -(-CONTEXT_CHUNK // self.layout.page_size)

    def prepare(self, batch: PagedBatch, *, decode: bool) -> Prepared:
        # Whole chunks, so that the last slice of a table is not shifted to fit; and never a single
        # one: XLA would move its reads out of the loop, apart from the arithmetic they fuse with.
        width = batch.block_tables.shape[1]
        chunks = max(2, -(-width // self.chunk_pages))
        padding = ((0, 0), (0, chunks * self.chunk_pages - width))
        batch = batch._replace(block_tables=jnp.pad(batch.block_tables, padding))
        single = _single_blocks(batch)
        return Prepared((single,) if decode else (_chunk_blocks(batch), single))

    def write(
        self,
        pool: jax.Array,
        k: jax.Array,
        v: jax.Array,
        batch: PagedBatch,
        page_offset: jax.Array | int,
    ) -> jax.Array:
        page, offset = jnp.divmod(batch.write_index, self.layout.page_size)
        # compared before page_offset is added: the sum could wrap around and land in the pool
        page = jnp.where(page < pool.shape[0] - page_offset, page + page_offset, pool.shape[0])
        both = jnp.stack([k, v], axis=1).astype(pool.dtype)  # [tokens, 2, kv_heads, head_dim]
        return pool.at[page, :, :, offset].set(both, mode="drop", wrap_negative_indices=False)

    def attend(
        self,
        q: jax.Array,
        pool: jax.Array,
        batch: PagedBatch,
        prepared: Prepared,
        page_offset: jax.Array | int,
        scale: float,
    ) -> jax.Array:
        out = jnp.zeros_like(q)
        for blocks in prepared.kinds:

            def run(i, out, blocks=blocks):
                tokens = blocks.tokens[i]
                queries = q.at[tokens].get(mode="clip", wrap_negative_indices=False)
                result = self._attend_block(
                    queries, pool, blocks.positions[i], blocks.tables[i], page_offset, scale
                )
                return out.at[tokens].set(
                    result.astype(q.dtype), mode="drop", wrap_negative_indices=False
                )

            out = lax.fori_loop(0, blocks.num_blocks, run, out)
        return out

    def _attend_block(
        self,
        queries: jax.Array,  # [rows, size, heads, head_dim]
        pool: jax.Array,
        positions: jax.Array,  # int32[rows, size]
        tables: jax.Array,  # int32[rows, pages]
        page_offset: jax.Array | int,
        scale: float,
    ) -> jax.Array:
        """float32[rows, size, heads, head_dim]; zeros where the position is -1."""
        rows, size, _, dim = queries.shape
        page_size, kv_heads = self.layout.page_size, self.layout.num_kv_heads
        group = self.num_heads // kv_heads
        length = self.chunk_pages * page_size
        # Reading the cache bounds single tokens: widening on the way is free, and float32 products
        # of few rows are the faster ones. The products bound a chunk: there bfloat16 is faster.
        compute = jnp.float32 if size == 1 else pool.dtype
        # the scale in two factors, the first a power of two: exact in every dtype
        coarse = 2.0 ** math.floor(math.log2(scale))
        fine = scale / coarse
        vectors = pool.reshape(-1, page_size * dim)  # one page's keys or values for one head

        # [rows, kv_heads, group * size, head_dim]
        q = jnp.moveaxis(queries.reshape(rows, size, kv_heads, group, dim), 1, 3)
        q = q.reshape(rows, kv_heads, group * size, dim).astype(compute)
        last = positions.max(axis=1)[:, None, None, None]

        def chunk(i, carry):
            highest, total, mixed = carry
            pages = lax.dynamic_slice_in_dim(tables, i * self.chunk_pages, self.chunk_pages, axis=1)
            first = (pages + page_offset)[:, None, :] * (2 * kv_heads)
            heads = jnp.arange(kv_heads)[:, None]
            at = i * length + jnp.arange(length)

            def read(side):  # [rows, kv_heads, length, head_dim]
                index = first + side * kv_heads + heads
                found = vectors.at[index].get(mode="clip", wrap_negative_indices=False)
                return found.reshape(rows, kv_heads, length, dim).astype(compute)

            # XLA:CPU vectorizes a gather that ends in arithmetic, and not a bare one
            k = read(KEYS) * coarse
            # what lies behind the context may be NaN, which a weight of zero does not undo
            v = jnp.where(at[:, None] <= last, read(VALUES), 0)

            scores = jnp.einsum("rkqd,rktd->rkqt", q, k, preferred_element_type="float32")
            seen = at <= positions[:, None, None, :, None]
            scores = scores.reshape(rows, kv_heads, group, size, length)
            scores = jnp.where(seen, scores * fine, -jnp.inf)
            scores = scores.reshape(rows, kv_heads, group * size, length)

            raised = jnp.maximum(highest, scores.max(axis=-1))
            weights = jnp.exp(scores - raised[..., None])
            fade = jnp.exp(highest - raised)
            total = total * fade + _sum_in_fixed_order(weights)
            mixed = mixed * fade[..., None] + jnp.einsum(
                "rkqt,rktd->rkqd",
                weights.astype(compute),
                v,
                preferred_element_type="float32",
            )
            return raised, total, mixed

        nothing = jnp.zeros((rows, kv_heads, group * size), jnp.float32)
        start = (nothing + LOWEST, nothing, jnp.zeros((*nothing.shape, dim), jnp.float32))
        chunks = (positions.max() + length) // length
        _, total, mixed = lax.fori_loop(0, chunks, chunk, start)

        out = mixed / jnp.where(total > 0, total, 1)[..., None]
        out = jnp.moveaxis(out.reshape(rows, kv_heads, group, size, dim), 3, 1)
        return out.reshape(rows, size, self.num_heads, dim)


def _sum_in_fixed_order(x: jax.Array) -> jax.Array:
    """Sum over the last axis, pairwise.

    The order of a reduction is XLA's choice and differs with the number of rows. This one gives a
    row the same bits in every bucket, and costs no more.
    """
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def _single_blocks(batch: PagedBatch) -> Blocks:
    """Rows of one token, the longest context first: rows of one block read equally far."""
    rows, num_tokens = batch.query_len.shape[0], batch.positions.shape[0]
    width = min(SINGLE_ROWS, rows)
    context = jnp.where(batch.query_len == 1, batch.context_len, 0)
    order = jnp.argsort(-context)
    order = jnp.pad(order, (0, -rows % width), constant_values=rows)
    context = context.at[order].get(mode="fill", fill_value=0)
    tokens = batch.query_start.at[order].get(mode="clip")
    tables = batch.block_tables.at[order].get(mode="clip")
    return Blocks(
        num_blocks=-(-(context > 0).sum(dtype=jnp.int32) // width),
        tokens=jnp.where(context > 0, tokens, num_tokens).reshape(-1, width, 1),
        positions=(context - 1).reshape(-1, width, 1),
        tables=tables.reshape(len(order) // width, width, -1),
    )


def _chunk_blocks(batch: PagedBatch) -> Blocks:
    """Rows of more than one token, cut every CHUNK_TOKENS tokens."""
    rows, num_tokens = batch.query_len.shape[0], batch.positions.shape[0]
    size = min(CHUNK_TOKENS, num_tokens)
    # a row of n tokens has at most n / size + 1 blocks, and at most n / 2 as it has two or more
    most = max(1, min(num_tokens // 2, num_tokens // size + rows))
    ends = jnp.cumsum(jnp.where(batch.query_len > 1, -(-batch.query_len // size), 0))
    block = jnp.arange(most)
    row = jnp.minimum((ends <= block[:, None]).sum(axis=1), rows - 1)
    before = jnp.where(row > 0, ends[row - 1], 0)
    index = ((block - before) * size)[:, None] + jnp.arange(size)  # token of its row
    real = index < batch.query_len[row][:, None]
    tokens = batch.query_start[row][:, None] + index
    positions = (batch.context_len - batch.query_len)[row][:, None] + index
    return Blocks(
        num_blocks=ends[-1],
        tokens=jnp.where(real, tokens, num_tokens)[:, None],
        positions=jnp.where(real, positions, -1)[:, None],
        tables=batch.block_tables[row][:, None],
    )
