"""How many KV pages fit, and the proof that everything does: known before the server says that it
is ready."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.config import ConfigError

MIB = 1 << 20
CPU_POOL_BYTES = 512 * MIB  # a default that leaves a laptop usable; --num-pages overrides it
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may use (cgroup v2)
DEVICE_SHARE = 0.9  # of an accelerator's memory; the rest is for its libraries and fragmentation


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on the device. `limit` is what the device has (on CPU the machine's memory)."""

    weights: int
    pool: int
    temp: int  # the largest of any executable
    limit: int

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

    def __str__(self) -> str:
        return (
            f"weights {self.weights / MIB:.0f} MiB + KV pool {self.pool / MIB:.0f} MiB + largest "
            f"temporary {self.temp / MIB:.0f} MiB = {self.total / MIB:.0f} MiB of "
            f"{self.limit / MIB:.0f} MiB"
        )


Device = Any  # jax.Device, which type checkers see as a variable


def memory_limit(device: Device) -> int:
    """Bytes that this process may use on a device."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] * DEVICE_SHARE)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def default_pool_bytes(device: Device, weights: int, temp: int) -> int:
    """What the pool may take when nobody says: all that is left of an accelerator, a modest part of
    a CPU."""
    room = memory_limit(device) - weights - temp
    return room if device.platform != "cpu" else min(room // 2, CPU_POOL_BYTES)


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX or Arm's BF16)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
