"""Pages that leave for the host and come back are the same bytes, in whatever order a step asks for
them; and nothing compiles for it."""

from __future__ import annotations

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ConfigError
from jaxserve.runtime.compiles import CompileCounter
from jaxserve.runtime.transfer import CopyProgram, PageTransfer, Pools, compile_copies
from scheduler.tiers import PageCopies

LAYERS, PAGES, HOST_PAGES = 3, 40, 20
PAGE = (2, 2, 4, 8)  # K and V, heads, tokens, dimension
DEVICE = jax.devices()[0]
KINDS = [None, "pinned_host"]  # the device's own memory, and what accelerators use
BITS = {"float32": np.uint32, "bfloat16": np.uint16}


@cache
def programs(dtype: str, num_pages: int = PAGES) -> list[CopyProgram]:
    """Of 1 and of 5 pages; layers are written two, then one at a time."""
    pool = jax.ShapeDtypeStruct((num_pages, *PAGE), jnp.dtype(dtype))
    return [compile_copies(size, (pool,) * LAYERS, group=2) for size in (1, 5)]


def transfer_to(kind: str | None, dtype: str = "float32") -> PageTransfer:
    kinds = {memory.kind for memory in DEVICE.addressable_memories()}
    if kind is not None and kind not in kinds:
        pytest.skip(f"this device has no {kind} memory")
    return PageTransfer(programs(dtype), HOST_PAGES, DEVICE, kind)


def random_pools(seed: int, dtype: str = "float32") -> Pools:
    """Any bits, those of NaN, infinities and denormal numbers included."""
    random = np.random.default_rng(seed)
    limit = np.iinfo(BITS[dtype]).max
    bits = random.integers(0, limit, (LAYERS, PAGES, *PAGE), BITS[dtype], endpoint=True)
    return tuple(jnp.array(layer.view(jnp.dtype(dtype))) for layer in bits)


def bits(pools: Pools) -> np.ndarray:
    """uint[pages, layers, ...]"""
    arrays = [np.array(pool) for pool in pools]
    return np.stack([a.view(f"uint{8 * a.dtype.itemsize}") for a in arrays], axis=1)


@pytest.fixture
def counter() -> CompileCounter:
    return CompileCounter(Counter(), strict=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_count_comes_back_as_it_was_and_nothing_compiles(
    kind: str | None, dtype: str, counter: CompileCounter
) -> None:
    """tpu-inference PR#1019: copies compiled anew for each count of pages."""
    transfer = transfer_to(kind, dtype)
    random = np.random.default_rng(0)
    for count in range(1, 18):
        pools, others = random_pools(count, dtype), random_pools(100 + count, dtype)
        before, expected = bits(pools), bits(others)
        leave, arrive = (1 + random.permutation(PAGES - 1)[:count] for _ in range(2))
        host = random.permutation(HOST_PAGES)[:count].tolist()
        with counter.phase("serving"):
            kept, leaving = transfer.copy(
                pools, PageCopies(out=tuple(zip(leave.tolist(), host, strict=True)))
            )
            returned, none = transfer.copy(
                others, PageCopies(back=tuple(zip(host, arrive.tolist(), strict=True)))
            )
        assert (len(leaving), len(none)) == (count, 0)
        np.testing.assert_array_equal(bits(kept), before)
        expected[arrive] = before[leave]
        np.testing.assert_array_equal(bits(returned), expected)
    counter.close()
    assert counter.counts["serving"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_page_is_read_before_it_is_overwritten(kind: str | None) -> None:
    transfer, pools = transfer_to(kind), random_pools(1)
    before = bits(pools)
    pools, _ = transfer.copy(pools, PageCopies(out=((7, 0), (8, 1))))
    pools, _ = transfer.copy(pools, PageCopies(out=((3, 1), (4, 0)), back=((0, 10), (1, 11))))
    pools, _ = transfer.copy(pools, PageCopies(back=((0, 12), (1, 13))))
    after = bits(pools)
    np.testing.assert_array_equal(after[[10, 11]], before[[7, 8]])
    np.testing.assert_array_equal(after[[12, 13]], before[[4, 3]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_page_is_read_before_it_is_overwritten(kind: str | None) -> None:
    """vllm#45704: pages that were reused while they were still being copied. Page 5 leaves, and is
    written by a page that comes back and then by the step, all of it behind a step that takes
    long, before anything has been waited for."""
    transfer, pools = transfer_to(kind), random_pools(2)
    matrix = jnp.eye(1200) * 1.0001

    @jax.jit
    def step(pools: Pools) -> Pools:
        slow = jax.lax.fori_loop(0, 5, lambda _, m: m @ matrix, matrix).sum()
        return tuple(pool.at[5].set(jnp.where(slow > 0, 3.0, 0.0)) for pool in pools)

    pools, _ = transfer.copy(pools, PageCopies(out=((6, 0),)))
    pools = step(pools)
    before = bits(pools)  # page 5 holds 3.0
    pools = step(tuple(pool.at[5].multiply(2.0) for pool in pools))
    pools, leaving = transfer.copy(pools, PageCopies(out=((5, 1),), back=((0, 5),)))
    pools, _ = transfer.copy(pools, PageCopies(out=((5, 2),)))
    pools = jax.jit(lambda pools: tuple(pool * 0 for pool in pools), donate_argnums=0)(pools)
    pools, _ = transfer.copy(pools, PageCopies(back=((1, 10), (2, 11))))
    after = bits(pools)
    np.testing.assert_array_equal(after[10], before[5])
    np.testing.assert_array_equal(after[11], before[6])
    assert np.array(leaving[0]).max() == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_reset_forgets_every_host_page(kind: str | None) -> None:
    transfer, pools = transfer_to(kind), random_pools(3)
    pools, _ = transfer.copy(pools, PageCopies(out=((1, 0), (2, 1))))
    transfer.reset()
    with pytest.raises(AssertionError, match="host page 0 was never written"):
        transfer.copy(pools, PageCopies(back=((0, 5),)))
    expected = bits(pools)
    pools, _ = transfer.copy(pools, PageCopies(out=((9, 0),)))
    pools, _ = transfer.copy(pools, PageCopies(back=((0, 5),)))
    expected[5] = expected[9]
    np.testing.assert_array_equal(bits(pools), expected)


def test_host_memory_is_bounded() -> None:
    """However much is copied, only the last content of each host page is kept."""
    page = (LAYERS, *PAGE)
    transfer, pools = transfer_to(None), random_pools(4)

    def kept() -> int:
        return sum(array.shape == page for array in jax.live_arrays())

    before = kept()
    for start in range(0, 60, 6):
        out = tuple((1 + i % 30, i % HOST_PAGES) for i in range(start, start + 6))
        pools, leaving = transfer.copy(pools, PageCopies(out=out))
        del leaving
    assert kept() - before == HOST_PAGES
    for host in (HOST_PAGES, -1):
        with pytest.raises(AssertionError, match=f"host page {host}"):
            transfer.copy(pools, PageCopies(out=((1, host),)))
        with pytest.raises(AssertionError, match=f"host page {host}"):
            transfer.copy(pools, PageCopies(back=((host, 1),)))
    transfer.reset()
    assert kept() == before


def test_temporaries_are_the_pages_of_a_call_not_the_pool() -> None:
    page = 4 * LAYERS * int(np.prod(PAGE))
    for small, large in zip(programs("float32"), programs("float32", 50 * PAGES), strict=True):
        assert small.temp == large.temp
        assert small.num_pages * page <= small.temp <= 4 * small.num_pages * page
    on_cpu, staged = (PageTransfer(programs("float32"), 0, DEVICE, kind) for kind in KINDS)
    assert on_cpu.temp == programs("float32")[-1].temp
    assert staged.temp == 4 * on_cpu.temp  # two calls out and two back


def test_reserve_takes_and_gives_back(counter: CompileCounter) -> None:
    transfer = transfer_to("pinned_host")
    with counter.phase("serving"):
        transfer.reserve(jax.ShapeDtypeStruct((LAYERS, *PAGE), "float32"))
    counter.close()
    with pytest.raises(AssertionError, match="never written"):
        transfer.copy(random_pools(5), PageCopies(back=((0, 1),)))


def test_host_memory_that_cannot_be_had_is_said_by_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = transfer_to("pinned_host")

    def refuse(*arguments: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")

    monkeypatch.setattr(jax, "device_put", refuse)
    with pytest.raises(ConfigError, match=r"^num_host_pages: 20 pages .* out of pinned memory"):
        transfer.reserve(jax.ShapeDtypeStruct((LAYERS, *PAGE), "float32"))


def test_without_host_pages_there_is_nothing_to_compile_or_copy() -> None:
    transfer = PageTransfer([], 0, DEVICE, None)
    pools = random_pools(6)
    same, leaving = transfer.copy(pools, PageCopies())
    assert same is pools
    assert leaving == []
    assert transfer.temp == 0
