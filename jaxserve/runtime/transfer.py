"""PageTransfer: the bytes of the host tier. Copies KV pages between the device's pools and host
memory; which page goes where, and when, scheduler.tiers decides.

A host page is one immutable array of what all layers hold of a page. So a page that is brought back
while its place is overwritten can't be torn, and the device's own order of work is all the waiting
there is: a page can be brought back before its way out has ended, and the host never copies bytes
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxserve.config import ConfigError
from jaxserve.runtime.executables import Stage, compile_stage, num_bytes
from jaxserve.runtime.memory import Device
from scheduler.tiers import PageCopies

# Calls whose pages may lie on the device, on their way; a step that copies more waits for them.
STAGED_CALLS = 2

Pools = tuple[jax.Array, ...]  # one a layer: [pages, 2, kv_heads, page_size, head_dim]


@dataclass(frozen=True, slots=True)
class CopyProgram:
    """Compiled for this many pages a call, all layers in a `read`, some in each `write`."""

    num_pages: int
    read: Callable[..., tuple[jax.Array, ...]]
    writes: tuple[tuple[Callable[..., Pools], slice], ...]
    temp: int  # bytes on the device, those of the pages included


def read_pages(pools: Pools, pages: jax.Array) -> tuple[jax.Array, ...]:
    """int32[n] pages -> n arrays [layers, 2, kv_heads, page_size, head_dim]."""
    found = jnp.stack([pool.at[pages].get(mode="clip") for pool in pools], axis=1)
    return tuple(found[i] for i in range(len(pages)))


def write_pages(
    pools: Pools, contents: tuple[jax.Array, ...], first: jax.Array, pages: jax.Array
) -> Pools:
    """What read_pages gave, into int32[n] pages of the pools of layers `first` and following."""
    parts = [jax.lax.dynamic_slice_in_dim(content, first, len(pools)) for content in contents]
    layers = jnp.stack(parts, axis=1)  # [layers, n, ...]
    return tuple(
        pool.at[pages].set(layer, mode="drop") for pool, layer in zip(pools, layers, strict=True)
    )


def compile_copies(num_pages: int, pools: tuple[Any, ...], group: int) -> CopyProgram:
    """For pools of these (abstract) shapes, written `group` layers at a time: each layer of a
    program adds to the time to compile it."""
    pages = jax.ShapeDtypeStruct((num_pages,), "int32")
    first = jax.ShapeDtypeStruct((), "int32")
    read = compile_stage(read_pages, pools, pages)
    by_size: dict[int, Stage] = {}
    writes: list[tuple[Callable[..., Pools], slice]] = []
    for start in range(0, len(pools), group):
        part = slice(start, min(start + group, len(pools)))
        size = part.stop - part.start
        if size not in by_size:
            arguments = (pools[part], read.results, first, pages)
            by_size[size] = compile_stage(write_pages, *arguments, donate=(0,))
            assert by_size[size].aliased >= num_bytes(pools[part]), "pools are updated in place"
        writes.append((by_size[size].run, part))
    temp = max(read.temp, *(stage.temp + num_bytes(read.results) for stage in by_size.values()))
    return CopyProgram(num_pages, read.run, tuple(writes), temp)


class PageTransfer:
    """num_host_pages pages of host memory, and the programs that copy to and from them.

    `memory_kind` names the device's memory that host pages live in (see jax.Device
    .addressable_memories): pinned host memory on an accelerator. None is the device's own memory,
    which on CPU is the host's.
    """

    def __init__(
        self,
        programs: Sequence[CopyProgram],
        num_host_pages: int,
        device: Device,
        memory_kind: str | None,
    ):
        self._programs = sorted(programs, key=lambda program: -program.num_pages)
        assert not num_host_pages or self._programs[-1].num_pages == 1, "any count can be made up"
        self._contents: list[jax.Array | None] = [None] * num_host_pages
        self._host: Sharding = SingleDeviceSharding(device, memory_kind=memory_kind)
        self._device: Sharding = SingleDeviceSharding(device)
        self._is_staged = memory_kind is not None

    @property
    def num_host_pages(self) -> int:
        return len(self._contents)

    @property
    def temp(self) -> int:
        """Bytes on the device that the copies of one step take at most."""
        if not self._programs:
            return 0
        largest = self._programs[0]
        # out and back; on CPU the pages of a call out are the host pages
        return largest.temp * (2 * STAGED_CALLS if self._is_staged else 1)

    def reserve(self, page: Any) -> None:
        """Have the memory for all host pages, shaped as `page`, allocated once: allocators of
        pinned memory keep what they had. Raises ConfigError if it can't be had."""
        if not self._is_staged:
            return
        blank = np.zeros(page.shape, page.dtype)
        try:
            jax.block_until_ready([jax.device_put(blank, self._host) for _ in self._contents])
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                "num_host_pages", f"{self.num_host_pages} pages of host memory: {error}"
            ) from error

    def copy(self, pools: Pools, copies: PageCopies) -> tuple[Pools, list[jax.Array]]:
        """Start the copies; returns the pools (those given are donated) and the pages on their way
        out, whose arrays are ready when they have arrived.

        Every `out` reads its device page and every `back` its host page before either is written.
        """
        back = [self._content(host) for host, _ in copies.back]
        leaving: list[jax.Array] = []
        for call, (program, part) in enumerate(self._calls(len(copies.out))):
            self._bound(call, leaving)
            pages = np.array([page for page, _ in copies.out[part]], np.int32)
            leaving += jax.device_put(program.read(pools, pages), self._host)
        for (_, host), content in zip(copies.out, leaving, strict=True):
            assert 0 <= host < len(self._contents), f"host page {host}"
            self._contents[host] = content
        for call, (program, part) in enumerate(self._calls(len(back))):
            self._bound(call, pools)
            pages = np.array([page for _, page in copies.back[part]], np.int32)
            contents = jax.device_put(tuple(back[part]), self._device)
            pools = tuple(
                pool
                for write, layers in program.writes
                for pool in write(pools[layers], contents, np.int32(layers.start), pages)
            )
        return pools, leaving

    def reset(self) -> None:
        """Forget every host page."""
        self._contents = [None] * len(self._contents)

    def _content(self, host: int) -> jax.Array:
        assert 0 <= host < len(self._contents), f"host page {host}"
        content = self._contents[host]
        assert content is not None, f"host page {host} was never written"
        return content

    def _calls(self, num_pages: int) -> Iterator[tuple[CopyProgram, slice]]:
        """Which program takes which of so many pages, largest first, so that none is padding."""
        done = 0
        for program in self._programs:
            while num_pages - done >= program.num_pages:
                yield program, slice(done, done + program.num_pages)
                done += program.num_pages
        assert done == num_pages

    def _bound(self, call: int, arrays: Any) -> None:
        """Wait for these before a call, so that no more than STAGED_CALLS are on their way."""
        if self._is_staged and call and call % STAGED_CALLS == 0:
            jax.block_until_ready(arrays)
