"""The oracle of `write` and `attend`, written to be read; for tests and self-checks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.interface import PagedBatch
from pallas_kernels.layout import KEYS, VALUES


def write(
    pool: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, page_offset: jax.Array | int
) -> jax.Array:
    """AttentionImpl.write, one token after another."""
    page_size = pool.shape[3]
    reachable = pool.shape[0] - page_offset

    def store(token, pool):
        page, offset = jnp.divmod(batch.write_index[token], page_size)
        both = jnp.stack([k[token], v[token]]).astype(pool.dtype)
        written = pool.at[page_offset + page, :, :, offset].set(both)
        return jnp.where(page < reachable, written, pool)

    return lax.fori_loop(0, len(k), store, pool)


def attend(
    q: jax.Array, pool: jax.Array, batch: PagedBatch, page_offset: jax.Array | int, scale: float
) -> jax.Array:
    """AttentionImpl.attend: each row's pages side by side, one full softmax for every token."""
    tokens, heads, _ = q.shape
    _, _, kv_heads, page_size, _ = pool.shape
    rows, pages = batch.block_tables.shape

    # which row each token belongs to, if any: [tokens, rows]
    token = jnp.arange(tokens)[:, None]
    mine = (token >= batch.query_start) & (token < batch.query_start + batch.query_len)
    row = jnp.argmax(mine, axis=1)
    real = mine.any(axis=1)
    position = (batch.context_len - batch.query_len)[row] + token[:, 0] - batch.query_start[row]

    # the row's keys and values in order of position: [rows, pages * page_size, heads, head_dim]
    row_pages = pool[page_offset + batch.block_tables]
    in_order = jnp.moveaxis(row_pages, 4, 2).astype(jnp.float32)
    k, v = (
        jnp.repeat(
            in_order[:, :, :, side].reshape(rows, pages * page_size, kv_heads, -1),
            heads // kv_heads,
            axis=2,
        )
        for side in (KEYS, VALUES)
    )

    seen = real[:, None] & (jnp.arange(pages * page_size) <= position[:, None])
    scores = scale * jnp.einsum("thd,tshd->ths", q.astype(jnp.float32), k[row])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    weights = jnp.where(seen[:, None], jax.nn.softmax(scores, axis=-1), 0)
    visible = jnp.where(seen[:, :, None, None], v[row], 0)
    return jnp.einsum("ths,tshd->thd", weights, visible).astype(q.dtype)
