"""How many KV pages fit on the device and in host memory, and the proof that everything does: known
before the server says that it is ready."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.config import ConfigError, EngineConfig

MIB = 1 << 20
CPU_POOL_BYTES = 512 * MIB  # a default that leaves a laptop usable; --num-pages overrides it
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may use (cgroup v2)
MEMINFO = Path("/proc/meminfo")
DEVICE_SHARE = 0.9  # of an accelerator's memory; the rest is for its libraries and fragmentation
HOST_SHARE = 0.25  # of the machine's free memory, for the host tier
PINNED_BYTES = 48 << 30  # XLA's pool of pinned memory, which other transfers use too, holds 64 GiB


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes. `limit` is what weights, pool and temporaries may take of the device (on CPU of the
    machine's memory), `host_limit` what the machine has for the host tier beside them."""

    weights: int
    pool: int
    temp: int  # the largest of any executable
    limit: int
    host: int = 0
    host_limit: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.temp

    def check(self) -> None:
        """Raises ConfigError when the parts don't fit: nothing may be found out while serving."""
        if self.total > self.limit:
            raise ConfigError(
                "num_pages",
                f"{self}: it does not fit this device; use fewer pages or a smaller model",
            )
        if self.host > self.host_limit:
            raise ConfigError(
                "num_host_pages",
                f"{self} of {self.host_limit / MIB:.0f} MiB: use fewer host pages",
            )

    def __str__(self) -> str:
        host = f"; host tier {self.host / MIB:.0f} MiB" if self.host else ""
        return (
            f"weights {self.weights / MIB:.0f} MiB + KV pool {self.pool / MIB:.0f} MiB + largest "
            f"temporary {self.temp / MIB:.0f} MiB = {self.total / MIB:.0f} MiB of "
            f"{self.limit / MIB:.0f} MiB{host}"
        )


Device = Any  # jax.Device, which type checkers see as a variable


def memory_limit(device: Device, fraction: float | None = None) -> int:
    """Bytes that weights, pool and temporaries may take: this fraction of the device's memory. By
    default most of an accelerator's, and all that a CPU has."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] * (fraction or DEVICE_SHARE))
    return int(_machine_memory() * (fraction or 1.0))


def host_limit(device: Device, total: int) -> int:
    """Bytes that the host tier may take when `total` lie on the device."""
    return _machine_memory() - total if device.platform == "cpu" else _machine_memory()


def default_pool_bytes(device: Device, fraction: float | None, taken: int) -> int:
    """What the pool may take when nobody says how many pages; `taken` are weights and temporaries.
    All that is left of an accelerator, or of a fraction; a modest part of a CPU's."""
    room = memory_limit(device, fraction) - taken
    return room if device.platform != "cpu" or fraction else min(room // 2, CPU_POOL_BYTES)


def default_host_bytes(device: Device, pool: int) -> int:
    """What the host tier may take when nobody says; the pool is not allocated yet."""
    if device.platform != "cpu":
        return min(int(_free_memory() * HOST_SHARE), PINNED_BYTES)
    return max(0, int((_free_memory() - pool) * HOST_SHARE))


class TierSizes(NamedTuple):
    num_pages: int
    num_host_pages: int


def size_tiers(
    config: EngineConfig,
    device: Device,
    *,
    weights: int,
    page_bytes: int,
    useful_pages: int,
    largest_temp: Callable[[], int],
) -> TierSizes:
    """Pages of the pool and of the host tier, from memory where the config does not say.

    weights and page_bytes (of all layers) are bytes; more than useful_pages can't be filled;
    largest_temp gives bytes, and takes long. Raises ConfigError for what can't fit.
    """
    fraction, num_pages = config.memory_fraction, config.num_pages
    if num_pages is None:
        # the default for a CPU leaves so much that temporaries don't matter
        temp = largest_temp() if device.platform != "cpu" or fraction else 0
        room = default_pool_bytes(device, fraction, weights + temp)
        num_pages = min(room // page_bytes - 1, useful_pages)  # page 0 is reserved
        if num_pages < 1:
            raise ConfigError(
                "num_pages" if fraction is None else "memory_fraction",
                f"the weights leave no room for a KV page of {page_bytes} bytes on this device",
            )
    pool, limit = (num_pages + 1) * page_bytes, memory_limit(device, fraction)
    if pool + weights > limit:
        raise ConfigError(
            "num_pages",
            f"{num_pages} pages of {page_bytes} bytes and {weights} bytes of weights exceed this "
            f"device's {limit} bytes",
        )
    num_host_pages, room = config.num_host_pages, host_limit(device, pool + weights)
    if num_host_pages is None:
        room = min(room, default_host_bytes(device, pool))
        num_host_pages = min(num_pages, room // page_bytes)
    if num_host_pages * page_bytes > room:
        raise ConfigError(
            "num_host_pages",
            f"{num_host_pages} pages of {page_bytes} bytes exceed this machine's {room} bytes",
        )
    return TierSizes(num_pages, num_host_pages)


def _machine_memory() -> int:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def _free_memory() -> int:
    """What the machine can give without swapping."""
    try:
        values = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        free = int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):  # not Linux
        return _machine_memory()
    return min(free, _machine_memory())


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX or Arm's BF16)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
