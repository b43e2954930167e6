"""The portable attention against the oracle, and the promises that the oracle cannot show."""

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from pallas_kernels import reference
from pallas_kernels.dispatch import DROPPED, PagedBatch, PageLayout, select

DIM = 16
SCALE = 0.3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Row:
    query: int  # tokens of this step; 0: padding
    context: int  # tokens in the cache after this step
    gap: int = 0  # padding tokens in front of this row's


@dataclass(frozen=True)
class Shape:
    """A configuration whose compiled programs are shared by many examples."""

    page_size: int
    kv_heads: int
    group: int
    dtype: str
    tokens: int
    rows: int
    max_context: int
    decode: bool = False
    width: int | None = None  # of the block tables, in pages

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.kv_heads, self.page_size, DIM, self.dtype)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def num_pages(self) -> int:
        return -(-self.rows * self.max_context // self.page_size) + self.rows + 1


@lru_cache(maxsize=64)
def programs(shape: Shape):
    """(implementation, oracle): (pool, q, k, v, batch, page_offset) -> (pool, output)."""
    implementation = select("cpu", shape.layout, shape.heads)

    def fast(pool, q, k, v, batch, page_offset):
        prepared = implementation.prepare(batch, decode=shape.decode)
        pool = implementation.write(pool, k, v, batch, page_offset)
        return pool, implementation.attend(q, pool, batch, prepared, page_offset, SCALE)

    def oracle(pool, q, k, v, batch, page_offset):
        pool = reference.write(pool, k, v, batch, page_offset)
        return pool, reference.attend(q, pool, batch, page_offset, SCALE)

    return jax.jit(fast), jax.jit(oracle)


def lay_out(shape: Shape, rows: list[Row], seed: int = 0, order: list[int] | None = None):
    """(PagedBatch, cached: bool[num_pages, page_size]) with pages dealt at random.

    `order` is the order of the rows on the token axis. Unused table entries hold a page of another
    row, or one that nobody holds. `cached` marks what is in the cache before this step.
    """
    size = shape.page_size
    width = shape.width or -(-shape.max_context // size)
    random = np.random.default_rng(seed)
    free = random.permutation(np.arange(1, shape.num_pages)).astype(np.int32)
    tables = random.choice(free, (shape.rows, width)).astype(np.int32)
    positions = np.zeros(shape.tokens, np.int32)
    write_index = np.full(shape.tokens, DROPPED, np.int32)
    start, query, context = np.zeros((3, shape.rows), np.int32)
    cached = np.zeros((shape.num_pages, size), bool)
    token = 0
    for r in order if order is not None else range(len(rows)):
        row = rows[r]
        if row.query == 0:
            continue
        token += row.gap
        pages = -(-row.context // size)
        tables[r, :pages], free = free[:pages], free[pages:]
        at = np.arange(row.context)
        index = tables[r, at // size] * size + at % size
        cached.reshape(-1)[index[: row.context - row.query]] = True
        start[r], query[r], context[r] = token, row.query, row.context
        positions[token : token + row.query] = at[-row.query :]
        write_index[token : token + row.query] = index[-row.query :]
        token += row.query
    assert token <= shape.tokens
    lanes = (positions, write_index, start, query, context, tables)
    return PagedBatch(*map(jnp.asarray, lanes)), cached


def vectors(shape: Shape, seed: int):
    """q, k, v of one step."""
    random = np.random.default_rng(seed)
    dtype = shape.layout.dtype
    q = random.normal(size=(shape.tokens, shape.heads, DIM)).astype(dtype)
    k, v = random.normal(size=(2, shape.tokens, shape.kv_heads, DIM)).astype(dtype)
    return q, k, v


def poisoned_pool(shape: Shape, cached: np.ndarray, seed: int, before: int = 0) -> np.ndarray:
    """Random where `cached`, NaN everywhere else, `before` pages of NaN in front."""
    random = np.random.default_rng(seed)
    pool = random.normal(size=shape.layout.shape(shape.num_pages)).astype(shape.layout.dtype)
    pool = np.where(cached[:, None, None, :, None], pool, np.nan).astype(shape.layout.dtype)
    return np.concatenate([np.full_like(pool[:1], np.nan)] * before + [pool])


def assert_matches_oracle(shape: Shape, rows: list[Row], seed: int, order=None, before: int = 0):
    batch, cached = lay_out(shape, rows, seed, order)
    pool = poisoned_pool(shape, cached, seed, before)
    fast, oracle = programs(shape)
    args = (pool, *vectors(shape, seed + 1), batch, jnp.int32(before))
    (got_pool, got), (want_pool, want) = fast(*args), oracle(*args)
    # as float32: NaN equals NaN there
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got_pool, want_pool)))
    tolerance = TOLERANCE[shape.dtype]
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


MIXED = [
    Shape(1, 2, 1, "float32", tokens=160, rows=9, max_context=140),
    Shape(16, 3, 3, "float32", tokens=160, rows=9, max_context=280),
    Shape(16, 2, 4, "bfloat16", tokens=160, rows=9, max_context=280),
    Shape(64, 1, 8, "float32", tokens=160, rows=9, max_context=280),
]
SMOLLM = MIXED[1]


@st.composite
def ragged(draw, shape: Shape) -> tuple[list[Row], list[int]]:
    """Rows that fit the shape, with sizes near the edges of pages, chunks and blocks; an order."""
    room = shape.tokens
    edges = [1, 2, shape.page_size, 64, 65, 127, 128, 129, 256, 257, shape.max_context]
    rows = []
    for _ in range(draw(st.integers(1, shape.rows))):
        gap = draw(st.sampled_from([0, 0, 0, 3]))
        query = draw(st.sampled_from([0, 1, 1, 1, 2, 7, 33, 64, 65, 100]))
        query = min(query, room - gap, shape.max_context)
        if query <= 0:
            rows.append(Row(0, 0))
            continue
        room -= query + gap
        context = draw(st.sampled_from(edges) | st.integers(1, shape.max_context))
        rows.append(Row(query, min(max(query, context), shape.max_context), gap))
    return rows, draw(st.permutations(range(len(rows))))


@pytest.mark.parametrize("shape", MIXED, ids=str)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_ragged_batches_match_the_oracle(shape, data, seed):
    rows, order = data.draw(ragged(shape))
    assert_matches_oracle(shape, rows, seed, order)


DECODE = Shape(8, 2, 4, "bfloat16", tokens=11, rows=11, max_context=270, decode=True)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    contexts=st.lists(st.integers(1, 270) | st.sampled_from([127, 128, 129]), max_size=11),
    seed=st.integers(0, 2**16),
)
def test_decode_batches_match_the_oracle(contexts, seed):
    # one token a row, row r at token r; the rows behind are padding
    assert_matches_oracle(DECODE, [Row(1, context) for context in contexts], seed)


def test_every_page_of_the_context_is_read_through_page_offset():
    shape = SMOLLM
    rows = [Row(70, 200), Row(1, 280), Row(1, 1), Row(0, 0), Row(2, 2)]
    assert_matches_oracle(shape, rows, seed=3, before=shape.num_pages)


def test_padding_tokens_and_an_empty_batch_give_zeros():
    shape = SMOLLM
    fast, _ = programs(shape)
    batch, cached = lay_out(shape, [Row(3, 5), Row(1, 9)])
    _, out = fast(poisoned_pool(shape, cached, 0), *vectors(shape, 1), batch, 0)
    assert np.abs(out[:4]).min() > 0
    np.testing.assert_array_equal(out[4:], 0)
    batch, cached = lay_out(shape, [])
    _, out = fast(poisoned_pool(shape, cached, 0), *vectors(shape, 1), batch, 0)
    np.testing.assert_array_equal(out, 0)


def test_a_prompt_in_chunks_gives_what_it_gives_in_one():
    shape = SMOLLM
    fast, _ = programs(shape)
    q, k, v = vectors(shape, 5)

    def run(cuts):
        pool, outputs = np.zeros(shape.layout.shape(shape.num_pages), np.float32), []
        for start, stop in pairwise(cuts):
            batch, _ = lay_out(shape, [Row(stop - start, stop)], seed=7)
            step = [np.roll(x, -start, axis=0) for x in (q, k, v)]
            pool, out = fast(pool, *step, batch, 0)
            outputs.append(out[: stop - start])
        return np.concatenate(outputs)

    whole = run([0, 150])
    for cuts in ([0, 64, 128, 150], [0, 1, 2, 70, 71, 150]):
        np.testing.assert_allclose(run(cuts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bucket", "width", "decode"),
    [(1, 40, True), (2, 18, True), (8, 40, True), (19, 40, True), (19, 40, False)],
)
def test_a_row_alone_and_in_any_batch_gives_the_same_bits(bucket, width, decode):
    """One row of 281 tokens, alone in a bucket of one row, and last of a full bucket."""
    own = Row(1, 281)
    alone = Shape(16, 3, 3, "float32", 1, 1, 288, decode=True, width=18)
    beside = Shape(16, 3, 3, "float32", bucket, bucket, 600, decode=decode, width=width)
    others = [Row(1, 30 + 37 * i % 250) for i in range(bucket - 1)]
    if width == 40 and others:
        others[0] = Row(1, 600)  # more chunks than the row itself needs

    def run(shape, rows):
        batch, cached = lay_out(shape, rows)
        pool = poisoned_pool(shape, cached, seed=2)
        q, k, v = vectors(shape, seed=4)
        at, place = np.arange(own.context), len(rows) - 1
        pages = np.asarray(batch.block_tables)[place, at // 16]
        random = np.random.default_rng(9)
        pool[pages, :, :, at % 16] = random.normal(size=(own.context, 2, 3, DIM))
        q[place] = random.normal(size=q[place].shape)
        k[place], v[place] = random.normal(size=(2, *k[place].shape))
        _, out = programs(shape)[0](pool, q, k, v, batch, 0)
        return np.asarray(out)[place]

    np.testing.assert_array_equal(run(beside, [*others, own]), run(alone, [own]))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("index", [DROPPED, 2 * 5 * 16, 2**31 - 17])
def test_writes_past_the_pool_are_dropped(layer, index):
    layout = PageLayout(1, 16, DIM, "float32")
    implementation = select("cpu", layout, 1)
    batch, _ = lay_out(Shape(16, 1, 1, "float32", 2, 1, 16), [])
    batch = batch._replace(write_index=jnp.array([index, 17], jnp.int32))
    k = np.ones((2, 1, DIM), np.float32)
    pool = implementation.write(jnp.zeros(layout.shape(10)), k, 2 * k, batch, jnp.int32(5 * layer))
    expected = np.zeros(layout.shape(10), np.float32)
    expected[5 * layer + 1, 0, 0, 1], expected[5 * layer + 1, 1, 0, 1] = 1, 2
    np.testing.assert_array_equal(pool, expected)


def test_the_page_behind_the_last_one_of_the_last_layer_is_dropped():
    layout = PageLayout(1, 16, DIM, "float32")
    implementation = select("cpu", layout, 1)
    batch, _ = lay_out(Shape(16, 1, 1, "float32", 1, 1, 16), [])
    batch = batch._replace(write_index=jnp.array([5 * 16], jnp.int32))
    k = np.ones((1, 1, DIM), np.float32)
    for pages, offset in ((10, 5), (5, 0)):
        pool = implementation.write(jnp.zeros(layout.shape(pages)), k, k, batch, offset)
        np.testing.assert_array_equal(pool, 0)


@pytest.mark.parametrize(
    ("dtype", "decode"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
def test_the_pool_is_updated_in_place_in_a_scan_over_layers(dtype, decode):
    layers, num_pages = 4, 512
    tokens = 16 if decode else 128
    shape = Shape(16, 3, 3, dtype, tokens, 16, 256, decode=decode)
    implementation = select("cpu", shape.layout, shape.heads)

    def step(pool, q, k, v, batch):
        prepared = implementation.prepare(batch, decode=decode)

        def layer(carry, page_offset):
            pool, x = carry
            pool = implementation.write(pool, k + x[:, :3], v, batch, page_offset)
            x = implementation.attend(q + x, pool, batch, prepared, page_offset, SCALE)
            return (pool, x), None

        offsets = jnp.arange(layers, dtype=jnp.int32) * num_pages
        return jax.lax.scan(layer, (pool, q), offsets)[0]

    batch, _ = lay_out(shape, [])
    pool = jnp.zeros(shape.layout.shape(layers * num_pages), dtype)
    lowered = partial(jax.jit, donate_argnums=0)(step).lower(pool, *vectors(shape, 0), batch)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 4
