"""The proof of memory: its arithmetic, what is taken when nobody says, and what is refused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.runtime import memory
from jaxserve.runtime.memory import MIB, MemoryReport, TierSizes, memory_limit, size_tiers

GIB = 1 << 30


@dataclass
class FakeDevice:
    platform: str = "cpu"
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


CPU, GPU = FakeDevice(), FakeDevice("gpu", {"bytes_limit": 20 * GIB})


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """A container of 8 GiB on a machine of 16, of which 4 GiB are free."""
    sysconf = {"SC_PHYS_PAGES": 16 * GIB, "SC_PAGE_SIZE": 1}
    limit, meminfo = tmp_path / "memory.max", tmp_path / "meminfo"
    limit.write_text(f"{8 * GIB}\n")
    meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable:    {4 * GIB // 1024} kB\nHugepages: 0\n")
    monkeypatch.setattr(memory, "CGROUP_LIMIT", limit)
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(os, "sysconf", sysconf.__getitem__)
    return sysconf


def sizes(device: FakeDevice = CPU, *, temp: int | None = None, **settings: Any) -> TierSizes:
    """For weights of 1 GiB and pages of 1 MiB. temp: what largest_temp gives; None: not asked."""

    def largest_temp() -> int:
        assert temp is not None, "asked for what takes long"
        return temp

    return size_tiers(
        EngineConfig(**settings),
        device,
        weights=GIB,
        page_bytes=MIB,
        useful_pages=30_000,
        largest_temp=largest_temp,
    )


def test_the_report_adds_up_and_says_so() -> None:
    report = MemoryReport(5 * MIB, 3 * MIB, 2 * MIB, limit=11 * MIB, host=4 * MIB, host_limit=GIB)
    report.check()
    assert report.total == 10 * MIB
    assert str(report) == (
        "weights 5 MiB + KV pool 3 MiB + largest temporary 2 MiB = 10 MiB of 11 MiB; "
        "host tier 4 MiB"
    )
    assert "host" not in str(MemoryReport(1, 2, 3, limit=6))


def test_the_report_refuses_what_does_not_fit() -> None:
    MemoryReport(5, 3, 2, limit=10, host=4, host_limit=4).check()
    with pytest.raises(ConfigError, match=r"^num_pages: weights .* does not fit this device"):
        MemoryReport(5, 3, 3, limit=10).check()
    with pytest.raises(ConfigError, match=r"^num_host_pages: weights .*host tier 5 MiB of 4 MiB"):
        MemoryReport(5, 3, 2, limit=10, host=5 * MIB, host_limit=4 * MIB).check()


def test_limits() -> None:
    assert memory_limit(GPU) == int(20 * GIB * 0.9)
    assert memory_limit(GPU, 0.5) == 10 * GIB
    assert memory_limit(CPU) == 8 * GIB
    assert memory_limit(CPU, 0.5) == 4 * GIB
    memory.CGROUP_LIMIT.write_text("max\n")
    assert memory_limit(CPU) == 16 * GIB


def test_the_host_tier_is_as_large_as_the_pool_where_a_quarter_of_free_memory_holds_it() -> None:
    assert sizes(num_pages=192) == (192, 192)
    # the pool will be allocated, and then a quarter is left of (4 GiB - 2049 MiB)
    assert sizes(num_pages=2048) == (2048, 511)
    assert sizes(GPU, num_pages=2048) == (2048, 1024)
    memory.MEMINFO.unlink()  # no such file: all of the machine's memory counts as free
    assert sizes(GPU, num_pages=2048) == (2048, 2048)


def test_the_host_tier_can_be_given_or_turned_off() -> None:
    assert sizes(num_pages=100, num_host_pages=0) == (100, 0)
    assert sizes(num_pages=100, num_host_pages=700) == (100, 700)
    # 8 GiB without weights and pool
    assert sizes(num_pages=99, num_host_pages=7 * 1024 - 100) == (99, 7 * 1024 - 100)
    with pytest.raises(ConfigError, match=r"^num_host_pages: 7069 pages .* exceed this machine's"):
        sizes(num_pages=99, num_host_pages=7 * 1024 - 99)
    assert sizes(GPU, num_pages=99, num_host_pages=8 * 1024) == (99, 8 * 1024)
    with pytest.raises(ConfigError, match=r"^num_host_pages: 8193 pages"):
        sizes(GPU, num_pages=99, num_host_pages=8 * 1024 + 1)


def test_an_accelerators_host_tier_is_bounded_by_what_can_be_pinned(
    machine: dict[str, int],
) -> None:
    machine["SC_PHYS_PAGES"] = 400 * GIB
    memory.CGROUP_LIMIT.write_text("max")
    memory.MEMINFO.unlink()
    assert memory.default_host_bytes(GPU, 0) == 48 * GIB
    assert memory.default_host_bytes(CPU, 0) == 100 * GIB


def test_the_pool_is_sized_from_memory() -> None:
    """One page is reserved. Temporaries count except on a CPU, where half and more stays free."""
    assert sizes(num_host_pages=0).num_pages == 511
    assert sizes(GPU, temp=GIB, num_host_pages=0).num_pages == 16 * 1024 - 1
    memory.CGROUP_LIMIT.write_text(f"{GIB + 10 * MIB}")
    assert sizes(num_host_pages=0).num_pages == 4
    memory.CGROUP_LIMIT.write_text(f"{GIB + 2 * MIB}")
    with pytest.raises(ConfigError, match="num_pages: the weights leave no room for a KV page"):
        sizes()


@pytest.mark.parametrize(("device", "limit"), [(CPU, 8 * GIB), (GPU, 20 * GIB)])
def test_weights_pool_and_temporaries_take_the_fraction(device: FakeDevice, limit: int) -> None:
    temp = 300 * MIB
    num_pages, _ = sizes(device, temp=temp, memory_fraction=0.5)
    report = MemoryReport(GIB, (num_pages + 1) * MIB, temp, limit=memory_limit(device, 0.5))
    report.check()
    assert limit // 2 - MIB < report.total <= limit // 2
    with pytest.raises(ConfigError, match="memory_fraction: the weights leave no room"):
        sizes(device, temp=temp, memory_fraction=0.05)
    with pytest.raises(ConfigError, match=r"^num_pages: 10000 pages .* exceed this device's"):
        sizes(device, num_pages=10_000, memory_fraction=0.5)


def test_a_pool_that_nobody_can_fill_is_not_allocated() -> None:
    large = FakeDevice("gpu", {"bytes_limit": 140 * GIB})
    assert sizes(large, temp=0, num_host_pages=0).num_pages == 30_000


@pytest.mark.parametrize("value", [0, -0.1, 1.01, True, "half"])
def test_a_fraction_is_above_zero_and_at_most_one(value: Any) -> None:
    with pytest.raises(ConfigError, match="memory_fraction"):
        EngineConfig(memory_fraction=value)
